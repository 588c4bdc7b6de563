"""What a clean corpus is, in figures and examples."""

from typing import Any

from artifacts.errors import UserError
from artifacts.shards.format import SPLITS
from spark_jobs.clean.decide.decider import Outcome
from spark_jobs.clean.decide.documents import DocumentPart
from spark_jobs.settings import CleanCorpusSettings

EXAMPLE_CHARACTERS = 160


def corpus_stats(outcome: Outcome, settings: CleanCorpusSettings) -> dict[str, Any]:
    """The stats of the manifest, as `job.run` describes them."""
    rows = outcome.fates.to_pylist()
    reasons = sorted({row["reason"] for row in rows if row["reason"]})

    def total(field: str, reason: str | None) -> int:
        return sum(row[field] for row in rows if row["reason"] == reason)

    kept = total("documents", None)
    dropped = {reason: total("documents", reason) for reason in reasons}
    if not kept:
        raise UserError(_nothing_left(dropped, settings))
    return {
        "documents": kept,
        "bytes": total("bytes", None),
        "documents_read": sum(row["documents"] for row in rows),
        "bytes_read": sum(row["bytes"] for row in rows),
        "dropped": dropped,
        "dropped_bytes": {reason: total("bytes", reason) for reason in reasons},
        "repaired": sum(row["repaired"] for row in rows),
        "cluster_sizes": {str(s): count for s, count in sorted(outcome.cluster_sizes.items())},
        "sources": {
            row["source"]: row["documents"]
            for row in sorted(rows, key=lambda row: str(row["source"]))
            if row["reason"] is None
        },
        **_splits(outcome.slices.to_pylist()),
        "length_histogram": {str(2**e): count for e, count in sorted(outcome.lengths.items())},
        "candidate_pairs": outcome.candidates,
        "verified_pairs": outcome.verified,
    }


def _splits(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """`splits` and `slices` of the documents that stay."""
    splits = {split: 0 for split in SPLITS}
    slices: dict[str, dict[str, int]] = {}
    for one in sorted(groups, key=lambda one: (one["slice"], one["split"])):
        splits[one["split"]] = splits.get(one["split"], 0) + one["documents"]
        slices.setdefault(str(one["slice"]), {})[one["split"]] = one["documents"]
    return {"splits": splits, "slices": slices}


def _nothing_left(dropped: dict[str, int], settings: CleanCorpusSettings) -> str:
    counts = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.items())
    return (
        "No document is left after cleaning"
        + (f" ({counts})" if counts else ", since the raw corpus is empty")
        + f". Give `raw_corpus` more text, or lower `clean_corpus.minimum_characters` (now "
        f"{settings.minimum_characters})."
    )


def dropped_examples(
    outcome: Outcome, parts: list[DocumentPart]
) -> dict[str, list[dict[str, str]]]:
    """The examples of each reason, with the beginning of each."""
    return {
        reason: [
            # The part with one of the few examples is read on the driver: tens of megabytes.
            {"id": one.id, "text": _beginning(parts[one.part], one.row)}
            for one in examples
        ]
        for reason, examples in outcome.examples.items()
    }


def _beginning(part: DocumentPart, row: int) -> str:
    texts = part.prepared.read(["text"])["text"]
    text: str = texts[row].as_py()
    return text[:EXAMPLE_CHARACTERS]
