"""What the UI shows of the stages of the corpus."""

from collections.abc import Mapping
from typing import Any

from artifacts.store.store import Artifact
from llm_assets.assets import figures
from llm_assets.assets.stage import table
from spark_jobs.read.opened import Unread


def corpus_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    dropped = stats.get("dropped", {})
    return {
        "summary": f"{stats['documents']:,} documents, {stats['bytes'] / 1e6:.1f} MB",
        "documents": stats["documents"],
        "bytes": stats["bytes"],
        "dropped_documents": sum(dropped.values()),
        "dropped": table(["reason", "documents"], dropped.items()),
    }


def passed_over(stats: Mapping[str, Any]) -> list[str]:
    """What was found and is not in the corpus, in words; nothing where there is none."""
    lines = [f"Set aside: {fault}" for fault in stats["faults"]]
    if stats["unread"]:
        lines.insert(0, f"Not read: {Unread(stats['unread'], stats['unread_examples'])}")
    return lines


def source_metadata(artifact: Artifact) -> dict[str, Any]:
    stats = artifact.stats
    examples = stats["unread_examples"]
    unread = [(kind, count, ", ".join(examples[kind])) for kind, count in stats["unread"].items()]
    sources = [(name, one["documents"], one["bytes"]) for name, one in stats["sources"].items()]
    return {
        "not_read": sum(stats["unread"].values()),
        "not_read_by_kind": table(["kind", "files", "such as"], unread),
        "set_aside": table(["document", ""], [(fault, "") for fault in stats["faults"]]),
        "repeated_ids": stats["repeated_ids"],
        "pinned_files": stats.get("pinned_files", 0),
        "sources": table(["source", "documents", "bytes"], sources),
    }


def clean_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    examples = [
        (reason, example["id"], " ".join(example["text"].split()))
        for reason, found in stats["dropped_examples"].items()
        for example in found
    ]
    sizes = {int(size): count for size, count in stats["cluster_sizes"].items()}
    lengths = {int(length): count for length, count in stats["length_histogram"].items()}
    repeated = stats.get("repeated_spans")
    looked_for = {"repeated_spans": table(["in all", ""], repeated.items())} if repeated else {}
    if labels := stats.get("labels"):
        rows = [(name, *row) for name, found in labels.items() for row in found.items()]
        looked_for["labels"] = table(["classifier", "label", "documents"], rows)
    return (
        corpus_metadata(stats)
        | looked_for
        | {
            "splits": table(["split", "documents"], stats["splits"].items()),
            "arrived": table(
                ["slice", "held out", "validation", "training"],
                (
                    (
                        number,
                        *(found.get(split, 0) for split in ("held_out", "validation", "train")),
                    )
                    for number, found in stats["slices"].items()
                ),
            ),
            "dropped_examples": table(["reason", "document", "begins with"], examples),
            "cluster_sizes": figures.bars(
                "Duplicate clusters by size", "documents in the cluster", "clusters", sizes
            ),
            "lengths": figures.bars(
                "Documents by length", "characters, from this many on", "documents", lengths
            ),
        }
    )


def shard_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        (split, stats["documents"][split], stats["tokens"][split], stats["rows"][split])
        for split in stats["documents"]
    ]
    return {
        "summary": f"{sum(stats['tokens'].values()):,} tokens, {stats['rows']['train']:,} rows to "
        f"train on",
        "tokens": sum(stats["tokens"].values()),
        "padding_fraction": stats["padding_fraction"],
        "cut_documents": stats["cut_documents"],
        "cut_examples": stats["cut_examples"],
        "left_out": table(["reason", "documents"], stats["left_out"].items()),
        "tokenizer_engine": stats["tokenizer_engine"],
        "splits": table(["split", "documents", "tokens", "rows"], rows),
        "tokens_by_source": table(["source", "tokens"], stats["tokens_by_source"].items()),
    }
