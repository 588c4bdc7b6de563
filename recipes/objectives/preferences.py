"""Of two answers to a prompt, the one that people chose: told by which is the more likely."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artifacts.errors import UserError
from artifacts.model.hugging_face import read_tokenizer
from artifacts.shards.format import ShardStats
from recipes.data.batch import IGNORED
from recipes.data.preference_rows import PreferenceBatch, lay_out, read_preferences
from recipes.device import local_device, mixed_precision
from recipes.evaluation.bits import text_bits
from recipes.evaluation.documents import Document, check_vocabulary
from recipes.evaluation.examples import ExampleScores
from recipes.evaluation.metric import BITS_PER_BYTE, Metric
from recipes.evaluation.models import load_model, precision
from recipes.objectives.causal import NEXT_TOKEN
from recipes.objectives.objective import Objective

BATCH_EXAMPLES = 8
SAMPLES = 2


@dataclass(frozen=True)
class PreferenceScorer:
    """Whether the chosen answer is the more likely one; by how many nats is shown beside it.

    Without a reference model, so that base, candidate and champion are measured alike. The margin
    of a candidate less that of its base is the margin of DPO's implicit rewards, at a beta of 1.
    """

    @property
    def metric(self) -> Metric:
        return Metric(
            name="preference_accuracy",
            unit="preference accuracy",
            higher_is_better=True,
            has_general=True,
        )

    @property
    def identity(self) -> Any:
        return {}

    def score(self, folder: Path, examples: Sequence[Document], stats: ShardStats) -> ExampleScores:
        model = load_model(folder)
        check_vocabulary(examples, model.config.vocab_size, str(folder))
        if examples[0].is_target is None:
            # A row holds two conversations.
            bits = text_bits(model, examples, stats.sequence_length // 2)
            return ExampleScores({BITS_PER_BYTE.name: bits})
        margins = _margins(model, examples)
        if not np.isfinite(margins).all():
            raise UserError(f"The model in {folder} answers with numbers that are not finite.")
        return ExampleScores(
            {self.metric.name: (margins > 0).astype(float), "preference_margin": margins},
            samples=_samples(read_tokenizer(folder), examples[:SAMPLES], margins),
        )


@torch.inference_mode()
def _margins(model: Any, examples: Sequence[Document]) -> np.ndarray:
    """By how many nats the chosen answer is the more likely one, shape (examples,)."""
    order = sorted(range(len(examples)), key=lambda number: -len(examples[number].tokens))
    margins = np.empty(len(examples))
    with mixed_precision(precision(), local_device()):
        for first in range(0, len(order), BATCH_EXAMPLES):
            numbers = order[first : first + BATCH_EXAMPLES]
            batch = _batch([examples[number] for number in numbers]).to(local_device())
            logits = model(batch.tokens, attention_mask=batch.is_input.long()).logits
            chosen, rejected = answer_log_probabilities(logits, batch).cpu().numpy()
            margins[numbers] = chosen - rejected
    return margins


def answer_log_probabilities(logits: torch.Tensor, batch: PreferenceBatch) -> torch.Tensor:
    """In nats, summed over each answer's tokens: shape (chosen and rejected, examples).

    Args:
        logits: of the batch's tokens, shape (2 * examples, longest conversation, vocabulary).
    """
    targets = batch.targets[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), targets, ignore_index=IGNORED, reduction="none"
    )
    return -losses.sum(dim=1).unflatten(0, (2, -1))


def _batch(examples: Sequence[Document]) -> PreferenceBatch:
    lengths = np.array([len(example.tokens) for example in examples])
    shape = (len(examples), int(lengths.max()))
    tokens, is_answer = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for row, example in enumerate(examples):
        assert example.is_target is not None, "answers are marked"
        tokens[row, : lengths[row]] = example.tokens
        is_answer[row, : lengths[row]] = example.is_target
    return lay_out(tokens, is_answer, lengths)


def _samples(
    tokenizer: Any, examples: Sequence[Document], margins: np.ndarray
) -> list[dict[str, str]]:
    """A few prompts, each with the answer that the model finds the more likely."""
    found = []
    for example, margin in zip(examples, margins.tolist(), strict=False):
        batch = _batch([example])
        preferred = batch.targets[0 if margin > 0 else 1]
        prompt = batch.tokens[0][: int((batch.targets[0] != IGNORED).int().argmax())]
        texts = [
            tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
            for tokens in (prompt, preferred[preferred != IGNORED])
        ]
        found.append({"document": example.id, "prompt": texts[0], "completion": texts[1]})
    return found


def _scorer(settings: Any) -> PreferenceScorer:
    return PreferenceScorer()


PREFERENCES = Objective(NEXT_TOKEN.load, read_preferences, scorer=_scorer)
