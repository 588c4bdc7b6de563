"""Finds documents that hold forgotten text again, as near copies or inside other text.

A forgotten text is one more kind of reference text (`spark_jobs.decontaminate.ngrams`). Only a
signature of it is kept: 32 bits of the hash of every fifth n-gram of five words, so that no two
overlap, sorted. A changed word changes one of them, wherever it stands. docs/tracing.md says what a
signature reveals to whoever holds it.
"""

import hashlib
import io
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from artifacts.cache import cache_key, cached
from artifacts.errors import DamagedArtifact, UserError
from artifacts.numbers import ends_of, run_starts
from artifacts.storage import files
from artifacts.words import has_unspaced
from spark_jobs.clean.prepare import PreparedPart
from spark_jobs.decontaminate.ngrams import (
    NGrams,
    each_once,
    group_ngrams,
    load_ngrams,
    ngrams_of,
    save_ngrams,
)
from spark_jobs.read.opened import hash64
from spark_jobs.runtime.parquet import Part, read_table, to_parquet, to_stream
from spark_jobs.runtime.tasks import JobRun, map_tasks
from spark_jobs.text import Shingles, fold, sum_words

FORGOTTEN, SIMILAR = "forgotten", "similar_to_forgotten"
"""Reasons for what was left out on request, and for what holds its text; documents that are dropped
for one of them are never shown with their text."""
NGRAM_SIZE = 5
"""In words: even in the shortest documents that cleaning keeps by default, one word may change."""
SIMILARITY = 0.5
"""Minimum share of the shorter text's n-grams that the other one contains. All near-duplicates have
more; unrelated documentation, however alike, mostly has less."""
FEWEST_NGRAMS = 3
"""A text with fewer n-grams is too short to be told from others by them."""
MOST_SIMILAR = 20
"""Maximum number of documents that are left out for one text; if more hold it, it may be a license
or boilerplate, and a person decides."""
COMMON_DOCUMENTS = 5
"""An n-gram that more other documents hold than this is wording that many share, such as a standard
answer. It does not tell a text from others, so a signature leaves it out. Few enough that a thread
of mail in which each quotes the first one is rarely taken for that."""
METHOD = (
    f"every {NGRAM_SIZE}th n-gram of {NGRAM_SIZE} words of a text (folded, 32 bits of its hash) "
    "was looked up among all of a document, but for any that was left out since more than "
    f"{COMMON_DOCUMENTS} other documents held it when the text was forgotten; a document holds it "
    "where it has at least the stated share of them, or is made of them by that share"
)
"""The method, as a certificate describes it."""

SIMILAR_NAME = "similar_to_forgotten.parquet"
SIMILAR_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("text_hash", pa.string()),
        ("forgotten", pa.string()),
        ("similarity", pa.float64()),
    ]
)
"""A document that holds forgotten text, and the id of the forgotten document that it is most like.
"""
Signatures = Mapping[str, np.ndarray]
"""Maps the `text_hash` of texts to their signatures: uint32, sorted."""


class ForgottenText(BaseModel):
    """A text that is looked for by its signature."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Id of the document that it was."""
    text_hash: str
    confirmed: bool = False
    """Whether a person has said that all documents with its text go, however many there are."""


class ForgottenTexts(BaseModel):
    """Documents that are left out as if the sources did not hold them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """By their `text_hash`, whatever id they come back under."""
    searched: tuple[ForgottenText, ...] = ()
    """Those of the texts whose near copies are left out, too."""
    signatures: tuple[str, ...] = ()
    """URLs of the files with their signatures."""
    similar: tuple[str, ...] = ()
    """Near copies that were found in a corpus, by their `text_hash`."""
    similar_ids: tuple[str, ...] = ()
    """Near copies that are dropped anyway, and so have no `text_hash` of their own."""

    @property
    def hidden(self) -> tuple[str, ...]:
        """All texts that no corpus may have, by their `text_hash`."""
        return (*self.texts, *self.similar)


def sign(texts: Mapping[str, str]) -> Signatures:
    """The signatures of texts, given by their `text_hash`."""
    ngrams = _ngrams(list(texts.values()))
    bounds = zip(ngrams.offsets[:-1], ngrams.offsets[1:], strict=True)
    return {
        text: np.unique(ngrams.hashes[first:last:NGRAM_SIZE]).astype(np.uint32)
        for text, (first, last) in zip(texts, bounds, strict=True)
    }


def write_signatures(folder: str, signatures: Signatures) -> str:
    """Write signatures into a folder, to a file named by its content; return the name."""
    lists = pa.array(list(signatures.values()), pa.list_(pa.uint32()))
    content = to_parquet(pa.table({"text_hash": list(signatures), "ngrams": lists}))
    name = f"signatures-{hashlib.sha256(content).hexdigest()[:32]}.parquet"
    files.write(f"{folder}/{name}", content)
    return name


def read_signatures(urls: Sequence[str]) -> Signatures:
    """What `write_signatures` wrote; raises DamagedArtifact where a file is absent or changed."""
    signatures: dict[str, np.ndarray] = {}
    for url in urls:
        content = files.find(url)
        # The name has the first 32 digits of the content's hash (`write_signatures`).
        if content is None or hashlib.sha256(content).hexdigest()[:32] not in url:
            raise DamagedArtifact(
                f"{url}, by which near copies of forgotten text are found, is "
                f"{'no longer there' if content is None else 'damaged'}: no corpus is made while "
                "they could come back. Bring the file back from a copy of the store; or have exact "
                "copies of these texts alone found from now on, with: llm-assets doctor --repair"
            )
        table = pq.read_table(io.BytesIO(content))
        signatures |= {
            text: ngrams.values.to_numpy()
            for text, ngrams in zip(table["text_hash"].to_pylist(), table["ngrams"], strict=True)
        }
    return signatures


def find_similar(
    run: JobRun,
    parts: Sequence[Part | PreparedPart],
    texts: Sequence[ForgottenText],
    signatures: Signatures,
) -> pa.Table:
    """Find the documents that hold one of some texts: rows of `SIMILAR_SCHEMA`, part by part.

    Args:
        parts: of a prepared raw corpus, or of a clean one.
        texts: those to look for, each of which has a signature.
    """
    if not texts:
        return SIMILAR_SCHEMA.empty_table()
    references = as_references([signatures[text.text_hash] for text in texts])
    url = save_ngrams(run.scratch, references)
    # The name of the file is a hash of its content, so it stands for the texts in the key.
    key = cache_key(
        "similar to forgotten text",
        __name__,
        ["numpy", "pyarrow"],
        references=url.rpartition("/")[2],
    )
    work = partial(_compare, references=url, key=key, cache=run.cache)
    records = map_tasks(run.spark, "looking for forgotten text", parts, work, run.report)
    rows = [row for record in records for row in record["rows"]]
    named = [row | {"forgotten": texts[row["forgotten"]].id} for row in rows]
    return pa.Table.from_pylist(named, SIMILAR_SCHEMA)


def without_common(run: JobRun, parts: Sequence[Part], signatures: Signatures) -> Signatures:
    """Signatures of texts without what many other documents of a corpus hold, too."""
    url = save_ngrams(run.scratch, as_references(list(signatures.values())))
    work = partial(_find_holders, references=url, own=frozenset(signatures), scratch=run.scratch)
    records = map_tasks(run.spark, "looking for common text", parts, work, run.report)
    found = [np.frombuffer(files.read(record["url"]), np.uint64) for record in records]
    held = np.concatenate([pairs.reshape(2, -1) for pairs in found], axis=1)
    different, counts = np.unique(each_once(*held)[0], return_counts=True)
    common = different[counts > COMMON_DOCUMENTS]
    return {text: ngrams[~np.isin(ngrams, common)] for text, ngrams in signatures.items()}


def _find_holders(part: Part, references: str, own: frozenset[str], scratch: str) -> dict[str, Any]:
    """Which documents of a part, other than those with these texts, hold each n-gram."""
    documents = part.read(["id", "text_hash", "text"])
    is_own = pc.is_in(documents["text_hash"], pa.array(sorted(own), pa.string()))
    others = documents.filter(pc.invert(is_own))
    # By their ids: a corpus with its record has all texts of a document that was edited.
    names = np.array([hash64(one) for one in others["id"].to_pylist()], np.uint64)
    ngrams = _ngrams(others["text"].to_pylist())
    url = f"{scratch}/holders-{uuid.uuid4().hex}"
    # In a file, since tasks return only small records; more than decide are not needed.
    held = load_ngrams(references).holders(ngrams, names, COMMON_DOCUMENTS + 1)
    files.write(url, held.tobytes(), sync=False)
    return {"url": url}


def read_similar(clean_corpus: str) -> pa.Table:
    """The documents that a clean corpus left out for forgotten text: rows of `SIMILAR_SCHEMA`."""
    url = f"{clean_corpus}/{SIMILAR_NAME}"
    return read_table(url) if files.exists(url) else SIMILAR_SCHEMA.empty_table()


def refuse_widespread(similar: pa.Table, texts: Sequence[ForgottenText]) -> None:
    """Raise UserError if more documents hold a text than go without a person's decision."""
    confirmed = {text.id for text in texts if text.confirmed}
    for forgotten, count in Counter(similar["forgotten"].to_pylist()).most_common():
        if count > MOST_SIMILAR and forgotten not in confirmed:
            # By hash: its id may be a row's number, which another row has by now.
            hashes = " ".join(text.text_hash for text in texts if text.id == forgotten)
            raise UserError(
                f"{count:,} documents hold text of {forgotten!r}, which was forgotten "
                f"({tell_similar(similar.filter(pc.equal(similar['forgotten'], forgotten)))}"
                f"). That is more than {MOST_SIMILAR}: it may be a license or boilerplate, so "
                "nothing is made until somebody decides. To have all of them left out: llm-assets "
                f"forget {hashes} --similar drop --reason REASON --yes. To have exact copies "
                "alone left out: the same with --similar keep"
            )


def tell_similar(similar: pa.Table, most: int = 5) -> str:
    """The first documents of a table of `SIMILAR_SCHEMA`, with their similarity, in words."""
    rows = similar.slice(0, most).to_pylist()
    named = ", ".join(f"{row['id']} {row['similarity']:.0%}" for row in rows)
    more = similar.num_rows - len(rows)
    return f"{named} and {more:,} more" if more else named


def _compare(
    part: Part | PreparedPart, references: str, key: str, cache: str | None
) -> dict[str, Any]:
    """Find the documents of a part that hold a text; texts are given by number."""

    def make() -> bytes:
        documents = part.read(["id", "source", "text_hash", "text"])
        texts = documents["text"].to_pylist()
        place, text, similarity = most_similar(texts, load_ngrams(references))
        matches = documents.select(["id", "source", "text_hash"]).take(pa.array(place))
        matches = matches.append_column("forgotten", pa.array(text))
        return to_stream(matches.append_column("similarity", pa.array(similarity)))

    name = part.origin if isinstance(part, PreparedPart) else part.content_name()
    entry = f"{key}-{hashlib.sha256(name.encode()).hexdigest()}"
    return {"rows": pa.ipc.open_stream(cached(cache, entry, make)).read_all().to_pylist()}


def most_similar(
    documents: Sequence[str], references: NGrams
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find documents that hold a text, the text that each is most like, and their similarity.

    Args:
        references: of `as_references`.

    Returns:
        Places among the documents, in order, numbers of the texts, and shares from `SIMILARITY` to
        1: arrays of one length.
    """
    # In scripts without spaces, older signatures consist of what stands between spaces: they
    # were made before each character counted as a word.
    unspaced = [number for number, text in enumerate(documents) if has_unspaced(text)]
    of_spaces = [documents[number] for number in unspaced]
    best = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    for numbers, ngrams in (
        (np.arange(len(documents)), _ngrams(documents)),
        (np.array(unspaced, np.int64), _ngrams(of_spaces, parts_characters=False)),
    ):
        # Documents have all of their n-grams, and signatures every fifth.
        # A document of very few n-grams counts as if it had `FEWEST_NGRAMS`.
        sizes = np.maximum(np.diff(ngrams.offsets) // NGRAM_SIZE, FEWEST_NGRAMS)
        for document, text, common in references.common(ngrams):
            similarity = np.minimum(1, common / np.minimum(references.sizes[text], sizes[document]))
            enough = similarity >= SIMILARITY
            best.append((numbers[document[enough]], text[enough], similarity[enough]))
    document, text, similarity = map(np.concatenate, zip(*best, strict=True))
    # Of each document's matches the most similar one, of several the first text.
    order = np.lexsort((text, -similarity, document))
    first = order[run_starts(document[order])]
    return document[first], text[first], similarity[first]


def as_references(signatures: Sequence[np.ndarray]) -> NGrams:
    """Signatures as reference texts, which are numbered in this order."""
    hashes = np.concatenate(signatures).astype(np.uint64)
    return group_ngrams(Shingles(hashes, ends_of(np.array([len(ngrams) for ngrams in signatures]))))


def _ngrams(texts: Sequence[str], parts_characters: bool = True) -> Shingles:
    """All n-grams of each text, as 32 bits of their hashes."""
    ngrams = ngrams_of(sum_words(list(map(fold, texts)), parts_characters), NGRAM_SIZE)
    return Shingles(ngrams.hashes >> np.uint64(32), ngrams.offsets)
