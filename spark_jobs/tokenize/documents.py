"""The first tasks of the tokenizing job: parts' documents become tokens, sent to their shards."""

import hashlib
from collections import Counter
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.cache import cache_key
from artifacts.errors import UserError
from artifacts.examples import read_example
from artifacts.numbers import ends_of
from artifacts.shards.format import in_split
from spark_jobs.decontaminate.overlap import PartOverlaps, entry_key
from spark_jobs.runtime.parquet import Part, cached_rows, flat_bytes
from spark_jobs.runtime.session import ARROW_BATCH_ROWS
from spark_jobs.tokenize.shards import (
    LISTED_SCHEMA,
    SENT_SCHEMA,
    UNUSED_SCHEMA,
    NumberedRows,
    ShardPlan,
)
from spark_jobs.tokenize.survey import NOT_SAMPLED
from spark_jobs.tokenize.tokenizer import (
    DocumentTokenizer,
    Engine,
    TokenizerFiles,
    template_libraries,
)

TOKENIZED_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("tokens", pa.binary()),
        ("absent", pa.int64()),
        ("targets", pa.binary()),
        ("left_out", pa.string()),
        ("was_cut", pa.bool_()),
    ]
)
"""What a document becomes: `position` shuffles it (`_position`), `tokens` are little-endian, start
and end included, `absent` counts bytes that the vocabulary cannot express. Of an example,
`targets` marks the tokens that are learnt, a byte each; `left_out` says why it is not used."""

WITHOUT_ANSWERS = "without_answers"
"""Why plain text that was once held out or validated on is not used beside conversations."""
CUT = "cut"
"""Counted beside the reasons why examples are left out: those that were cut, and are used."""


def tokens_key(files: TokenizerFiles, backend: Engine, plan: ShardPlan) -> str:
    """The cache key of tokens, to which the part is added; engines never share an entry.

    Tokens are cached by document, since other documents of a part may be dropped as copies next
    time. For 1 GB of text they save 9 s of one core with gigatoken, 440 s with Hugging Face.
    """
    libraries = {"gigatoken": {"gigatoken", "awkward"}, "hugging_face": {"tokenizers"}}[backend]
    examples = None
    if plan.form != "pretraining":
        # Whichever engine encodes the rest: examples are rendered and encoded by Hugging Face's.
        libraries = libraries | {"tokenizers"} | template_libraries(plan.form, plan.examples)
        rendering = [files.chat_template, files.bos_token, files.eos_token]
        examples = [plan.example_identity, *rendering]
    return cache_key(
        "tokens",
        __name__,
        [*sorted(libraries), "numpy", "pyarrow"],
        tokenizer=files.sha256,
        backend=backend,
        vocab_size=files.vocab_size,
        ends=[plan.start_token_id, plan.end_token_id],
        examples=examples,
    )


def tokenize_part(
    numbered: tuple[int, Part],
    files: TokenizerFiles,
    engine: Engine,
    plan: ShardPlan,
    key: str,
    overlaps: PartOverlaps,
) -> list[NumberedRows]:
    """Tokenize a part; `plan.references` knows it by the number that is given with it.

    Args:
        key: of `tokens_key`.
        overlaps: by which documents are compared with reference text.

    Returns:
        Documents (`SENT_SCHEMA`) for their shards, those that overlap too much with reference text
        (`LISTED_SCHEMA`) for their lists, and reasons (`UNUSED_SCHEMA`) to examples that are not
        used, `CUT` to how many were cut.
    """
    number, part = numbered
    documents = part.read(["id", "source", "cluster", "bytes", "text_hash", "split", "slice"])
    ids, name = documents["id"], part.content_name()
    # Read once at most, and not at all where tokens and overlaps come from the cache.
    texts = cache(lambda: part.read(["text"])["text"])

    def tokenize(places: np.ndarray) -> pa.Table:
        # Loading a tokenizer takes longer than reading a cached part, so it waits until here.
        tokenizer = _cached_tokenizer(files, engine)
        chosen = documents.select(["id"]).append_column("text", texts()).take(places)
        if plan.form == "pretraining":
            return _tokenize(chosen, tokenizer, plan)
        lines = part.read(["example"])["example"].take(places)
        if plan.form != "conversations" and lines.null_count:
            raise UserError(
                f"Document {chosen['id'].filter(lines.is_null())[0].as_py()!r} is plain text, "
                f"beside which no {plan.form} are learned. Set `examples` of its source, or take "
                "the source out of `raw_corpus.sources`."
            )
        return _tokenize_examples(chosen, lines, tokenizer, plan)

    tokens = cached_rows(overlaps.folder, entry_key(key, name), ids, tokenize)
    for column in tokens.schema.names:
        documents = documents.append_column(column, tokens[column])
    overlap = np.zeros(len(ids))
    if plan.references:
        overlap = overlaps.of_documents(name, ids, texts, plan.references(number))
    used, removed = _choose(documents, overlap, plan)
    left_out = used["left_out"]
    counts = Counter(left_out.filter(left_out.is_valid()).to_pylist())
    used = used.filter(left_out.is_null())
    counts[CUT] = pc.sum(used["was_cut"]).as_py() or 0
    # Without reasons that did not occur.
    counts = +counts
    unused = pa.table([list(counts), list(counts.values())], UNUSED_SCHEMA)
    return [
        NumberedRows(plan.shard_of(used), _as(used, SENT_SCHEMA)),
        NumberedRows(plan.list_of(removed), _as(removed, LISTED_SCHEMA)),
        NumberedRows(np.full(unused.num_rows, plan.unused), unused),
    ]


def _as(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    return rows.select(schema.names).cast(schema)


_tokenizers: dict[tuple[str, Engine], DocumentTokenizer] = {}


def _cached_tokenizer(files: TokenizerFiles, engine: Engine) -> DocumentTokenizer:
    """This worker's tokenizer: loading one takes longer than a small part."""
    key = (files.sha256, engine)
    if key not in _tokenizers:
        _tokenizers[key] = DocumentTokenizer(files, engine)
    return _tokenizers[key]


def _tokenize(documents: pa.Table, tokenizer: DocumentTokenizer, plan: ShardPlan) -> pa.Table:
    """`id` and `text` to `TOKENIZED_SCHEMA`."""
    pieces = [
        _tokenize_batch(piece, tokenizer, plan) for piece in documents.to_batches(ARROW_BATCH_ROWS)
    ]
    return pa.Table.from_batches(pieces, TOKENIZED_SCHEMA)


def _tokenize_batch(
    batch: pa.RecordBatch, tokenizer: DocumentTokenizer, plan: ShardPlan
) -> pa.RecordBatch:
    ids, offsets = tokenizer.encode(batch["text"])
    # Checked before ids become `plan.dtype`, where numpy would silently turn one that is too large
    # into another id.
    if len(ids) and int(ids.max()) >= plan.vocab_size:
        worst = int(np.searchsorted(offsets, int(ids.argmax()), side="right")) - 1
        raise UserError(
            f"Document {batch['id'][worst].as_py()!r} has the token id {ids.max()}, outside the "
            f"model's vocabulary of {plan.vocab_size}: tokenizer and model do not belong together."
        )
    tokens, bounds = _enclose(ids, offsets, plan)
    # numpy counts the bounds in 64 bits, and `binary` has offsets of 32.
    packed = pa.Array.from_buffers(
        pa.large_binary(),
        batch.num_rows,
        [None, pa.py_buffer(bounds * plan.dtype.itemsize), pa.py_buffer(tokens)],
    )
    positions = pa.array(
        [_position(identifier, 0) for identifier in batch["id"].to_pylist()], pa.int64()
    )
    absent = _count_bytes(batch["text"], tokenizer.absent_bytes)
    columns = [positions, packed.cast(pa.binary()), absent]
    columns += [pa.nulls(batch.num_rows, field.type) for field in list(TOKENIZED_SCHEMA)[3:]]
    return pa.RecordBatch.from_arrays(columns, schema=TOKENIZED_SCHEMA)


def _tokenize_examples(
    documents: pa.Table, lines: pa.ChunkedArray, tokenizer: DocumentTokenizer, plan: ShardPlan
) -> pa.Table:
    """`id` and `text`, with the examples that they are, to `TOKENIZED_SCHEMA`."""
    # Examples, too, are tokenized as plain text, which gives their `position` and `absent`.
    plain = _tokenize(documents, tokenizer, plan).to_pylist()
    encoder = plan.example_tokenizer(tokenizer.files)
    rows = []
    for identifier, line, row in zip(
        documents["id"].to_pylist(), lines.to_pylist(), plain, strict=True
    ):
        # Plain text beside conversations stays as it was tokenized.
        if line is not None:
            encoded = encoder.encode(read_example(line), identifier)
            row |= {
                "tokens": encoded.tokens.astype(plan.dtype).tobytes(),
                "targets": encoded.is_target.astype(np.uint8).tobytes(),
                "left_out": encoded.left_out,
                "was_cut": encoded.was_cut,
            }
        rows.append(row)
    return pa.Table.from_pylist(rows, TOKENIZED_SCHEMA)


def _choose(documents: pa.Table, overlap: np.ndarray, plan: ShardPlan) -> tuple[pa.Table, pa.Table]:
    """Choose the documents that are used, each as often as it is seen.

    Also returns a list of those that are not, since they overlap too much with reference text.
    """
    # There is plenty of text to replay, so none of it need share anything with reference text.
    is_replayed = in_split(documents, "replay")
    limit = np.where(is_replayed, 0, plan.decontamination.maximum_overlap)
    # Held-out text stays: it is what all other text is compared with.
    is_removed = (overlap > limit) & ~in_split(documents, "held_out")
    listed = documents.append_column("overlap", pa.array(overlap)).filter(pa.array(is_removed))

    copies = plan.mixing.copies(documents)
    nothing = pa.scalar(None, pa.string())
    not_sampled = pc.if_else(pa.array(copies == 0), NOT_SAMPLED, nothing)
    # On record as text that judges, from when plain text was learned, it may never be trained on.
    judges = in_split(documents, "held_out") | in_split(documents, "validation")
    is_plain = documents["targets"].is_null().to_numpy()
    without = pa.array(judges & is_plain & (plan.form == "conversations"))
    no_answers = pc.if_else(without, WITHOUT_ANSWERS, nothing)
    left_out = pc.coalesce(documents["left_out"], no_answers, not_sampled)
    documents = _replace(documents, "left_out", left_out)
    # What is left out is counted once, however often it would have been seen.
    copies = np.where(left_out.is_valid(), 1, copies)
    copies[is_removed] = 0
    if np.all(copies == 1):
        return documents, listed
    return _repeat(documents, copies), listed


def _repeat(documents: pa.Table, copies: np.ndarray) -> pa.Table:
    """Documents, each so often; every further copy has a place of its own in the shuffle."""
    rows = np.repeat(np.arange(len(copies)), copies)
    copy = np.arange(len(rows)) - (np.cumsum(copies) - copies)[rows]
    documents = documents.take(pa.array(rows))
    positions = documents["position"].to_numpy().copy()
    for place in np.flatnonzero(copy).tolist():
        positions[place] = _position(documents["id"][place].as_py(), int(copy[place]))
    documents = _replace(documents, "position", pa.array(positions))
    # A document that was cut is counted once, however many copies there are.
    return _replace(documents, "was_cut", pc.and_(documents["was_cut"], pa.array(copy == 0)))


def _replace(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


def _enclose(
    ids: np.ndarray, offsets: np.ndarray, plan: ShardPlan
) -> tuple[np.ndarray, np.ndarray]:
    """Put start and end tokens around every document: `(tokens, bounds)`."""
    count = len(offsets) - 1
    bounds = offsets + 2 * np.arange(count + 1)
    tokens = np.empty(int(bounds[-1]), plan.dtype)
    # All places but the first and the last of each document.
    inner = np.ones(len(tokens), bool)
    inner[bounds[:-1]] = inner[bounds[1:] - 1] = False
    tokens[inner] = ids
    tokens[bounds[:-1]] = plan.start_token_id
    tokens[bounds[1:] - 1] = plan.end_token_id
    return tokens, bounds


def _position(identifier: str, copy: int) -> int:
    """A number in [0, 2**63) that shuffles documents; it depends only on the id and the copy."""
    salt = copy.to_bytes(8, "little")
    digest = hashlib.blake2b(identifier.encode(), digest_size=8, salt=salt).digest()
    # 63 bits, since the column is of signed numbers.
    return int.from_bytes(digest, "little") >> 1


def _count_bytes(texts: pa.Array, values: bytes) -> pa.Array:
    """How often any of some byte values occurs in each text."""
    counts = np.zeros(len(texts), np.int64)
    if values and len(texts):
        content, offsets = flat_bytes(texts)
        # Usually there is none at all, which one pass over the batch tells.
        if len(content.tobytes().translate(None, values)) < len(content):
            is_wanted = np.isin(content, np.frombuffer(values, np.uint8))
            counts = np.diff(ends_of(is_wanted)[offsets])
    return pa.array(counts, pa.int64())
