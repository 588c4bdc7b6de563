"""The dataset card beside the shards: what they are, for a person who finds the folder."""

from typing import Any

from artifacts.storage import files

CARD_NAME = "README.md"


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
