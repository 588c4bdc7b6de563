"""What cleaning dropped, with the text that each copy was found a copy of."""

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.storage import files
from artifacts.store.store import Artifact
from spark_jobs.clean.decide.duplicates import DUPLICATE_SCHEMA, EXACT, NEAR
from spark_jobs.runtime.parquet import read_table
from spark_jobs.runtime.raw_parts import find_raw_parts

MOST_WORDS = 400
"""Of a text, that are shown beside another."""
_WORD = re.compile(r"\s*\S+")

Side = list[tuple[str, bool]]
"""A text in stretches, each with whether it stands in the other text, too."""


@dataclass(frozen=True)
class Copy:
    """A document that was dropped as a copy."""

    id: str
    reason: str
    similarity: float
    neighbor: str
    """The document that it was found a copy of."""
    survivor: str
    """The document that is kept in its place: the neighbor, or another of the cluster."""
    text: Side | None
    """The text's beginning; None where the raw corpus holds it no more."""
    neighbor_text: Side | None


@dataclass(frozen=True)
class Dropped:
    """What a clean corpus left out."""

    counts: dict[str, int]
    """Reason to documents."""
    copies: list[Copy]
    """Some of them: the near-copies that are least like what they copy, then exact ones."""
    examples: dict[str, list[dict[str, str]]]
    """Every other reason to a few documents: `id`, and how their `text` begins."""


def find_dropped(
    clean: Artifact, raw: Artifact | None, hidden: Collection[str], most: int
) -> Dropped:
    """Look up what was dropped.

    Args:
        raw: that the clean corpus was made of, where it is still there.
        hidden: ids that are not shown, nor what was dropped for them.
        most: near-copies; of exact ones, a fifth of that.
    """
    found = _chosen(clean.url, NEAR, hidden, most) + _chosen(clean.url, EXACT, hidden, most // 5)
    wanted = {identifier for row in found for identifier in (row["id"], row["neighbor"])}
    texts = _texts(raw.url, wanted) if raw else {}
    copies = []
    for row in found:
        text, neighbor_text = compare(texts.get(row["id"]), texts.get(row["neighbor"]))
        shown = {name: row[name] for name in DUPLICATE_SCHEMA.names if name != "cluster"}
        copies.append(Copy(**shown, text=text, neighbor_text=neighbor_text))
    examples = {
        reason: [one for one in of_reason if one["id"] not in hidden]
        for reason, of_reason in clean.stats["dropped_examples"].items()
        if reason not in (EXACT, NEAR)
    }
    return Dropped(clean.stats["dropped"], copies, examples)


def compare(text: str | None, neighbor: str | None) -> tuple[Side | None, Side | None]:
    """The beginnings of two texts, marked by the words that both have in order."""
    if text is None or neighbor is None:
        return _begin(text), _begin(neighbor)
    here, there = _words(text), _words(neighbor)
    folded = [[word.strip().casefold() for word in words] for words in (here, there)]
    matcher = difflib.SequenceMatcher(None, folded[0], folded[1], autojunk=False)
    sides: tuple[Side, Side] = ([], [])
    for kind, first, last, other_first, other_last in matcher.get_opcodes():
        for side, stretch in zip(
            sides, (here[first:last], there[other_first:other_last]), strict=True
        ):
            if stretch:
                side.append(("".join(stretch), kind == "equal"))
    return sides


def _begin(text: str | None) -> Side | None:
    return None if text is None else [("".join(_words(text)), True)]


def _words(text: str) -> list[str]:
    """The text's first words, each with the blanks before it."""
    return _WORD.findall(text)[:MOST_WORDS]


def _chosen(
    clean_corpus: str, reason: str, hidden: Collection[str], most: int
) -> list[dict[str, Any]]:
    """Rows of `DUPLICATE_SCHEMA`, the least similar first; one file of them is held at a time."""
    chosen = DUPLICATE_SCHEMA.empty_table()
    not_shown = pa.array(sorted(hidden), pa.string())
    for name in fnmatch.filter(files.list_names(clean_corpus), "duplicates*.parquet"):
        copies = read_table(f"{clean_corpus}/{name}", DUPLICATE_SCHEMA.names)
        copies = copies.filter(pc.equal(copies["reason"], reason))
        for column in ("id", "neighbor", "survivor"):
            copies = copies.filter(pc.invert(pc.is_in(copies[column], not_shown)))
        together = pa.concat_tables([chosen, copies.cast(DUPLICATE_SCHEMA)])
        order = [("similarity", "ascending"), ("id", "ascending")]
        chosen = together.sort_by(order).slice(0, most)
    rows: list[dict[str, Any]] = chosen.to_pylist()
    return rows


def _texts(raw_corpus: str, ids: Iterable[str]) -> dict[str, str]:
    """Ids to texts, of those that the raw corpus has; parts are read until all are found."""
    wanted = pa.array(sorted(ids), pa.string())
    found: dict[str, str] = {}
    for part in find_raw_parts(raw_corpus):
        if len(found) == len(wanted):
            break
        if pc.any(pc.is_in(part.read(["id"])["id"], wanted)).as_py():
            rows = part.read(["id", "text"])
            rows = rows.filter(pc.is_in(rows["id"], wanted))
            found |= {row["id"]: row["text"] or "" for row in rows.to_pylist()}
    return found
