"""The index finds every stretch that a text and a shard have in common, and nothing else."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import DamagedArtifact
from artifacts.shards import format
from artifacts.shards.shard_set import Shard, ShardFiles, text_numbers
from artifacts.shards.span_index import SHORTEST, SpanIndex, build_index
from tests.tiny import shard_stats

VOCAB = 5
ROW = 40


def make_shard(folder: Path, documents: list[list[int]]) -> Shard:
    """A shard of one segment a row, each document cut into rows."""
    tokens, segments = [], []
    for number, document in enumerate(documents):
        for offset in range(0, len(document), ROW):
            part = document[offset : offset + ROW]
            tokens.append(part + [0] * (ROW - len(part)))
            segments.append((0, len(part), number, offset))
    rows = format.PackedRows(
        np.array(tokens, "<u2"), np.array(segments, format.SEGMENT), np.arange(len(tokens) + 1)
    )
    names = [f"d{number}" for number in range(len(documents))]
    table = pa.table(
        [names, names, names, [1] * len(names), list(map(len, documents)), names, [1] * len(names)],
        names=format.DOCUMENT_SCHEMA.names,
    )
    folder.mkdir(exist_ok=True)
    format.write_shard(folder, "train-00000", rows, table)
    entry = format.ShardEntry(
        name="train-00000", split="train", rows=len(tokens), tokens=1, documents=1
    )
    return Shard(ShardFiles(folder), entry, shard_stats([entry], ROW, VOCAB))


def open_index(shard: Shard, folder: Path) -> SpanIndex:
    texts = text_numbers(shard.documents()["text_hash"].to_pylist())
    (folder / "index").write_bytes(b"12345678" + build_index(shard, texts, VOCAB))
    return SpanIndex(folder / "index", skipped=8)


def common(text: list[int], shard: Shard) -> set[tuple[int, int, int]]:
    """`(first, length, place)` of every stretch that cannot be made longer, by trying them all."""
    found = set()
    for row, segment in enumerate(shard.segments):
        stored = shard.tokens[row][: segment["length"]].tolist()
        for shift in range(-len(stored), len(text)):
            run = 0
            for at in range(max(0, shift), min(len(text), shift + len(stored)) + 1):
                inside = at < min(len(text), shift + len(stored))
                if inside and text[at] == stored[at - shift]:
                    run += 1
                    continue
                if run >= SHORTEST:
                    found.add((at - run, run, row * ROW + at - run - shift))
                run = 0
    return found


TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=100)


@settings(max_examples=60)
@given(documents=st.lists(TOKENS, min_size=1, max_size=4), text=TOKENS, data=st.data())
def test_all_common_stretches_are_found(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    text: list[int],
    data: st.DataObject,
) -> None:
    # A part of a document amid other tokens, as an answer holds it.
    quoted = documents[data.draw(st.integers(0, len(documents) - 1))]
    first = data.draw(st.integers(0, len(quoted)))
    text = text[:20] + quoted[first : first + 30] + text[20:]
    folder = tmp_path_factory.mktemp("shard")
    shard = make_shard(folder, documents)
    index = open_index(shard, folder)

    found = index.matches(np.array(text), shard)

    triples = zip(found.first.tolist(), found.length.tolist(), found.place.tolist(), strict=True)
    assert set(triples) == common(text, shard)
    for token in range(VOCAB):
        held = slice(*index.offsets[token : token + 2])
        expected = {
            number: document.count(token)
            for number, document in enumerate(documents)
            if token in document
        }
        counted = zip(index.documents[held].tolist(), index.counts[held].tolist(), strict=True)
        assert dict(counted) == expected


def test_an_index_takes_less_than_eight_bytes_per_token_and_a_cut_one_is_refused(
    tmp_path: Path,
) -> None:
    # As many different tokens as text has: the more repeat, the smaller the index.
    documents = [np.random.default_rng(n).zipf(1.2, 400) % VOCAB for n in range(500)]
    shard = make_shard(tmp_path, [document.tolist() for document in documents])
    open_index(shard, tmp_path)
    assert (tmp_path / "index").stat().st_size < 8 * 500 * 400
    content = (tmp_path / "index").read_bytes()
    for damaged in (content[:-1], content[:40], b""):
        (tmp_path / "index").write_bytes(damaged)
        with pytest.raises(DamagedArtifact, match="cut or no index"):
            SpanIndex(tmp_path / "index", skipped=8)
