"""The first tasks of the tokenising job: a part's documents become tokens, each with its place."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyspark import Broadcast

from artifacts.errors import UserError
from spark_jobs.decisions import CLEAN_SCHEMA
from spark_jobs.parquet import Part
from spark_jobs.session import ARROW_BATCH_ROWS
from spark_jobs.settings import SplitSettings
from spark_jobs.shard_writer import BatchMap, Plan
from spark_jobs.split import split_of
from spark_jobs.tasks import keep_archive_directories
from spark_jobs.tokenizer import DocumentTokenizer, Engine, TokenizerFiles

TOKENISED = (
    "split string, shard int, position long, id string, cluster string, source string, "
    "bytes long, tokens binary, absent long"
)
_COLUMNS = [column.split()[0] for column in TOKENISED.split(", ")]


def tokeniser(
    shared: "Broadcast[tuple[TokenizerFiles, list[Part]]]",
    engine: Engine,
    plan: Plan,
    split: SplitSettings,
) -> BatchMap:
    """A task that turns the parts it is given by number into rows of `TOKENISED`."""

    def tokenise(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        keep_archive_directories()
        files, parts = shared.value
        tokenizer = _kept_tokenizer(files, engine)
        for batch in batches:
            for number in batch["id"].to_pylist():
                documents = parts[number].read(CLEAN_SCHEMA.names)
                for piece in documents.to_batches(ARROW_BATCH_ROWS):
                    yield _tokenise_batch(piece, tokenizer, plan, split)

    return tokenise


_tokenizers: dict[tuple[str, Engine], DocumentTokenizer] = {}


def _kept_tokenizer(files: TokenizerFiles, engine: Engine) -> DocumentTokenizer:
    """This worker's tokenizer: loading one takes longer than a small part."""
    key = (files.sha256, engine)
    if key not in _tokenizers:
        _tokenizers[key] = DocumentTokenizer(files, engine)
    return _tokenizers[key]


def _tokenise_batch(
    batch: pa.RecordBatch, tokenizer: DocumentTokenizer, plan: Plan, split: SplitSettings
) -> pa.RecordBatch:
    ids, offsets = tokenizer.encode(batch["text"])
    if len(ids) and int(ids.max()) >= plan.vocab_size:
        worst = int(np.searchsorted(offsets, int(ids.argmax()), side="right")) - 1
        raise UserError(
            f"Document {batch['id'][worst].as_py()!r} has the token id {ids.max()}, outside the "
            f"model's vocabulary of {plan.vocab_size}: tokenizer and model do not belong together."
        )
    tokens, bounds = _enclose(ids, offsets, plan)
    splits = [split_of(cluster, split) for cluster in batch["cluster"].to_pylist()]
    positions = [_position(identifier) for identifier in batch["id"].to_pylist()]
    shards = [
        plan.shards[split] * position >> 63
        for split, position in zip(splits, positions, strict=True)
    ]
    packed = pa.Array.from_buffers(
        pa.large_binary(),
        batch.num_rows,
        [None, pa.py_buffer(bounds * plan.dtype.itemsize), pa.py_buffer(tokens)],
    )
    absent = [_count(text, tokenizer.absent_bytes) for text in batch["text"].to_pylist()]
    columns = {
        "split": pa.array(splits, pa.string()),
        "shard": pa.array(shards, pa.int32()),
        "position": pa.array(positions, pa.int64()),
        "tokens": packed.cast(pa.binary()),
        "absent": pa.array(absent, pa.int64()),
    }
    arrays = [columns[name] if name in columns else batch[name] for name in _COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, names=_COLUMNS)


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


def _position(identifier: str) -> int:
    """A number in [0, 2**63) that shuffles the documents and depends on nothing but the id."""
    digest = hashlib.blake2b(identifier.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _count(text: str, wanted: bytes) -> int:
    if not wanted:
        return 0
    content = text.encode()
    return len(content) - len(content.translate(None, wanted))
