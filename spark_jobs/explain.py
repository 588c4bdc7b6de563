"""What became of one document: what it was merged with, which rows hold it."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import Occurrence, find_occurrences
from spark_jobs.clean.decide.decider import DUPLICATE_SCHEMA, read_dropped
from spark_jobs.clean.forgotten import read_similar
from spark_jobs.decontaminate.ngrams import group_ngrams, ngrams_of
from spark_jobs.runtime.parquet import find_parts, find_rows
from spark_jobs.text import fold, sum_words
from spark_jobs.tokenize.shards import find_overlap


class UnknownDocument(UserError):
    """A clean corpus has no document of an id, and does not know why."""


@dataclass(frozen=True)
class DocumentStory:
    """All that is known of a document."""

    id: str
    survivor: str
    """The document that is kept of its duplicate cluster; the document itself where it survived."""
    cluster: str
    source: str
    """Of the survivor, like `split` and `text_hash`."""
    split: str
    text_hash: str
    merged: list[dict[str, Any]]
    """The cluster's dropped documents: rows of `decider.DUPLICATE_SCHEMA`."""
    overlap: float | None
    """Share of it that is held-out text, where it was left out for that."""
    overlaps_with: str | None
    """The held-out document that it has most in common with, if it was left out for any."""
    occurrences: list[Occurrence]
    """The rows that hold it."""
    absence: str
    """Why no row does, if none does and no overlap tells."""

    def __str__(self) -> str:
        lines = [f"{self.id}: " + self._fate(), f"duplicate cluster {self.cluster}"]
        for copy in self.merged:
            lines.append(
                f"  {copy['id']} was dropped ({copy['reason']}, similarity "
                f"{copy['similarity']:.2f} to {copy['neighbor']})"
            )
        for occurrence in self.occurrences:
            rows = occurrence.rows
            count = f"{len(rows):,} rows" if len(rows) > 1 else f"row {rows[0]}"
            lines.append(f"  {occurrence.split}, shard {occurrence.shard}, {count}")
        return "\n".join(lines)

    def _fate(self) -> str:
        if self.survivor != self.id:
            return f"dropped; {self.survivor} is kept in its place"
        if self.overlap is not None:
            most = f", the most of {self.overlaps_with}" if self.overlaps_with else ""
            return f"left out of training: {self.overlap:.0%} of it is held-out text{most}"
        if self.occurrences:
            return "kept"
        return f"kept, but in no shard: {self.absence}"


def explain_document(
    clean_corpus: str,
    shards: str | None,
    stats: ShardStats | None,
    identifier: str,
    ngram_size: int,
) -> DocumentStory:
    """Trace a document of the raw corpus.

    Args:
        clean_corpus: folder of the clean corpus.
        shards: folder of the shards made of it, local; None where there are none yet.
        stats: the shards' stats.
        identifier: the document's id in the raw corpus.
        ngram_size: words of the n-grams that the shards' text was compared by.

    Raises:
        UnknownDocument: the clean corpus knows no such document.
        UserError: it cannot be read, or was made without the document, which holds forgotten text.
    """
    own = read_dropped(clean_corpus, DUPLICATE_SCHEMA, "id", pa.array([identifier])).to_pylist()
    # Only dropped copies are listed: a document that is not may have survived.
    survivor = own[0]["survivor"] if own else identifier
    is_survivor = pc.field("id") == survivor
    columns = ["id", "cluster", "source", "split", "text_hash", "text"]
    kept = find_rows(clean_corpus, "clean_corpus", is_survivor, columns, 1)
    if not kept:
        similar = read_similar(clean_corpus)
        for match in similar.filter(pc.equal(similar["id"], identifier)).to_pylist():
            raise UserError(
                f"{identifier!r} was left out of the clean corpus: it holds text of "
                f"{match['forgotten']!r} ({match['similarity']:.0%}), which was forgotten. To let "
                f"it in: llm-assets forget {match['forgotten']!r} --similar keep --reason REASON, "
                "which lists what that is about; then the same with --yes"
            )
        raise UnknownDocument(
            f"The clean corpus in {clean_corpus} has no document {identifier!r}, kept or dropped "
            f"as a copy. {advise_on_id(clean_corpus, identifier)}"
        )
    members = read_dropped(
        clean_corpus, DUPLICATE_SCHEMA, "survivor", pa.array([survivor])
    ).to_pylist()
    text = kept[0].pop("text")
    occurrences: list[Occurrence] = []
    overlap = overlaps_with = None
    if shards and stats:
        occurrences = find_occurrences(shards, stats, survivor)
        overlap = find_overlap(shards, survivor)
    if overlap is not None:
        overlaps_with = _find_held_out(clean_corpus, text, ngram_size)
    return DocumentStory(
        **kept[0] | {"id": identifier},
        survivor=survivor,
        merged=members,
        overlap=overlap,
        overlaps_with=overlaps_with,
        occurrences=occurrences,
        absence=_absence(stats, kept[0]["source"]) if stats else "there are none of it yet",
    )


def _find_held_out(clean_corpus: str, text: str, ngram_size: int) -> str | None:
    """The held-out document that has most different n-grams of a text; the first of several."""
    own = group_ngrams(ngrams_of(sum_words([fold(text)]), ngram_size))
    columns, best, most = ["id", "text", "split"], None, 0
    for part in find_parts(clean_corpus, columns, "clean_corpus"):
        held_out = part.read(columns)
        held_out = held_out.filter(pc.equal(held_out["split"], "held_out"))
        texts = list(map(fold, held_out["text"].to_pylist()))
        for documents, _, counts in own.common(ngrams_of(sum_words(texts), ngram_size)):
            if counts.max(initial=0) > most:
                place, most = int(counts.argmax()), int(counts.max())
                best = held_out["id"][int(documents[place])].as_py()
    return best


def _absence(stats: ShardStats, source: str) -> str:
    """Why a document of a source that the shards may have left out is not in them."""
    mixing = (stats.model_extra or {}).get("mixing", {})
    share = mixing.get("weights", {}).get(source, 1) * mixing.get("fraction", 1)
    if share < 1:
        return f"not sampled, as {share:.2g} of {source!r} is taken (`tokenized_shards.mixing`)"
    return "left out by tokenizing (`left_out` of `tokenized_shards`)"


NEAR_IDS, MOST_COMPARED, LEAST_LIKE = 3, 10_000, 0.5
"""Ids that are proposed, ids that they are chosen from, and how like the wrong one they are at
least, as `difflib` measures it. With a half, a file's name is enough, without its folders, if these
are at most twice as long."""


def advise_on_id(clean_corpus: str, identifier: str) -> str:
    """What to do about an id that no document has: documents of its folder, or whose ids contain
    its last part, are likely meant."""
    folder, _, name = identifier.rstrip("/").rpartition("/")
    condition = pc.match_substring(pc.field("id"), name or identifier, ignore_case=True)
    if folder:
        condition |= pc.starts_with(pc.field("id"), f"{folder}/")
    rows = find_rows(clean_corpus, "clean_corpus", condition, ["id"], MOST_COMPARED)
    near = get_close_matches(identifier, [row["id"] for row in rows], NEAR_IDS, cutoff=LEAST_LIKE)
    meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return (
        f"{meant}Check the id: `llm-assets trace --text WORDS` names documents that the serving "
        "version was trained on."
    )
