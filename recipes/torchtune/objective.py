"""Preferences: the answer that people chose should be the more likely of two answers to a
prompt."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artifacts.errors import UserError
from artifacts.model import read_tokenizer
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.causal.objective import next_token
from recipes.data.batch import IGNORED, ExampleBatch, read_rows, row_lengths
from recipes.device import local_device, mixed_precision
from recipes.evaluation.bits import load_causal, precision
from recipes.evaluation.documents import Documents
from recipes.evaluation.results import SHOWN, ExampleScores, Scorer, samples
from recipes.evaluation.settings import Metric
from recipes.objective import Objective
from recipes.torchtune.settings import TorchtuneSettings

BATCH_EXAMPLES = 8


@dataclass(frozen=True)
class PreferenceBatch(ExampleBatch):
    """The conversations that end with the chosen answers, then those with the rejected ones.

    Every tensor has the shape (2 * examples, longest conversation). The targets are the answers'
    tokens at their own places, `IGNORED` elsewhere.
    """

    @property
    def target_count(self) -> int:
        """How many examples there are, forgotten ones aside."""
        return int(self.is_example.sum())

    @property
    def token_count(self) -> int:
        """How many positions are not padding."""
        return int(self.is_input.sum())

    @property
    def pair_count(self) -> int:
        """How many pairs of positions attend: each with itself and those before it."""
        lengths = self.is_input.sum(dim=1)
        return int((lengths * (lengths + 1) // 2).sum())

    @property
    def is_example(self) -> torch.Tensor:
        """bool, shape (examples,): which have answers; those of forgotten texts have none."""
        return (self.targets != IGNORED).any(dim=1)[: len(self.targets) // 2]


def read_preferences(
    shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None
) -> PreferenceBatch:
    """Read rows of one example each; it is the same for any samples. Raises as `read_rows`."""
    stored = read_rows(shards, rows)
    assert stored.targets is not None, "rows of examples are marked"
    return lay_out(stored.tokens.astype(np.int64), stored.targets > 0, row_lengths(stored))


def lay_out(tokens: np.ndarray, is_answer: np.ndarray, lengths: np.ndarray) -> PreferenceBatch:
    """A batch of examples as they are stored: both conversations in one row, of shape (examples,
    width); what is past its length is padding."""
    count, width = tokens.shape
    is_answer = is_answer & (np.arange(width) < lengths[:, None])
    # The chosen answer is the first stretch of marks, and its conversation ends with it.
    followed = np.pad(is_answer[:, 1:], ((0, 0), (0, 1)))
    middle = np.minimum(np.argmax(is_answer & ~followed, axis=1) + 1, lengths)
    starts = np.concatenate([np.zeros_like(middle), middle])
    sizes = np.concatenate([middle, lengths - middle])
    places = np.arange(max(1, sizes.max()))
    is_input = places < sizes[:, None]
    rows = np.tile(np.arange(count), 2)[:, None]
    # Places past a row's end are read from its last column, and replaced below.
    columns = np.minimum(starts[:, None] + places, width - 1)
    laid_out = np.where(is_input, tokens[rows, columns], 0)
    targets = np.where(is_input & is_answer[rows, columns], laid_out, IGNORED)
    return PreferenceBatch(*map(torch.from_numpy, (laid_out, is_input, targets)))


class PreferenceScorer(Scorer):
    """Whether the chosen answer is the more likely one; by how many nats is shown beside it.

    Without a reference model, so that base, candidate and champion are measured alike. The margin
    of a candidate less that of its base is the margin of DPO's implicit rewards, at a beta of 1.
    """

    metric = Metric(
        name="preference_accuracy",
        unit="preference accuracy",
        higher_is_better=True,
        has_general=True,
    )

    def score(self, folder: Path, examples: Documents, stats: ShardStats) -> ExampleScores:
        model = load_causal(folder)
        margins = _margins(model, examples)
        if not np.isfinite(margins).all():
            raise UserError(f"The model in {folder} answers with numbers that are not finite.")
        return ExampleScores(
            {self.metric.name: (margins > 0).astype(float), "preference_margin": margins},
            samples=_samples(read_tokenizer(folder), examples, margins),
        )


@torch.inference_mode()
def _margins(model: Any, examples: Documents) -> np.ndarray:
    """By how many nats the chosen answer is the more likely one, shape (examples,)."""
    # Neighbors in this order are about equally long, so little of a batch is padding.
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
    """In nats, summed over each answer's tokens: shape (chosen and rejected, examples); logits are
    of shape (2 * examples, longest conversation, vocabulary)."""
    targets = batch.targets[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), targets, ignore_index=IGNORED, reduction="none"
    )
    return -losses.sum(dim=1).unflatten(0, (2, -1))


def _batch(examples: Documents) -> PreferenceBatch:
    lengths = np.array([len(example.tokens) for example in examples])
    shape = (len(examples), int(lengths.max()))
    tokens, is_answer = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for row, example in enumerate(examples):
        assert example.is_target is not None, "answers are marked"
        tokens[row, : lengths[row]] = example.tokens
        is_answer[row, : lengths[row]] = example.is_target
    return lay_out(tokens, is_answer, lengths)


def _samples(tokenizer: Any, examples: Documents, margins: np.ndarray) -> list[dict[str, str]]:
    """A few prompts, each with the answer that the model finds the more likely."""
    prompts, preferred = [], []
    for example, margin in zip(examples[:SHOWN], margins.tolist(), strict=False):
        batch = _batch([example])
        answer = batch.targets[0 if margin > 0 else 1]
        prompts.append(batch.tokens[0][: int((batch.targets[0] != IGNORED).int().argmax())].numpy())
        preferred.append(tokenizer.decode(answer[answer != IGNORED], skip_special_tokens=True))
    return samples(tokenizer, examples, prompts, preferred)


def objective(settings: TorchtuneSettings) -> Objective:
    """The objective of predicting the next token, or of preferring the chosen answer, by
    torchtune's own steps."""
    tune_objective = replace(next_token(settings), trainer="recipes.torchtune.trainer:TuneTrainer")
    if settings.is_preference:
        return replace(tune_objective, read_batch=read_preferences, scorer=PreferenceScorer())
    return tune_objective
