"""The next token of packed rows: of text, or of the answers in conversations."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.errors import UserError
from artifacts.model import end_of_turn, read_tokenizer
from artifacts.shards.format import ShardStats
from recipes.causal.settings import ExactMatchSettings, FineTuningSettings
from recipes.device import device_of
from recipes.evaluation.bits import as_served, generate, load_causal
from recipes.evaluation.documents import Documents, TokenizedDocument
from recipes.evaluation.results import SHOWN, ExampleScores, Scorer, samples
from recipes.evaluation.settings import Metric
from recipes.model import causal_model
from recipes.model.probe import check_trainable
from recipes.objective import Objective
from recipes.settings import TrainingSettings
from recipes.spec import TrainingSpec


@dataclass(frozen=True)
class AnswerScorer(Scorer):
    """Exact match of each conversation's last answer; everything before it is the prompt."""

    metric = Metric(name="exact_match", unit="exact match", higher_is_better=True, has_general=True)
    settings: ExactMatchSettings

    @property
    def identity(self) -> Any:
        return self.settings.model_dump(mode="json")

    def score(self, folder: Path, examples: Documents, stats: ShardStats) -> ExampleScores:
        model = load_causal(folder)
        tokenizer = read_tokenizer(folder)
        ends = model.generation_config.eos_token_id
        ends = {stats.end_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        # A chat template may end a turn with a token of its own.
        ends |= {*end_of_turn(tokenizer, stats.chat_template)}
        answers = [last_answer(example, stats.sequence_length, ends) for example in examples]
        prompts = [
            example.tokens[: at.start] for example, at in zip(examples, answers, strict=True)
        ]
        targets = [
            tokenizer.decode(example.tokens[at], skip_special_tokens=True)
            for example, at in zip(examples, answers, strict=True)
        ]
        outputs = generate(
            as_served(model),
            tokenizer,
            prompts,
            max_new_tokens=self.settings.new_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=stats.end_token_id,
        )
        matches = [
            final_answer(target, self.settings.after) == final_answer(output, self.settings.after)
            for target, output in zip(targets, outputs, strict=True)
        ]
        return ExampleScores(
            {self.metric.name: np.array(matches, float)},
            samples=samples(tokenizer, examples, prompts[:SHOWN], outputs),
        )


def last_answer(example: TokenizedDocument, sequence_length: int, ends: set[int]) -> slice:
    """The tokens of a conversation's last answer. A conversation that was cut to a row's length
    does not end in a token that ends an answer; of such a one, the last whole answer."""
    assert example.is_target is not None, "answers are marked"
    marks = np.concatenate([[False], example.is_target, [False]])
    edges = np.flatnonzero(marks[1:] != marks[:-1]).tolist()
    answers = [slice(*edge) for edge in zip(edges[::2], edges[1::2], strict=True)]
    tokens = example.tokens
    # Templates may put a line break after the end of a turn.
    is_cut = len(tokens) >= sequence_length - 1 and ends.isdisjoint(tokens[-2:].tolist())
    whole_answers = [answer for answer in answers if not is_cut or answer.stop < len(tokens)]
    return (whole_answers or answers)[-1]


def final_answer(text: str, after: str | None) -> str:
    """What of an answer is compared: all of it, or what comes after the last mark.

    Commas between digits and white space around it do not count; a text without the mark compares
    as a whole.
    """
    answer = text.rpartition(after)[2] if after else text
    return re.sub(r"(?<=\d),(?=\d)", "", answer).strip()


def load(spec: TrainingSpec) -> causal_model.TrainableModel:
    """The model that a spec describes, to be trained on packed rows."""
    folder = Path(spec.base_model_folder)
    if spec.training.starts_from == "random":
        model = causal_model.create_model(folder, spec.training.seed)
    else:
        # A decoder is divided over the workers before its weights are read, so that each worker
        # reads its own part. Another strategy, and adapters, need the whole model first.
        divided_first = spec.training.placement.strategy is None
        model = causal_model.load_model(
            folder, reads=spec.training.adapters is not None or not divided_first
        )
    model.export_form_of(spec.shards, folder)
    return model


def _check(model: causal_model.TrainableModel, spec: TrainingSpec) -> None:
    network = model.network
    if not isinstance(network, causal_model.TransformersNetwork):
        return
    usual = network.inner.config._attn_implementation
    by_blocks = device_of(network.head_weight.device).attends_by_blocks
    # Flex attention first, since it skips pairs of positions of different documents.
    if by_blocks and network.set_attention(causal_model.FLEX):
        try:
            return check_trainable(network, spec.shards.sequence_length)
        except UserError:
            # With the attention that is usual for it, the model may pass all the same.
            network.set_attention(usual)
    check_trainable(network, spec.shards.sequence_length)


def next_token(settings: TrainingSettings) -> Objective:
    """The objective of predicting the next token."""
    return Objective(load, check=_check)


def answers(settings: FineTuningSettings) -> Objective:
    """The same for answers alone; with `exact_match`, scored by how often the last one is right."""
    scorer = AnswerScorer(settings.exact_match) if settings.exact_match else None
    return Objective(load, check=_check, scorer=scorer)
