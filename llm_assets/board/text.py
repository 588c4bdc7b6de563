"""The text: where it comes from, what was removed and why, and what became of a document."""

import re
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from artifacts.numbers import run_starts
from artifacts.shards.shard_set import text_numbers
from artifacts.store.store import Artifact
from llm_assets.board.pages import Board, find_behind, number, page
from llm_assets.forgetting.document import find_document
from llm_assets.forgetting.erase import read_list
from llm_assets.registry.card import describe_coverage
from llm_assets.registry.start import find_manifest, find_record
from llm_assets.tracing.explain import find_dropped
from llm_assets.tracing.training_text import in_unicode_form
from recipes.data.records import SEEN_NAME, LineageRecord
from spark_jobs.read.document import DERIVED
from spark_jobs.runtime.parquet import open_parts

MOST_COPIES = 20
MOST_FOUND = 30
AROUND = 120
"""Characters that are shown on either side of what was searched."""
MOST_CHARACTERS = 20_000
"""Of a document's text, that are shown."""
MOST_TIMES = 10
"""That are told apart."""
MOST_COUNTED = 200_000
"""Documents of the text, when it is counted how often they were read."""
MOST_ON_PAGE = 100
MOST_EARLIER = 10
"""Texts that a document had before."""


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
        counted = np.bincount(self.times).tolist()
        return [(times, documents) for times, documents in enumerate(counted) if documents]


def routes(board: Board) -> list[Route]:
    """The pages below `/text`."""

    def show(request: Request) -> Response:
        clean = board.record.find_current("clean_corpus")
        raw = board.record.find_current("raw_corpus")
        cleaned = find_cleaned(clean) if clean else None
        past = board.record.known("raw_corpus")[1:]
        wanted = request.query_params.get("search", "").strip()
        forgotten = read_list(board.store, board.settings.name)
        champion = board.registry.state().find("champion")
        hidden = frozenset(one.id for one in forgotten.active if not one.numbered)
        return page(
            board,
            request,
            "text.html",
            earlier=find_manifest(board.store, "raw_corpus", past[0]) if past else None,
            raw=raw,
            clean=clean,
            is_cleaned=raw and cleaned and raw.fingerprint == cleaned.fingerprint,
            dropped=(
                board.remember(find_dropped, [clean, cleaned], hidden, MOST_COPIES)
                if clean
                else None
            ),
            share=describe_coverage(champion) if champion and champion.coverage is not None else "",
            coverage=find_coverage(board),
            most_times=MOST_TIMES,
            most_counted=MOST_COUNTED,
            search=wanted,
            hits=search(clean, wanted) if clean and wanted else None,
            most=MOST_FOUND,
        )

    def show_read(request: Request) -> Response:
        coverage, times = find_coverage(board), number(request, "times", 0)
        first = number(request, "from", 0)
        places = np.flatnonzero(coverage.times == times).tolist() if coverage else []
        chosen = places[first : first + MOST_ON_PAGE]
        return page(
            board,
            request,
            "read.html",
            coverage=coverage,
            times=times,
            documents=[coverage.documents[place] for place in chosen] if coverage else [],
            first=first,
            count=len(places),
            most=MOST_ON_PAGE,
            most_times=MOST_TIMES,
            most_counted=MOST_COUNTED,
        )

    def show_document(request: Request) -> Response:
        identifier = request.query_params.get("id", "")
        found = find_document(board.record, board.registry.state(), identifier)
        kind = "study" if DERIVED in identifier else "clean_corpus"
        corpus, story = board.record.find_current(kind), found.story
        text = ""
        if corpus and story:
            parts = open_parts([corpus.url], ["id", "text"])
            rows = parts.to_table(["text"], filter=pc.field("id") == story.survivor)
            text = (rows["text"].to_pylist() or [""])[0] or ""
        return page(
            board,
            request,
            "document.html",
            id=identifier,
            story=story,
            found=found,
            text=text[:MOST_CHARACTERS],
            is_cut=len(text) > MOST_CHARACTERS,
            most=MOST_EARLIER,
            longest=MOST_CHARACTERS // MOST_EARLIER,
        )

    return [
        Route("/text", show),
        Route("/text/read", show_read),
        Route("/text/document", show_document),
    ]


def find_cleaned(clean: Artifact) -> Artifact | None:
    """The raw corpus that it was made of, whatever was read since; None where that is gone."""
    return clean.store.find_named("raw_corpus", clean.manifest.inputs.get("raw_corpus", ""))


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
    table, seen = rows.head(MOST_COUNTED), LineageRecord.read(record)
    begins = np.flatnonzero(run_starts(seen.texts))
    # Its texts are in order; one that is looked up past their end is none of them.
    texts = np.append(seen.texts[begins], np.uint64(0))
    most = np.append(np.maximum.reduceat(seen.times, begins) if len(begins) else [], 0)
    numbers = text_numbers(table["text_hash"].to_pylist())
    places = np.searchsorted(texts[:-1], numbers)
    times = np.where(texts[places] == numbers, most[places], 0).astype(np.int64)
    return Coverage(version, table["id"].to_pylist(), np.minimum(times, MOST_TIMES))


def search(clean: Artifact, words: str) -> list[SearchHit]:
    """The first documents that hold some words, whatever their case, white space apart."""
    words = in_unicode_form(clean.manifest, words)
    pattern = r"[\s\p{Z}]+".join(map(re.escape, words.split()))
    holds = pc.match_substring_regex(pc.field("text"), pattern, ignore_case=True)
    # Python's expressions know no `\p`, and every such space is one of `\s` there.
    found_by = re.compile(r"\s+".join(map(re.escape, words.split())), re.IGNORECASE)
    columns = ["id", "source", "split", "text"]
    rows = open_parts([clean.url], columns).scanner(columns=columns, filter=holds).head(MOST_FOUND)
    hits = []
    for row in rows.to_pylist():
        text = row["text"] or ""
        match = found_by.search(text)
        start, end = match.span() if match else (0, 0)
        before = ("…" if start > AROUND else "") + text[max(0, start - AROUND) : start]
        after = text[end : end + AROUND] + ("…" if end + AROUND < len(text) else "")
        sides = before, text[start:end], after
        hits.append(SearchHit(row["id"], row["source"], row["split"], *sides))
    return hits
