"""What a clean corpus is, in figures and examples."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.shards.shard_set import SPLITS
from spark_jobs.clean.deduplicate import PAST, Decisions
from spark_jobs.clean.near_duplicates import NearDuplicates
from spark_jobs.clean.prepared import FORGOTTEN, Prepared
from spark_jobs.runtime.parquet import read_table
from spark_jobs.settings import CleanCorpusSettings

EXAMPLE_CHARACTERS = 160


def corpus_stats(
    decisions: Decisions, near: NearDuplicates, settings: CleanCorpusSettings
) -> dict[str, Any]:
    documents = decisions.documents.filter(pc.invert(decisions.documents["past"]))
    rows = (
        documents.group_by(["reason", "source"])
        .aggregate([("bytes", "sum"), ("bytes", "count")])
        .to_pylist()
    )
    reasons = sorted({row["reason"] for row in rows if row["reason"]})

    def total(field: str, reason: str | None) -> int:
        return sum(row[f"bytes_{field}"] for row in rows if row["reason"] == reason)

    kept = total("count", None)
    dropped = {reason: total("count", reason) for reason in reasons}
    if not kept:
        raise UserError(_nothing_left(dropped, settings))
    sizes, counts = np.unique(decisions.cluster_sizes, return_counts=True)
    return {
        "documents": kept,
        "bytes": total("sum", None),
        "documents_read": documents.num_rows,
        "bytes_read": sum(row["bytes_sum"] for row in rows),
        "dropped": dropped,
        "dropped_bytes": {reason: total("sum", reason) for reason in reasons},
        "clusters": len(decisions.cluster_sizes),
        "repaired": int(np.sum(documents["repaired"].to_numpy())),
        "cluster_sizes": {str(s): int(c) for s, c in zip(sizes, counts, strict=True)},
        "sources": {
            row["source"]: row["bytes_count"]
            for row in sorted(rows, key=lambda row: str(row["source"]))
            if row["reason"] is None
        },
        **_splits(documents),
        "length_histogram": _length_histogram(decisions),
        "candidate_pairs": near.candidates,
        "verified_pairs": near.verified,
    }


def _splits(documents: pa.Table) -> dict[str, Any]:
    """`splits` and `slices` of the documents that stay."""
    kept = documents.filter(pc.is_null(documents["reason"]))
    groups = kept.group_by(["slice", "split"]).aggregate([([], "count_all")]).to_pylist()
    splits = {split: 0 for split in SPLITS}
    slices: dict[str, dict[str, int]] = {}
    for one in sorted(groups, key=lambda one: (one["slice"], one["split"])):
        splits[one["split"]] = splits.get(one["split"], 0) + one["count_all"]
        slices.setdefault(str(one["slice"]), {})[one["split"]] = one["count_all"]
    return {"splits": splits, "slices": slices}


def _length_histogram(decisions: Decisions) -> dict[str, int]:
    """Kept documents by length: the largest power of two not above it, to documents."""
    characters = decisions.documents["characters"].to_numpy()[decisions.stays]
    bounds, counts = np.unique(np.frexp(characters)[1] - 1, return_counts=True)
    return {str(2 ** int(b)): int(c) for b, c in zip(bounds, counts, strict=True)}


def _nothing_left(dropped: dict[str, int], settings: CleanCorpusSettings) -> str:
    counts = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.items())
    return (
        "No document is left after cleaning"
        + (f" ({counts})" if counts else ", since the raw corpus is empty")
        + f". Give `raw_corpus` more text, or lower `clean_corpus.minimum_characters` (now "
        f"{settings.minimum_characters})."
    )


def dropped_examples(
    decisions: Decisions, prepared: Prepared, count: int
) -> dict[str, list[dict[str, str]]]:
    """The first `count` dropped documents of each reason, by id, with the beginning of each."""
    documents = decisions.documents
    examples: dict[str, list[dict[str, str]]] = {}
    unshown = {None, PAST, FORGOTTEN}
    for reason in sorted({*pc.unique(documents["reason"]).to_pylist()} - unshown):
        numbers = np.flatnonzero(np.asarray(pc.equal(documents["reason"], reason).fill_null(False)))
        ids = documents["id"].take(pa.array(numbers)).combine_chunks()
        chosen = numbers[np.asarray(pc.sort_indices(ids))[:count]]
        examples[reason] = [_excerpt(int(number), decisions, prepared) for number in chosen]
    return examples


def _excerpt(number: int, decisions: Decisions, prepared: Prepared) -> dict[str, str]:
    part = int(np.searchsorted(prepared.offsets, number, side="right")) - 1
    # The part with one of the few examples, whose texts are read on the driver: tens of megabytes.
    texts = read_table(prepared.parts[part].url, ["text"])["text"]
    text = texts[number - int(prepared.offsets[part])].as_py()
    return {"id": decisions.documents["id"][number].as_py(), "text": text[:EXAMPLE_CHARACTERS]}
