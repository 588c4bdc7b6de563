"""What a causal model answers in held-out conversations, scored by exact match."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artifacts.model.hugging_face import read_tokenizer
from artifacts.shards.format import ShardStats
from recipes.device import local_device
from recipes.evaluation.bits import text_bits
from recipes.evaluation.documents import Document, check_vocabulary
from recipes.evaluation.examples import ExampleScores
from recipes.evaluation.metric import BITS_PER_BYTE, Metric
from recipes.evaluation.models import as_served, load_model
from recipes.settings.recipe import ExactMatchSettings

BATCH_EXAMPLES = 8
SAMPLES = 2


@dataclass(frozen=True)
class AnswerScorer:
    """Exact matches of the last answer of each conversation, all before it being given."""

    settings: ExactMatchSettings

    @property
    def metric(self) -> Metric:
        return Metric(
            name="exact_match", unit="exact match", higher_is_better=True, has_general=True
        )

    @property
    def identity(self) -> Any:
        return self.settings.model_dump(mode="json")

    def score(self, folder: Path, examples: Sequence[Document], stats: ShardStats) -> ExampleScores:
        model = load_model(folder)
        check_vocabulary(examples, model.config.vocab_size, str(folder))
        if examples[0].is_target is None:
            return ExampleScores(
                {BITS_PER_BYTE.name: text_bits(model, examples, stats.sequence_length)}
            )
        tokenizer = read_tokenizer(folder)
        starts = [answer_start(example) for example in examples]
        given = [example.tokens[:at] for example, at in zip(examples, starts, strict=True)]
        wanted = [
            tokenizer.decode(example.tokens[at:], skip_special_tokens=True)
            for example, at in zip(examples, starts, strict=True)
        ]
        written = _write(as_served(model), tokenizer, given, self.settings.new_tokens, stats)
        matches = [
            final_answer(one, self.settings.after) == final_answer(other, self.settings.after)
            for one, other in zip(wanted, written, strict=True)
        ]
        samples = [
            {
                "document": example.id,
                "prompt": tokenizer.decode(prompt, skip_special_tokens=True),
                "completion": text,
            }
            for example, prompt, text in list(zip(examples, given, written, strict=True))[:SAMPLES]
        ]
        return ExampleScores({self.metric.name: np.array(matches, float)}, samples=samples)


def answer_start(example: Document) -> int:
    """The place of the first token of a conversation's last answer."""
    assert example.is_target is not None, "answers are marked"
    return int(np.flatnonzero(~example.is_target)[-1]) + 1


def final_answer(text: str, after: str | None) -> str:
    """What of an answer is compared: all of it, or what comes after the last mark.

    Commas between digits and white space around it do not count; a text without the mark compares
    as a whole.
    """
    found = text.rpartition(after)[2] if after else text
    return re.sub(r"(?<=\d),(?=\d)", "", found).strip()


@torch.inference_mode()
def _write(
    model: Any, tokenizer: Any, given: Sequence[np.ndarray], new_tokens: int, stats: ShardStats
) -> list[str]:
    """What the model says after each of some tokens, those of about one length in a batch."""
    ends = model.generation_config.eos_token_id
    ends = {stats.end_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    order = sorted(range(len(given)), key=lambda number: -len(given[number]))
    written = [""] * len(given)
    for first in range(0, len(order), BATCH_EXAMPLES):
        numbers = order[first : first + BATCH_EXAMPLES]
        width = len(given[numbers[0]])
        tokens = torch.full((len(numbers), width), stats.end_token_id)
        mask = torch.zeros_like(tokens)
        for row, number in enumerate(numbers):
            # Padding stands before, so that all go on from the last place.
            tokens[row, width - len(given[number]) :] = torch.from_numpy(given[number])
            mask[row, width - len(given[number]) :] = 1
        outputs = model.generate(
            tokens.to(local_device()),
            attention_mask=mask.to(local_device()),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=stats.end_token_id,
        )
        texts = tokenizer.batch_decode(outputs[:, width:], skip_special_tokens=True)
        for number, text in zip(numbers, texts, strict=True):
            written[number] = text
    return written
