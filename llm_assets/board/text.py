"""The text: where it comes from, what was removed and why, and what became of a document."""

import re
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from artifacts.shards.shard_set import text_numbers
from artifacts.store.store import Artifact
from llm_assets.board.pages import Board, find_behind, number, page_at
from llm_assets.forgetting.document import find_document, is_about
from llm_assets.forgetting.forgotten_list import read_list
from llm_assets.registry.card import describe_coverage
from llm_assets.registry.start import find_manifest, find_record
from llm_assets.tracing.dropped import (
    MOST_COMPARED,
    find_changes,
    find_dropped,
    tell_held_back,
)
from llm_assets.tracing.explain import read_texts
from llm_assets.tracing.training_text import in_unicode_form
from recipes.data.records import SEEN_NAME, LineageRecord
from spark_jobs.read.document import DERIVED
from spark_jobs.runtime.parquet import open_parts

MOST_COPIES = 20
MOST_FOUND = 30
MOST_SEARCHED = 10_000
"""Characters."""
MOST_WORDS = 40
"""That expressions look for. With many more, RE2 may fall back to a slow way, whose time grows with
text times words: 17 s for 0.8 MB and 1,000 words."""
AROUND = 120
"""Characters that are shown on either side of what was searched."""
MOST_TIMES = 10
"""That are told apart."""
MOST_COUNTED = 200_000
"""Documents of the text for which the number of times they were read is counted."""
MOST_ON_PAGE = 100


@dataclass(frozen=True)
class SearchHit:
    """A document that holds what was searched."""

    document: str
    source: str
    split: str
    before: str
    found: str
    after: str


@dataclass(frozen=True)
class Coverage:
    """How often a version and those before it were trained on the documents of its text."""

    version: int
    documents: list[str]
    """The first MOST_COUNTED that may be trained on."""
    times: np.ndarray
    """Shape (documents,), int64: how often some part of each was read, at most MOST_TIMES."""

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Times, and how many documents were read so often."""
        by_times = np.bincount(self.times).tolist()
        return [(times, documents) for times, documents in enumerate(by_times) if documents]


def routes(board: Board) -> list[Route]:
    """The pages below `/text`."""

    def show(request: Request) -> dict[str, Any]:
        clean = board.record.find_current("clean_corpus")
        raw = board.record.find_current("raw_corpus")
        # The text that the corpus was made from, whatever has been read since.
        made_of = clean.manifest.inputs.get("raw_corpus", "") if clean else ""
        cleaned = board.store.find_named("raw_corpus", made_of)
        # The current one comes first, and is not a past one.
        old, before = board.record.known("raw_corpus")[1:], board.record.find_before("clean_corpus")
        pair = [clean, before]
        words = request.query_params.get("search", "").strip()
        if len(words) > MOST_SEARCHED:
            limit = f"{MOST_SEARCHED:,} characters"
            fault = f"The search is longer than {limit}. Search for a part of it"
            raise HTTPException(400, fault)
        forgotten = read_list(board.store, board.settings.name)
        champion = board.registry.state().find("champion")
        # The number of a row that was forgotten may be another row's by now, which is not to be
        # hidden.
        hidden = frozenset(document.id for document in forgotten.active if not document.numbered)
        dropped = (
            board.remember(find_dropped, [clean, cleaned], hidden, MOST_COPIES) if clean else None
        )
        stats = raw.stats if raw else {}
        names = stats.get("unread_examples", {})
        return {
            "previous_snapshot": find_manifest(board.store, "raw_corpus", old[0]) if old else None,
            "raw": raw,
            "clean": clean,
            "before": before,
            "unread": [
                (kind, count, [name for name in names.get(kind, ()) if name not in hidden])
                for kind, count in stats.get("unread", {}).items()
            ],
            "faults": [one for one in stats.get("faults", ()) if not is_about(one, hidden)],
            "changes": board.remember(find_changes, pair, hidden) if all(pair) else {},
            "is_cleaned": raw and raw.fingerprint == made_of,
            "dropped": dropped,
            "held_back": tell_held_back(clean.stats, hidden) if clean else "",
            "share": champion and champion.coverage is not None and describe_coverage(champion),
            "coverage": find_coverage(board),
            "most_times": MOST_TIMES,
            "most_compared": MOST_COMPARED,
            "search": words,
            "hits": search(clean, words) if clean and words else None,
            "most_hits": MOST_FOUND,
        }

    def show_read(request: Request) -> dict[str, Any]:
        coverage, times = find_coverage(board), number(request, "times", 0)
        first = number(request, "from", 0)
        places = np.flatnonzero(coverage.times == times).tolist() if coverage else []
        on_page = places[first : first + MOST_ON_PAGE]
        return {
            "coverage": coverage,
            "times": times,
            "documents": [coverage.documents[place] for place in on_page] if coverage else [],
            "first": first,
            "count": len(places),
            "page_size": MOST_ON_PAGE,
            "most_times": MOST_TIMES,
            "most_counted": MOST_COUNTED,
        }

    def show_document(request: Request) -> dict[str, Any]:
        identifier = request.query_params.get("id", "")
        history = find_document(board.record, board.registry.state(), identifier)
        # An id with this mark is that of a text that `study` made from a document.
        kind = "study" if DERIVED in identifier else "clean_corpus"
        corpus, story = board.record.find_current(kind), history.story
        # Of a copy, the corpus has only the text that was kept in its place.
        texts = read_texts(corpus.url, [story.survivor]) if corpus and story else {}
        text = next(iter(texts.values()), "")
        return {"id": identifier, "story": story, "history": history, "text": text}

    return [
        page_at("/text", board, "text.html", show),
        page_at("/text/read", board, "read.html", show_read),
        page_at("/text/document", board, "document.html", show_document),
    ]


def find_coverage(board: Board) -> Coverage | None:
    """Of the champion; None without one, and where its text or its record is gone."""
    champion = board.registry.state().find("champion")
    if champion is None:
        return None
    clean = find_behind(board.store, champion, "clean_corpus")
    record = find_record(board.store, champion.model_fingerprint, SEEN_NAME)
    if clean is None or record is None:
        return None
    return board.remember(_coverage, [clean], champion.version, record)


def _coverage(clean: Artifact, version: int, record: str) -> Coverage:
    columns, is_train = ["id", "text_hash"], pc.field("split") == "train"
    rows = open_parts([clean.url], [*columns, "split"]).scanner(columns, is_train)
    table, lineage = rows.head(MOST_COUNTED), LineageRecord.read(record)
    numbers = pa.array(text_numbers(table["text_hash"].to_pylist()))
    times_read = pa.table({"text": lineage.texts, "times": lineage.times})
    times_read = times_read.filter(pc.is_in(times_read["text"], numbers))
    times_read = times_read.group_by("text").aggregate([("times", "max")])
    places = pc.index_in(numbers, times_read["text"])
    times = times_read["times_max"].take(places).fill_null(0).to_numpy()
    return Coverage(version, table["id"].to_pylist(), np.minimum(times, MOST_TIMES))


def search(clean: Artifact, words: str) -> list[SearchHit]:
    """The first documents that contain these words, ignoring case and the kind of white space."""
    terms = in_unicode_form(clean.manifest, words).split()
    beginning = [re.escape(term) for term in terms[:MOST_WORDS]]
    pattern = r"[\s\p{Z}]+".join(beginning)
    has_beginning = pc.match_substring_regex(pc.field("text"), pattern, ignore_case=True)
    # Python's expressions know no `\p`, and every such space is one of `\s` there.
    found_by = re.compile(r"\s+".join(beginning), re.IGNORECASE)
    whole = " ".join(terms).casefold()
    columns = ["id", "source", "split", "text"]
    scanner = open_parts([clean.url], columns).scanner(columns=columns, filter=has_beginning)
    rows = (
        row
        for batch in scanner.to_batches()
        for row in batch.to_pylist()
        # In a longer search, the expression has found only the beginning.
        if len(terms) <= MOST_WORDS or whole in " ".join(row["text"].split()).casefold()
    )
    hits = []
    for row in islice(rows, MOST_FOUND):
        text = row["text"] or ""
        match = found_by.search(text)
        start, end = match.span() if match else (0, 0)
        before = ("…" if start > AROUND else "") + text[max(0, start - AROUND) : start]
        after = text[end : end + AROUND] + ("…" if end + AROUND < len(text) else "")
        sides = before, text[start:end], after
        hits.append(SearchHit(row["id"], row["source"], row["split"], *sides))
    return hits
