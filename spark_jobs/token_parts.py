"""The first tasks of the tokenising job: parts' documents become tokens, sent to their shards."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from spark_jobs.exchange import ExchangeWriter
from spark_jobs.kept import kept_rows, name_kept
from spark_jobs.minhash import sum_words
from spark_jobs.overlap import load_runs, overlaps
from spark_jobs.parquet import Part
from spark_jobs.session import ARROW_BATCH_ROWS
from spark_jobs.shard_writer import EXCHANGED_SCHEMA, Plan
from spark_jobs.split import in_split
from spark_jobs.text import fold
from spark_jobs.tokenizer import DocumentTokenizer, Engine, TokenizerFiles

CODE_VERSION = "2"
"""Part of the name of kept parts; raise it when this module gives another result."""

TOKENISED_SCHEMA = pa.schema(
    [("position", pa.int64()), ("tokens", pa.binary()), ("absent", pa.int64())]
)
"""What a document becomes: `position` shuffles it (`_position`), `tokens` are little-endian, start
and end included, `absent` counts bytes that the vocabulary cannot express."""

REMOVED = -1
"""In place of a shard's number: the list of documents that were left out."""
REMOVED_NAME = "overlaps_held_out.parquet"
"""That list beside the shards, with the share of each document that is text that judges."""


@dataclass(frozen=True)
class _KeptPart:
    """Where a part's tokens are kept, and how much its documents overlap with text that judges.

    Both by document, since other documents of the part may be copies of other parts' next time.
    """

    tokens: str | None = None
    overlaps: str | None = None


def tokenise_parts(
    parts: list[Part],
    files: TokenizerFiles,
    engine: Engine,
    plan: Plan,
    exchange: str,
    folder: str | None,
) -> dict[str, Any]:
    """Tokenise parts and send their documents to their shards.

    Args:
        exchange: folder for what passes to the shards.
        folder: keeps tokens for the next run. Only of documents that are new are the texts read.

    Returns:
        `ranges`: a shard's number in `plan.shard_names` to where its documents are, `REMOVED` to
        where those are listed that overlap too much with text that judges; `kept`: all that was
        kept.
    """
    used = []
    with ExchangeWriter(exchange) as writer:
        for part in parts:
            kept = _name_kept_part(folder, part, files, plan) if folder else _KeptPart()
            used += [kept.tokens, kept.overlaps]
            tokenizer = partial(_kept_tokenizer, files, engine)
            documents, removed = _documents_of(part, kept, tokenizer, plan)
            if removed.num_rows:
                writer.add(REMOVED, removed)
            shards = plan.shard_numbers(documents)
            documents = documents.select(EXCHANGED_SCHEMA.names).cast(EXCHANGED_SCHEMA)
            for shard in np.unique(shards).tolist():
                writer.add(shard, documents.filter(pa.array(shards == shard)))
    return {"ranges": dict(writer.ranges), "kept": list(filter(None, used))}


def _name_kept_part(folder: str, part: Part, files: TokenizerFiles, plan: Plan) -> _KeptPart:
    common = {
        "code_version": CODE_VERSION,
        "part": part.name(["id", "text"]),
    }
    tokens = name_kept(
        folder,
        "parquet",
        **common,
        tokenizer=files.sha256,
        vocab_size=plan.vocab_size,
        ends=[plan.start_token_id, plan.end_token_id],
    )
    if plan.runs is None:
        return _KeptPart(tokens)
    words = plan.decontamination.run_words
    runs = plan.runs.rpartition("/")[2]
    return _KeptPart(tokens, name_kept(folder, "parquet", **common, runs=runs, words=words))


def _documents_of(
    part: Part,
    kept: _KeptPart,
    tokenizer: Callable[[], DocumentTokenizer],
    plan: Plan,
) -> tuple[pa.Table, pa.Table]:
    """A part's documents for the shards, with `split` and `text` (of held-out ones).

    And those that were removed (`_choose`).
    """
    documents = part.read(["id", "source", "cluster", "bytes", "pinned"])
    texts = cache(lambda: part.read(["text"])["text"])

    def tokenise(places: np.ndarray) -> pa.Table:
        chosen = documents.select(["id"]).append_column("text", texts()).take(places)
        return _tokenise(chosen, tokenizer(), plan)

    def measure(places: np.ndarray) -> pa.Table:
        return pa.table({"overlap": _overlap(texts().take(places).to_pylist(), plan)})

    tokenised = kept_rows(kept.tokens, documents["id"], tokenise, "none")
    for column in tokenised.schema.names:
        documents = documents.append_column(column, tokenised[column])
    overlap = kept_rows(kept.overlaps, documents["id"], measure)["overlap"].to_numpy()
    documents = plan.splitter.add_split(documents)
    documents = documents.append_column("text", _held_out_texts(texts, documents))
    return _choose(documents, overlap, plan)


_tokenizers: dict[tuple[str, Engine], DocumentTokenizer] = {}


def _kept_tokenizer(files: TokenizerFiles, engine: Engine) -> DocumentTokenizer:
    """This worker's tokenizer: loading one takes longer than a small part."""
    key = (files.sha256, engine)
    if key not in _tokenizers:
        _tokenizers[key] = DocumentTokenizer(files, engine)
    return _tokenizers[key]


def _tokenise(documents: pa.Table, tokenizer: DocumentTokenizer, plan: Plan) -> pa.Table:
    """`id` and `text` to `TOKENISED_SCHEMA`."""
    pieces = [
        _tokenise_batch(piece, tokenizer, plan) for piece in documents.to_batches(ARROW_BATCH_ROWS)
    ]
    return pa.Table.from_batches(pieces, TOKENISED_SCHEMA)


def _tokenise_batch(
    batch: pa.RecordBatch, tokenizer: DocumentTokenizer, plan: Plan
) -> pa.RecordBatch:
    ids, offsets = tokenizer.encode(batch["text"])
    if len(ids) and int(ids.max()) >= plan.vocab_size:
        worst = int(np.searchsorted(offsets, int(ids.argmax()), side="right")) - 1
        raise UserError(
            f"Document {batch['id'][worst].as_py()!r} has the token id {ids.max()}, outside the "
            f"model's vocabulary of {plan.vocab_size}: tokenizer and model do not belong together."
        )
    tokens, bounds = _enclose(ids, offsets, plan)
    packed = pa.Array.from_buffers(
        pa.large_binary(),
        batch.num_rows,
        [None, pa.py_buffer(bounds * plan.dtype.itemsize), pa.py_buffer(tokens)],
    )
    positions = pa.array([_position(one, 0) for one in batch["id"].to_pylist()], pa.int64())
    absent = _count_bytes(batch["text"], tokenizer.absent_bytes)
    columns = [positions, packed.cast(pa.binary()), absent]
    return pa.RecordBatch.from_arrays(columns, schema=TOKENISED_SCHEMA)


def _overlap(texts: list[str], plan: Plan) -> np.ndarray:
    """How much of each text also stands in text that judges, held-out text above all."""
    if plan.runs is None:
        return np.zeros(len(texts))
    words = sum_words(list(map(fold, texts)))
    return overlaps(words, plan.decontamination.run_words, load_runs(plan.runs))


def _held_out_texts(texts: Callable[[], pa.ChunkedArray], documents: pa.Table) -> pa.Array:
    """The texts of held-out documents, which are written beside the shards; null for others."""
    held_out = in_split(documents, "held_out")
    if not held_out.any():
        return pa.nulls(len(held_out), pa.string())
    return pc.if_else(pa.array(held_out), texts(), None)


def _choose(documents: pa.Table, overlap: np.ndarray, plan: Plan) -> tuple[pa.Table, pa.Table]:
    """The documents that are used, each as often as it is seen.

    And a list of those that are not, since they overlap too much with text that judges.
    """
    # Of text to replay there is plenty, so what judges need not be measured against any of it.
    is_replayed = in_split(documents, "replay")
    limit = np.where(is_replayed, 0, plan.decontamination.maximum_overlap)
    removed = (overlap > limit) & ~in_split(documents, "held_out")
    listed = documents.select(["id", "source", "cluster", "bytes", "split"])
    listed = listed.append_column("overlap", pa.array(overlap)).filter(pa.array(removed))
    copies = np.where(removed, 0, plan.mixing.copies(documents))
    if np.all(copies == 1):
        return documents, listed
    rows = np.repeat(np.arange(len(copies)), copies)
    copy = np.arange(len(rows)) - (np.cumsum(copies) - copies)[rows]
    documents = documents.take(pa.array(rows))
    positions = documents["position"].to_numpy().copy()
    for place in np.flatnonzero(copy).tolist():
        positions[place] = _position(documents["id"][place].as_py(), int(copy[place]))
    column = documents.schema.get_field_index("position")
    return documents.set_column(column, "position", pa.array(positions)), listed


def _enclose(ids: np.ndarray, offsets: np.ndarray, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Put start and end tokens around every document: `(tokens, bounds)`."""
    count = len(offsets) - 1
    bounds = offsets + 2 * np.arange(count + 1)
    tokens = np.empty(int(bounds[-1]), plan.dtype)
    inner = np.ones(len(tokens), bool)
    inner[bounds[:-1]] = inner[bounds[1:] - 1] = False
    tokens[inner] = ids
    tokens[bounds[:-1]] = plan.start_token_id
    tokens[bounds[1:] - 1] = plan.end_token_id
    return tokens, bounds


def _position(identifier: str, copy: int) -> int:
    """A number in [0, 2**63) that shuffles the documents and depends on nothing but the id."""
    salt = copy.to_bytes(8, "little")
    digest = hashlib.blake2b(identifier.encode(), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "little") >> 1


def _count_bytes(texts: pa.Array, wanted: bytes) -> pa.Array:
    """How often any of some byte values occurs in each text."""
    counts = np.zeros(len(texts), np.int64)
    if wanted and len(texts):
        offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
        content = memoryview(texts.buffers()[2])[offsets[0] : offsets[-1]].tobytes()
        # Usually there is none at all, which one pass over the batch tells.
        if len(content.translate(None, wanted)) < len(content):
            is_wanted = np.isin(np.frombuffer(content, np.uint8), np.frombuffer(wanted, np.uint8))
            before = np.concatenate([[0], np.cumsum(is_wanted)])
            counts = np.diff(before[offsets - offsets[0]])
    return pa.array(counts, pa.int64())
