"""What a clean corpus left out, and why: copies beside what they copy, and other examples. And
what changed since the corpus before."""

import difflib
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.progress import counted
from artifacts.store.store import Artifact
from llm_assets.tracing.explain import read_texts
from spark_jobs.clean.decide.decider import (
    DROPPED_FILES,
    DUPLICATE_FILES,
    DUPLICATE_SCHEMA,
    EXACT,
    NEAR,
)
from spark_jobs.clean.forgotten import read_similar
from spark_jobs.runtime.parquet import list_files, open_parts, read_table

MOST_CLUSTERS = 10
MOST_EXAMPLES, EXAMPLE_CHARACTERS = 3, 160
"""Documents that are shown of each other reason, by id, and how much of each."""
MOST_COMPARED = 200_000
"""Documents of a corpus that are compared with the corpus before."""
MOST_WORDS = 400
"""Words of a text that are shown beside another's."""
_WORD = re.compile(r"\s*\S+")

Side = list[tuple[str, bool]]
"""A text in stretches, each with whether the other text has it, too."""


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
class DroppedDocuments:
    """What a clean corpus left out."""

    counts: dict[str, int]
    """Reason to documents."""
    copies: list[Copy]
    """A sample: the near-copies least like their originals, then exact copies."""
    examples: dict[str, dict[str, str | None]]
    """Every other reason to a few documents, by id, and how the text of each begins, if known."""
    clusters: list[tuple[str, int]]
    """The kept documents of the largest clusters, with the clusters' sizes."""
    similar: list[dict[str, Any]]
    """Rows of `forgotten.SIMILAR_SCHEMA`: what holds forgotten text, which is not shown."""


def find_dropped(
    clean: Artifact, raw: Artifact | None, hidden: Collection[str], most: int
) -> DroppedDocuments:
    """Look up what was dropped.

    Args:
        raw: that the clean corpus was made of, where it is still there.
        hidden: ids that are not shown, nor what was dropped for them.
        most: how many near-copies are shown at most; of exact copies, a fifth of that.
    """
    rows = _chosen(clean.url, NEAR, hidden, most) + _chosen(clean.url, EXACT, hidden, most // 5)
    first = _first_dropped(clean, hidden)
    ids = {identifier for row in rows for identifier in (row["id"], row["neighbor"])}
    ids = ids.union(*first.values())
    texts = read_texts(raw.url, ids) if raw else {}
    copies = []
    for row in rows:
        text, neighbor_text = compare(texts.get(row["id"]), texts.get(row["neighbor"]))
        fields = {name: row[name] for name in DUPLICATE_SCHEMA.names if name != "cluster"}
        copies.append(Copy(**fields, text=text, neighbor_text=neighbor_text))
    examples = {
        reason: {one: texts[one][:EXAMPLE_CHARACTERS] if one in texts else None for one in names}
        for reason, names in first.items()
    }
    similar = read_similar(clean.url)
    tables = (read_table(url, ["survivor"]) for url in list_files(clean.url, DUPLICATE_FILES))
    none = DUPLICATE_SCHEMA.empty_table().select(["survivor"])
    counts = pa.concat_tables(
        table.group_by("survivor").aggregate([([], "count_all")]) for table in (none, *tables)
    )
    sums = counts.group_by("survivor").aggregate([("count_all", "sum")])
    sums = sums.filter(pc.invert(pc.is_in(sums["survivor"], pa.array(sorted(hidden), pa.string()))))
    order = [("count_all_sum", "descending"), ("survivor", "ascending")]
    largest = sums.sort_by(order).slice(0, MOST_CLUSTERS).to_pylist()
    # The document that is kept belongs to its cluster, too.
    clusters = [(row["survivor"], row["count_all_sum"] + 1) for row in largest]
    return DroppedDocuments(clean.stats["dropped"], copies, examples, clusters, similar.to_pylist())


def tell_held_back(stats: Mapping[str, Any], hidden: Collection[str] = ()) -> str:
    """How many new versions of text that judges are not learned, and what to do; empty without.

    Ids that are hidden are not named.
    """
    if not (held := stats.get("held_back")):
        return ""
    original = repr(held["original"]) if held["original"] else "one that left the sources"
    named = f", the most ({held['versions']:,}) of {original}, such as {held['first']!r}"
    if not {held["original"], held["first"]}.isdisjoint(hidden):
        named = ""
    return (
        f"{counted(held['documents'], 'new version')} of documents that judge{named}: not learned, "
        "since the old versions judge. Take these out of the sources, and the new ones judge "
        "instead."
    )


def find_changes(
    clean: Artifact, before: Artifact, hidden: Collection[str]
) -> dict[str, dict[str, str]]:
    """Documents that an earlier corpus did not have (`new`), had with another text (`edited`), or
    had (`gone`): id to source. Empty where they are too many to compare."""
    if max(clean.stats["documents"], before.stats["documents"]) > MOST_COMPARED:
        return {}
    columns = ["id", "text_hash", "source"]
    tables = (open_parts([one.url], columns).to_table(columns) for one in (clean, before))
    now, then = (
        {one: rest for one, *rest in zip(*table.to_pydict().values(), strict=True)}
        for table in tables
    )
    edited = {one for one in now.keys() & then.keys() if now[one][0] != then[one][0]}
    kinds = {"new": now.keys() - then.keys(), "edited": edited, "gone": then.keys() - now.keys()}
    return {
        kind: {one: (now.get(one) or then[one])[1] for one in sorted(ids - {*hidden})}
        for kind, ids in kinds.items()
    }


def tell_changes(changes: Mapping[str, Mapping[str, str]]) -> str:
    """How many documents of each source are new, edited or gone; empty where nothing changed."""
    counts = {kind: Counter(sources.values()) for kind, sources in changes.items()}
    return "; ".join(
        f"{name}: " + ", ".join(f"{of[name]:,} {kind}" for kind, of in counts.items() if of[name])
        for name in sorted(set().union(*counts.values()))
    )


def compare(text: str | None, neighbor: str | None) -> tuple[Side | None, Side | None]:
    """The beginnings of two texts; marked are the words that both have in the same order."""
    if text is None or neighbor is None:
        return _begin(text), _begin(neighbor)
    text_words, neighbor_words = _words(text), _words(neighbor)
    folded = [[word.strip().casefold() for word in words] for words in (text_words, neighbor_words)]
    # By itself, difflib ignores words that are frequent in a text of 200 words or more.
    matcher = difflib.SequenceMatcher(None, folded[0], folded[1], autojunk=False)
    sides: tuple[Side, Side] = ([], [])
    for kind, first, last, other_first, other_last in matcher.get_opcodes():
        for side, stretch in zip(
            sides, (text_words[first:last], neighbor_words[other_first:other_last]), strict=True
        ):
            if stretch:
                side.append(("".join(stretch), kind == "equal"))
    return sides


def _begin(text: str | None) -> Side | None:
    return None if text is None else [("".join(_words(text)), True)]


def _words(text: str) -> list[str]:
    """The text's first words, each with the white space before it."""
    return _WORD.findall(text)[:MOST_WORDS]


def _first_dropped(clean: Artifact, hidden: Collection[str]) -> dict[str, list[str]]:
    """The first ids of each reason that is no copy's."""
    first: dict[str, list[str]] = {}
    for url in list_files(clean.url, DROPPED_FILES):
        dropped = read_table(url, ["id", "reason"])
        is_hidden = pc.is_in(dropped["id"], pa.array(sorted(hidden), pa.string()))
        dropped = dropped.filter(pc.invert(is_hidden))
        for reason in sorted(dropped["reason"].unique().to_pylist()):
            ids = dropped.filter(pc.equal(dropped["reason"], reason))["id"]
            names = first.setdefault(reason, [])
            # The lists, and the rows of each, are in the order of the ids.
            names += ids.slice(0, MOST_EXAMPLES - len(names)).to_pylist()
    return first


def _chosen(
    clean_corpus: str, reason: str, hidden: Collection[str], most: int
) -> list[dict[str, Any]]:
    """Rows of `DUPLICATE_SCHEMA`, least similar first; only one file is in memory at a time."""
    least_similar = DUPLICATE_SCHEMA.empty_table()
    not_shown = pa.array(sorted(hidden), pa.string())
    for url in list_files(clean_corpus, DUPLICATE_FILES):
        copies = read_table(url, DUPLICATE_SCHEMA.names)
        copies = copies.filter(pc.equal(copies["reason"], reason))
        for column in ("id", "neighbor", "survivor"):
            copies = copies.filter(pc.invert(pc.is_in(copies[column], not_shown)))
        together = pa.concat_tables([least_similar, copies.cast(DUPLICATE_SCHEMA)])
        order = [("similarity", "ascending"), ("id", "ascending")]
        # By id as well, so that equal similarities give the same sample each time.
        least_similar = together.sort_by(order).slice(0, most)
    return least_similar.to_pylist()
