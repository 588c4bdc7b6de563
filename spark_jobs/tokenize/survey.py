"""What there is to tokenize, and how often each document is seen.

How often is decided by hashes of the documents' ids. Validation and held-out documents are always
seen once: sampling them would change what is measured.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.shards.format import Split, in_split, token_dtype
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import JobRun, map_tasks
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
        """The number of copies of each document, by its `id`, its `source` and its `split`.

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
        # A weight of 2.3 takes each document twice, and about 30% of them a third time.
        whole, part = divmod(self.weights.get(source, 1.0), 1)
        return int(whole) + bool(part and _uniform("weight", identifier) < part)


def plan_mixing(
    settings: TokenizedShardsSettings,
    source_bytes: Mapping[str, int],
    source_documents: Mapping[str, int],
    bytes_per_token: Callable[[], float],
) -> tuple[Mixing, dict[str, Any]]:
    """Turn weights, budgets and shares into weights; also return a record for the manifest.

    Args:
        source_bytes, source_documents: training text by source.
        bytes_per_token: measures it on the parity sample; called only for a token budget.

    Raises:
        UserError: a source is named that the corpus does not have, shares cannot be reached, or a
            source would be seen too often.
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
            # A quota only bounds what is taken; a budget repeats documents until it is reached.
            weights[source] = min(1.0, mix.documents / source_documents[source])
        elif mix.bytes is not None:
            weights[source] = min(1.0, mix.bytes / source_bytes[source])
    weights |= _weights_of_shares(settings, source_bytes, weights)
    for source, weight in weights.items():
        if weight > MAXIMUM_WEIGHT:
            what = "share" if settings.mixing[source].share else "budget"
            raise UserError(
                f"For its {what} in `tokenized_shards.mixing`, the source {source!r} would be "
                f"seen {weight:,.0f} times, more than {MAXIMUM_WEIGHT:g}; give it a smaller "
                f"{what}."
            )
    # Rounded before it is used, so that the manifest states what was done.
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
            + " If all sources have a share, the shares must add up to 1; otherwise, to less."
        )
    if others:
        text = sum(source_bytes[source] * weights.get(source, 1.0) for source in others) / rest
    else:
        text = min((source_bytes[source] / share for source, share in shares.items()), default=0)
    return {source: share * text / source_bytes[source] for source, share in shares.items()}


def _uniform(purpose: str, identifier: str) -> float:
    # By purpose: a weight would otherwise fall on the very documents that a fraction took.
    digest = hashlib.blake2b(identifier.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") / 2**64


SAMPLE_DOCUMENTS = 200
"""On which gigatoken must agree with the Hugging Face tokenizer, from so many parts."""
SAMPLE_PARTS = 4
SAMPLE_CHARACTERS = 1_000_000

BYTES_PER_TOKEN = 4
"""Rough length of a token in text, which only decides into how many shards a split is cut."""


@dataclass(frozen=True)
class CorpusSurvey:
    """Counts and a sample of the clean corpus, taken before the long work."""

    sample: list[str]
    """Texts, the same ones for the same corpus."""
    documents: Counter[Split] = field(default_factory=Counter)
    bytes: Counter[Split] = field(default_factory=Counter)
    source_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of training text by source."""
    source_documents: Counter[str] = field(default_factory=Counter)
    """Training documents by source."""
    with_held_out: list[Part] = field(default_factory=list)
    """Parts with documents that are held out."""


def survey_parts(run: JobRun, parts: list[Part], settings: TokenizedShardsSettings) -> CorpusSurvey:
    """Read the corpus's small columns part by part, and a few of its texts."""
    surveys = map_tasks(run.spark, "surveying", parts, _survey_part, run.report)
    smallest = [survey["smallest_cluster"] for survey in surveys]
    found = CorpusSurvey(sample=_sample(parts, smallest))
    for part, survey in zip(parts, surveys, strict=True):
        for group in survey["groups"]:
            found.documents[group["split"]] += group["documents"]
            found.bytes[group["split"]] += group["bytes"]
            # Only training text is mixed.
            if group["split"] == "train":
                found.source_bytes[group["source"]] += group["bytes"]
                found.source_documents[group["source"]] += group["documents"]
        if any(group["split"] == "held_out" for group in survey["groups"]):
            found.with_held_out.append(part)
    return found


def _survey_part(part: Part) -> dict[str, Any]:
    """Of one part: `groups`, of each `split` and `source` the `documents` and their `bytes`; and
    its `smallest_cluster`."""
    table = part.read(["cluster", "source", "bytes", "split"])
    sums = table.group_by(["split", "source"]).aggregate([("bytes", "sum"), ("bytes", "count")])
    names = {"bytes_sum": "bytes", "bytes_count": "documents"}
    groups = sums.rename_columns([names.get(name, name) for name in sums.column_names])
    return {"groups": groups.to_pylist(), "smallest_cluster": pc.min(table["cluster"]).as_py()}


def _sample(parts: list[Part], smallest: list[str]) -> list[str]:
    """Texts from a few parts, both chosen by cluster ids, which are uniform hashes."""
    sampled = sorted(range(len(parts)), key=smallest.__getitem__)[:SAMPLE_PARTS]
    sample: list[str] = []
    for number in sampled:
        table = parts[number].read(["cluster", "text"]).sort_by("cluster")
        sample += table["text"][: -(-SAMPLE_DOCUMENTS // len(sampled))].to_pylist()
    sample = sample[:SAMPLE_DOCUMENTS]
    # Both tokenizers go through all of it on the driver (`choose_engine`), so it is bounded.
    while len(sample) > 1 and sum(map(len, sample)) > SAMPLE_CHARACTERS:
        sample.pop()
    return sample


def count_shards(
    survey: CorpusSurvey, mixing: Mixing, vocab_size: int, shard_bytes: int
) -> dict[Split, int]:
    """The number of shards of each split, by the size of its text, each source weighted."""
    token_bytes = 2 if token_dtype(vocab_size) == "uint16" else 4
    # Counted once each, sources of large weight would make shards as many times too large, and a
    # shard is in one task's memory.
    source_sizes = (
        size * mixing.weights.get(source, 1) for source, size in survey.source_bytes.items()
    )
    sizes: dict[Split, float] = {**survey.bytes, "train": sum(source_sizes)}
    return {
        split: max(1, round(size / BYTES_PER_TOKEN * token_bytes / shard_bytes))
        for split, size in sizes.items()
    }
