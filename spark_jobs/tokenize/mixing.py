"""How often each training document is seen, decided by hashes of its id.

Validation and held-out documents are always seen once: sampling them would change what is measured.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.shards.format import in_split
from spark_jobs.settings import MAXIMUM_WEIGHT, TokenizedShardsSettings

NOT_SAMPLED = "not_sampled"
"""Why a training document is in no shard: its source's weight, or the fraction, took others."""


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


def mark_not_sampled(documents: pa.Table, copies: np.ndarray) -> pa.Table:
    """The documents with `left_out` of those that are never seen, so that they are counted."""
    if copies.all():
        return documents
    why = pc.if_else(pa.array(copies == 0), NOT_SAMPLED, pa.scalar(None, pa.string()))
    column = documents.schema.get_field_index("left_out")
    return documents.set_column(column, "left_out", pc.coalesce(documents["left_out"], why))


def plan_mixing(
    settings: TokenizedShardsSettings,
    source_bytes: Mapping[str, int],
    source_documents: Mapping[str, int],
    bytes_per_token: Callable[[], float],
) -> tuple[Mixing, dict[str, Any]]:
    """The weights, budgets and shares turned into them, and a record of it for the manifest.

    Args:
        source_bytes, source_documents: training text by source.
        bytes_per_token: measures it on the parity sample, where a token budget needs it.

    Raises:
        UserError: a source is named that the corpus does not have, or shares cannot be reached.
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
        elif mix.documents is not None:
            weights[source] = min(1.0, mix.documents / source_documents[source])
        elif mix.bytes is not None:
            weights[source] = min(1.0, mix.bytes / source_bytes[source])
    weights |= _weights_of_shares(settings, source_bytes, weights)
    weights = {source: round(weight, 6) for source, weight in weights.items()}
    record = {"fraction": settings.fraction, "weights": dict(sorted(weights.items()))}
    return Mixing(weights, settings.fraction), record


def _weights_of_shares(
    settings: TokenizedShardsSettings,
    source_bytes: Mapping[str, int],
    weights: Mapping[str, float],
) -> dict[str, float]:
    """The weights of the sources that are given as shares of all training text.

    The other sources say how much text there is in all. Where there are none, it is as much as
    takes no document twice.
    """
    shares = {source: mix.share for source, mix in settings.mixing.items() if mix.share}
    others = source_bytes.keys() - shares.keys()
    rest = 1 - sum(shares.values())
    if bool(others) != (rest > 1e-9) and shares:
        raise UserError(
            f"The shares in `tokenized_shards.mixing` add up to {1 - rest:g}, "
            + (f"which leaves nothing for {min(others)!r}." if others else "and not to 1.")
            + " The shares of all sources have to make 1, those of some of them less."
        )
    if others:
        text = sum(source_bytes[one] * weights.get(one, 1.0) for one in others) / (rest or 1)
    else:
        text = min((source_bytes[one] / share for one, share in shares.items()), default=0)
    found = {source: share * text / source_bytes[source] for source, share in shares.items()}
    for source, weight in found.items():
        if weight > MAXIMUM_WEIGHT:
            raise UserError(
                f"For its share in `tokenized_shards.mixing`, the source {source!r} would be seen "
                f"{weight:,.0f} times, more than {MAXIMUM_WEIGHT:g}; give it a smaller share."
            )
    return found


def _uniform(purpose: str, identifier: str) -> float:
    digest = hashlib.blake2b(identifier.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") / 2**64
