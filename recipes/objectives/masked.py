"""Hidden tokens of a text, told by an encoder from those around them on both sides."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from recipes.data.batch import IGNORED
from recipes.data.masked_rows import hide, lay_out, read_masked
from recipes.device import local_device
from recipes.evaluation.documents import Document
from recipes.evaluation.examples import ExampleScores
from recipes.evaluation.metric import Metric
from recipes.evaluation.models import as_served
from recipes.model.causal_model import TrainableModel
from recipes.model.example_networks import MaskedNetwork, load_masked
from recipes.objectives.objective import Objective
from recipes.spec import TrainingSpec

BATCH_TEXTS = 16
SAMPLES = 2


def _load(spec: TrainingSpec) -> TrainableModel:
    return load_masked(Path(spec.base_model_folder))


def _check(model: TrainableModel, spec: TrainingSpec) -> None:
    """Refuse rows for which the model has no positions; find out whether texts can share one."""
    network = model.network
    assert isinstance(network, MaskedNetwork)
    most = getattr(network.inner.config, "max_position_embeddings", math.inf)
    positions = most - network.first_position
    if spec.shards.sequence_length > positions:
        raise UserError(
            f"Rows of {spec.shards.sequence_length} tokens are longer than the {positions} that "
            "the base model has positions for. Set a smaller `tokenized_shards.sequence_length`."
        )
    network.try_packed_rows(spec.shards.sequence_length)


@dataclass(frozen=True)
class MaskedScorer:
    """Bits that a model needs for a hidden token, averaged over each document."""

    @property
    def metric(self) -> Metric:
        return Metric(name="bits_per_masked_token", unit="bits per masked token", has_general=True)

    @property
    def identity(self) -> Any:
        return {}

    @torch.inference_mode()
    def score(self, folder: Path, examples: Sequence[Document], stats: ShardStats) -> ExampleScores:
        """The scores of a model; the same tokens are hidden from every model."""
        try:
            network = load_masked(folder).network
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"The model in {folder} cannot be read: {error}") from error
        assert isinstance(network, MaskedNetwork)
        as_served(network.eval().to(local_device()))
        windows = [
            (number, *hide(tokens, stats, _sample(example.id, part)))
            for number, example in enumerate(examples)
            for part, tokens in enumerate(_cut(example.tokens, stats.sequence_length))
        ]
        bits, told = np.zeros(len(examples)), np.zeros(len(examples))
        for first in range(0, len(windows), BATCH_TEXTS):
            numbers, *texts = zip(*windows[first : first + BATCH_TEXTS], strict=True)
            batch = lay_out(list(zip(*texts, strict=True)))
            losses = network.losses(batch.to(local_device())).double().cpu().numpy()
            counts = (batch.targets != IGNORED).sum(dim=1).numpy()
            np.add.at(bits, np.repeat(numbers, counts), losses / math.log(2))
            np.add.at(told, list(numbers), counts)
        return ExampleScores(
            {self.metric.name: bits / told},
            {"perplexity": float(2.0 ** (bits.sum() / told.sum()))},
            [],
        )


def _sample(document: str, part: int) -> int:
    digest = hashlib.blake2b(f"{document}\0{part}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _cut(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


def _scorer(settings: Any) -> MaskedScorer:
    return MaskedScorer()


MASKED = Objective(_load, read_masked, _check, _scorer)
