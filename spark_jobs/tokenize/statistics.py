"""What the manifest and the dataset card say of the shards; too small a corpus is refused."""

from typing import Any

from artifacts.errors import UserError, make_command
from artifacts.shards.format import ALL_SPLITS, SPLITS, ShardEntry, ShardStats, token_dtype
from artifacts.storage import files
from spark_jobs.tokenize.shards import Plan
from spark_jobs.tokenize.survey import Survey
from spark_jobs.tokenize.tokenizer import Engine, TokenizerFiles

CARD_NAME = "README.md"


def refuse_missing_splits(survey: Survey) -> None:
    """Raise UserError where a split has no document."""
    documents = sum(survey.documents.values())
    if not documents:
        raise UserError(
            "The clean corpus holds no documents, so there is nothing to tokenize. "
            f"Materialize it again: {make_command('clean_corpus')}"
        )
    for split in SPLITS:
        if not survey.documents[split]:
            share = "" if split == "train" else f", or raise `clean_corpus.split.{split}`"
            raise UserError(
                f"None of the {documents:,} clean documents falls into the {split} split: "
                f"give the corpus more documents{share}."
            )


def statistics(
    written: list[dict[str, Any]],
    plan: Plan,
    files: TokenizerFiles,
    engine: Engine,
    warnings: list[str],
) -> dict[str, Any]:
    """What the manifest says of the shards, from what is known of each."""

    def by_split(field: str) -> dict[str, int]:
        return {
            split: sum(row[field] for row in written if row["split"] == split) for split in splits
        }

    splits = ALL_SPLITS if "replay" in plan.shards else SPLITS
    tokens, rows = by_split("tokens"), by_split("rows")
    places = sum(rows.values()) * plan.sequence_length
    sources: dict[str, int] = {}
    for row in written:
        for source, count in row["tokens_by_source"].items():
            sources[source] = sources.get(source, 0) + count
    reader = ShardStats(
        sequence_length=plan.sequence_length,
        dtype=token_dtype(files.vocab_size),
        vocab_size=files.vocab_size,
        tokenizer_sha256=files.sha256,
        start_token_id=plan.start_token_id,
        end_token_id=plan.end_token_id,
        form=plan.form,
        labels=list(plan.labels),
        target_tokens=plan.examples.target_tokens if plan.form == "pairs" else 0,
        chat_template=plan.examples.chat_template,
        shards=[
            ShardEntry(**{key: row[key] for key in ShardEntry.model_fields}) for row in written
        ],
    )
    return reader.model_dump() | {
        "tokens": tokens,
        "rows": rows,
        "documents": by_split("documents"),
        "padding_fraction": round(1 - sum(tokens.values()) / places, 6) if places else 0.0,
        "cut_documents": sum(row["cut_documents"] for row in written),
        "tokens_by_source": dict(sorted(sources.items())),
        "absent_bytes": sum(row["absent"] for row in written),
        "tokenizer_engine": engine,
        "warnings": warnings,
    }


def refuse_too_little(stats: dict[str, Any], row_tokens: int) -> None:
    """Raise UserError where nothing is left to train on or to replay."""
    if stats["documents"].get("replay") == 0:
        raise UserError(
            "Every document to replay (`clean_corpus.split.sources`) overlaps with text that "
            "judges, so nothing is left to replay. Name another source of general text, or cut its "
            "documents smaller."
        )
    if stats["tokens"]["train"] < row_tokens:
        raise UserError(
            f"All training text together is {stats['tokens']['train']:,} tokens, shorter than one "
            f"row of {row_tokens}. Give the corpus more text, or lower "
            "`tokenized_shards.sequence_length`."
        )


def write_card(output: str, stats: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write the card; it follows from the shards' content alone.

    Args:
        output: the shards' folder.
        stats: the manifest's stats.
        settings: the settings that decided the content.
    """
    files.write(f"{output}/{CARD_NAME}", _card(stats, settings).encode())


def _card(stats: dict[str, Any], settings: dict[str, Any]) -> str:
    splits = [
        f"| {split} | {stats['documents'][split]:,} | {stats['tokens'][split]:,} "
        f"| {stats['rows'][split]:,} |"
        for split in stats["documents"]
    ]
    sources = [f"| {name} | {count:,} |" for name, count in stats["tokens_by_source"].items()]
    weights = stats["mixing"]["weights"] or "each source once"
    removed = sum(stats["removed_as_overlapping_held_out"].values())
    return "\n".join(
        [
            "# Packed token rows",
            "",
            f"Rows of {stats['sequence_length']} tokens ({stats['dtype']}, little-endian), packed "
            f"by `{settings['packing']}`, {stats['padding_fraction']:.2%} padding. "
            f"{stats['cut_documents']:,} documents lie in more than one segment; none is cut off.",
            "",
            "| split | documents | tokens | rows |",
            "|---|---|---|---|",
            *splits,
            "",
            "`train` is for training, `validation` for choosing, `held_out` for the gate alone. "
            "Near-copies never lie in two splits.",
            "",
            "| source | tokens |",
            "|---|---|",
            *sources,
            "",
            f"- Mixing: {weights}; {settings['fraction']:.0%} of the training documents.",
            f"- Left out because they repeat held-out text: {removed:,} documents, listed in "
            "`overlaps_held_out-NNNNN.parquet`.",
            f"- Tokenizer SHA-256 {stats['tokenizer_sha256']}, vocabulary {stats['vocab_size']:,}, "
            f"start token {stats['start_token_id']}, end token {stats['end_token_id']}. "
            f"{stats['absent_bytes']:,} bytes of the text have no token and are not in the rows.",
            "- Special-token strings in the text are plain text.",
            "",
            "`manifest.json` names the clean corpus and the base model that this was made from.",
            "",
        ]
    )
