"""How often each training document is seen, decided by hashes of its id.

Validation and held-out documents are always seen once: sampling them would change what is measured.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.errors import UserError
from artifacts.shards.format import in_split
from spark_jobs.settings import TokenizedShardsSettings


@dataclass(frozen=True)
class Mixing:
    """The weights of one run."""

    weights: dict[str, float]
    """Source name to times seen; sources not named are seen once."""
    fraction: float

    def copies(self, documents: pa.Table) -> np.ndarray:
        """How often each document is seen, by its `id`, its `source` and its `split`.

        The fraction is applied to the documents, then the weight. A larger fraction or weight keeps
        what a smaller one took.
        """
        copies = np.ones(documents.num_rows, np.int64)
        if self.fraction < 1 or self.weights:
            for number in np.flatnonzero(in_split(documents, "train")).tolist():
                row = documents["id"][number].as_py(), documents["source"][number].as_py()
                copies[number] = self._copies(*row)
        return copies

    def _copies(self, identifier: str, source: str) -> int:
        if self.fraction < 1 and _uniform("fraction", identifier) >= self.fraction:
            return 0
        whole, part = divmod(self.weights.get(source, 1.0), 1)
        return int(whole) + bool(part and _uniform("weight", identifier) < part)


def plan_mixing(
    settings: TokenizedShardsSettings,
    source_bytes: Mapping[str, int],
    bytes_per_token: Callable[[], float],
) -> tuple[Mixing, dict[str, Any]]:
    """The weights, token budgets turned into them, and a record of it for the manifest.

    Args:
        source_bytes: training text by source.
        bytes_per_token: measures it on the parity sample, where a token budget needs it.

    Raises:
        UserError: a source is named that the corpus does not have.
    """
    unknown = sorted(settings.mixing.keys() - source_bytes.keys())
    if unknown:
        raise UserError(
            f"`tokenized_shards.mixing` names the source {unknown[0]!r}, which has no training "
            f"text; the sources are {', '.join(sorted(source_bytes))}."
        )
    weights = {}
    for source, mix in settings.mixing.items():
        weights[source] = mix.weight
        if mix.token_budget is not None:
            weights[source] = mix.token_budget * bytes_per_token() / source_bytes[source]
    weights = {source: round(weight, 6) for source, weight in weights.items()}
    record = {"fraction": settings.fraction, "weights": dict(sorted(weights.items()))}
    return Mixing(weights, settings.fraction), record


def _uniform(purpose: str, identifier: str) -> float:
    digest = hashlib.blake2b(identifier.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") / 2**64
