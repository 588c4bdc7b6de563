"""The first tasks of the tokenising job: a part's documents become tokens, each with its place."""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import Broadcast

from artifacts.errors import UserError
from artifacts.shards import Split
from spark_jobs.decisions import CLEAN_SCHEMA
from spark_jobs.minhash import sum_words
from spark_jobs.mixing import repeat_rows
from spark_jobs.overlap import load_runs, overlaps
from spark_jobs.parquet import Part, write_table
from spark_jobs.session import ARROW_BATCH_ROWS
from spark_jobs.shard_writer import Plan, pack
from spark_jobs.tasks import spare_overhead
from spark_jobs.text import fold
from spark_jobs.tokenizer import DocumentTokenizer, Engine, TokenizerFiles

CODE_VERSION = "1"
"""Part of the name of kept tokens; raise it when tokenising gives another result."""

TOKEN_SCHEMA = pa.schema([("tokens", pa.binary()), ("absent", pa.int64())])

REMOVED_FOLDER = "overlaps_held_out"
"""Lists the documents that were left out, with the share of each that is held-out text."""


def tokeniser(
    shared: "Broadcast[tuple[TokenizerFiles, list[tuple[Part, str | None]]]]",
    engine: Engine,
    plan: Plan,
) -> Callable[[Iterable[int]], Iterator[tuple[int, bytes]]]:
    """A task that turns the parts it is given by number into documents for the shards.

    What it gives are pairs: the number of a shard in `plan.shard_names`, and documents of it, which
    `spark_jobs.shard_writer.unpack` reads.

    Args:
        shared: the tokenizer, and each part with where its tokens are kept (None: nowhere).
    """

    def tokenise(numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        spare_overhead()
        files, parts = shared.value
        tokenizer = _kept_tokenizer(files, engine)
        for number in numbers:
            part, kept = parts[number]
            documents = part.read(CLEAN_SCHEMA.names)
            tokens = _tokens_of(documents, tokenizer, plan, kept)
            for column in tokens.schema.names:
                documents = documents.append_column(column, tokens[column])
            _keep_held_out(documents, number, plan)
            yield from _by_shard(_choose(documents, number, plan), plan)

    return tokenise


def name_kept_tokens(cache: str, text_digest: str, files: TokenizerFiles, ends: str) -> str:
    """Where the tokens of a part are kept: all that decides them is in the name.

    Args:
        text_digest: of the part's texts.
        ends: names the start and end token.
    """
    content = f"{CODE_VERSION} {text_digest} {files.sha256} {files.vocab_size} {ends}"
    return f"{cache}/{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.parquet"


_tokenizers: dict[tuple[str, Engine], DocumentTokenizer] = {}


def _kept_tokenizer(files: TokenizerFiles, engine: Engine) -> DocumentTokenizer:
    """This worker's tokenizer: loading one takes longer than a small part."""
    key = (files.sha256, engine)
    if key not in _tokenizers:
        _tokenizers[key] = DocumentTokenizer(files, engine)
    return _tokenizers[key]


def _tokens_of(
    documents: pa.Table, tokenizer: DocumentTokenizer, plan: Plan, kept: str | None
) -> pa.Table:
    """`tokens` (little-endian, start and end included) and `absent` bytes of each document."""
    if kept is None:
        return _tokenise(documents, tokenizer, plan)
    filesystem, path = fsspec.core.url_to_fs(kept)
    if not filesystem.exists(path):
        write_table(kept, _tokenise(documents, tokenizer, plan))
    with filesystem.open(path, "rb") as file:
        return pq.read_table(file)


def _tokenise(documents: pa.Table, tokenizer: DocumentTokenizer, plan: Plan) -> pa.Table:
    pieces = [
        _tokenise_batch(piece, tokenizer, plan) for piece in documents.to_batches(ARROW_BATCH_ROWS)
    ]
    return pa.Table.from_batches(pieces, TOKEN_SCHEMA)


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
    absent = _count_bytes(batch["text"], tokenizer.absent_bytes)
    return pa.RecordBatch.from_arrays([packed.cast(pa.binary()), absent], schema=TOKEN_SCHEMA)


def _keep_held_out(documents: pa.Table, number: int, plan: Plan) -> None:
    """Write the held-out texts beside the shards, as clean parts.

    They make the shards a pin by themselves: a later corpus finds in them what to keep held out.
    """
    held_out = [split == "held_out" for split in plan.splitter.splits(documents)]
    if any(held_out):
        kept = documents.select(CLEAN_SCHEMA.names).filter(pa.array(held_out))
        write_table(f"{plan.output}/held_out/part-{number:05d}.parquet", kept)


def _choose(documents: pa.Table, number: int, plan: Plan) -> pa.Table:
    """The documents that are used, each as often as it is seen, with `split` and `copy`.

    Those that overlap too much with held-out text are listed beside the shards instead.
    """
    splits = plan.splitter.splits(documents)
    overlap = _overlap_with_held_out(documents["text"], splits, plan)
    # Of text to replay there is plenty, so what judges need not be measured against any of it.
    limit = np.where(np.array(splits) == "replay", 0, plan.decontamination.maximum_overlap)
    removed = overlap > limit
    documents = documents.drop_columns("text").append_column("split", pa.array(splits, pa.string()))
    if removed.any():
        listed = documents.select(["id", "source", "cluster", "bytes", "split"])
        listed = listed.append_column("overlap", pa.array(overlap)).filter(pa.array(removed))
        write_table(f"{plan.output}/{REMOVED_FOLDER}/part-{number:05d}.parquet", listed)
    copies = [
        0 if gone else plan.mixing.copies(*document)
        for gone, *document in zip(
            removed.tolist(),
            documents["id"].to_pylist(),
            documents["source"].to_pylist(),
            splits,
            strict=True,
        )
    ]
    rows = repeat_rows(copies)
    first = np.cumsum(copies) - copies
    copy = pa.array(np.arange(len(rows)) - first[rows], pa.int64())
    return documents.take(pa.array(rows, pa.int64())).append_column("copy", copy)


def _overlap_with_held_out(texts: pa.ChunkedArray, splits: list[Split], plan: Plan) -> np.ndarray:
    """How much of each text also stands in held-out text; 0 for held-out texts themselves."""
    limits = plan.decontamination
    if plan.runs is None:
        return np.zeros(len(splits))
    words = sum_words(list(map(fold, texts.to_pylist())))
    shares = overlaps(words, limits.run_words, load_runs(plan.runs))
    return np.where(np.array(splits) == "held_out", 0, shares)


def _by_shard(documents: pa.Table, plan: Plan) -> Iterator[tuple[int, bytes]]:
    """Give every document its position, and each shard its documents."""
    positions = [
        _position(identifier, copy)
        for identifier, copy in zip(
            documents["id"].to_pylist(), documents["copy"].to_pylist(), strict=True
        )
    ]
    shards = np.array(
        [
            plan.shard_number(split, position)
            for split, position in zip(documents["split"].to_pylist(), positions, strict=True)
        ],
        np.int64,
    )
    documents = documents.append_column("position", pa.array(positions, pa.int64()))
    for shard in np.unique(shards).tolist():
        yield shard, pack(documents.take(pa.array(np.flatnonzero(shards == shard))))


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
