"""The shard format: what was written is read back, and damage is noticed."""

import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from artifacts.errors import DamagedArtifact, UserError
from artifacts.shards import format, shard_set
from artifacts.shards.shard_set import (
    ShardSet,
    find_shared_clusters,
    list_documents,
    read_tokens,
)
from artifacts.storage.files import CACHE_VARIABLE
from tests.tiny import read_documents, shard_stats, tiny_shards

BUCKET = "/bucket/shards"


def write_two_shards(folder: Path) -> format.ShardStats:
    """Rows of 4: shard 0 holds documents of 5 and 2 tokens, shard 1 one of 3."""
    segments = np.array([(0, 4, 0, 0), (0, 1, 0, 4), (1, 2, 1, 0)], format.SEGMENT)
    first = format.PackedRows(
        np.array([[1, 2, 3, 4], [5, 6, 7, 0]], np.uint16), segments, np.array([0, 1, 3])
    )
    second = format.PackedRows(
        np.array([[8, 9, 10, 0]], np.uint16),
        np.array([(0, 3, 0, 0)], format.SEGMENT),
        np.array([0, 1]),
    )
    entries = []
    for number, (rows, lengths) in enumerate(((first, [5, 2]), (second, [3]))):
        documents = pa.table(
            {
                "id": [f"{number}-{n}" for n in range(len(lengths))],
                "cluster": ["c"] * len(lengths),
                "source": ["s"] * len(lengths),
                "bytes": lengths,
                "tokens": lengths,
                "text_hash": ["t"] * len(lengths),
                "slice": [1] * len(lengths),
            },
            format.DOCUMENT_SCHEMA,
        )
        name = f"train-{number:05d}"
        format.write_shard(folder, name, rows, documents)
        entries.append(
            format.ShardEntry(
                name=name,
                split="train",
                rows=len(rows.tokens),
                tokens=sum(lengths),
                documents=len(lengths),
            )
        )
    return shard_stats(entries, sequence_length=4, vocab_size=11)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    """An object store, whose copies on this machine are in the folder `cache`."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "shards").mkdir()
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/", recursive=True)


def put_two_shards(folder: Path, bucket: fsspec.AbstractFileSystem) -> format.ShardStats:
    stats = write_two_shards(folder / "shards")
    bucket.put(str(folder / "shards"), BUCKET, recursive=True)
    return stats


def test_rows_and_documents_are_read_back_over_all_shards(tmp_path: Path) -> None:
    shards = ShardSet(tmp_path, write_two_shards(tmp_path), "train")

    assert [shards[index][0].tolist() for index in range(len(shards))] == [
        [1, 2, 3, 4],
        [5, 6, 7, 0],
        [8, 9, 10, 0],
    ]
    assert shards[1][1]["document"].tolist() == [0, 1]
    assert [(record["id"], tokens.tolist()) for record, tokens in read_documents(shards)] == [
        ("0-0", [1, 2, 3, 4, 5]),
        ("0-1", [6, 7]),
        ("1-0", [8, 9, 10]),
    ]
    with pytest.raises(IndexError):
        shards[3]


def test_a_split_without_rows_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no held_out rows.*clean_corpus.split.held_out"):
        ShardSet(tmp_path, write_two_shards(tmp_path), "held_out")


def test_a_short_or_absent_file_is_damage(tmp_path: Path) -> None:
    stats = write_two_shards(tmp_path)
    tokens = tmp_path / "train-00001.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DamagedArtifact, match=r"train-00001.tokens has 7 bytes.*8"):
        ShardSet(tmp_path, stats, "train")

    tokens.unlink()
    with pytest.raises(DamagedArtifact, match=r"train-00001.tokens is absent"):
        ShardSet(tmp_path, stats, "train")


@pytest.mark.parametrize(
    ("size", "expected"), [(49_152, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_narrowest_type_is_chosen(size: int, expected: str) -> None:
    assert format.token_dtype(size) == expected


def test_rows_of_several_shards_and_splits_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    stats = write_two_shards(tmp_path)
    stats.shards[1].split = "replay"
    shards = ShardSet(tmp_path, stats, "train", "replay")

    rows = shards.read(np.array([2, 0, 1, 2]))

    assert rows.tokens[:, 0].tolist() == [8, 1, 5, 8]
    assert rows.row_offsets.tolist() == [0, 1, 2, 4, 5]
    assert rows.segments["document"].tolist() == [0, 0, 0, 1, 0]
    assert shards.locate(2) == (stats.shards[1], 0) and shards.locate(1) == (stats.shards[0], 1)
    with pytest.raises(UserError, match=r"hold no rows to replay.*clean_corpus.split.sources"):
        ShardSet(tmp_path, write_two_shards(tmp_path), "train", "replay")


def test_shards_in_an_object_store_are_copied_when_first_read_and_kept(
    tmp_path: Path, bucket: fsspec.AbstractFileSystem
) -> None:
    stats = put_two_shards(tmp_path, bucket)

    def copied() -> set[str]:
        return {path.stem for path in (tmp_path / "cache").rglob("*.tokens")}

    shards = ShardSet(f"memory:/{BUCKET}", stats, "train")
    assert len(shards) == 3 and copied() == set()
    assert shards[2][0].tolist() == [8, 9, 10, 0] and copied() == {"train-00001"}

    bucket.rm(f"{BUCKET}/train-00001.rows")
    with pytest.raises(DamagedArtifact, match=r"shards/train-00001.rows is absent"):
        ShardSet(f"memory:/{BUCKET}", stats, "train")
    bucket.rm(BUCKET, recursive=True)
    assert shards[2][0].tolist() == [8, 9, 10, 0]
    with pytest.raises(DamagedArtifact, match="shards is absent"):
        ShardSet(f"memory:/{BUCKET}", stats, "train")


def test_shards_of_two_manifests_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    stats = write_two_shards(tmp_path)
    foreign = stats.shards[1].model_copy(update={"name": "train-00002"})
    for file in tmp_path.glob("train-00001.*"):
        (tmp_path / file.name.replace("00001", "00002")).write_bytes(file.read_bytes())

    assert len(ShardSet(tmp_path, stats, "train")) == 3
    both = stats.model_copy(update={"shards": [*stats.shards, foreign]})
    assert len(ShardSet(tmp_path, both, "train")) == 4

    for file in tmp_path.glob("train-00001.*"):
        (tmp_path / file.name.replace("00001", "00000")).write_bytes(file.read_bytes())
    with pytest.raises(DamagedArtifact, match="tokens has 8 bytes, but should have 16"):
        ShardSet(tmp_path, stats, "train")


def test_a_copy_that_was_interrupted_or_rewritten_elsewhere_is_made_again(
    tmp_path: Path, bucket: fsspec.AbstractFileSystem
) -> None:
    stats = put_two_shards(tmp_path, bucket)

    def first_row() -> list[int]:
        return ShardSet(f"memory:/{BUCKET}", stats, "train")[0][0].tolist()

    assert first_row() == [1, 2, 3, 4]
    (copy,) = (tmp_path / "cache").rglob("train-00000.tokens")
    copy.write_bytes(copy.read_bytes()[:3])
    assert first_row() == [1, 2, 3, 4]
    # A copy carries its object's time in whole seconds.
    time.sleep(1)
    bucket.pipe_file(f"{BUCKET}/train-00000.tokens", bytes(16))
    assert first_row() == [0, 0, 0, 0]


def test_who_needs_no_tokens_copies_none_and_copies_are_their_owners_alone(
    tmp_path: Path, bucket: fsspec.AbstractFileSystem
) -> None:
    shards = ShardSet(f"memory:/{BUCKET}", put_two_shards(tmp_path, bucket), "train")
    for shard in shards.shards:
        assert shard.documents(["slice"]).num_columns == 1 and len(shard.segments)

    copied = {path.suffix for path in (tmp_path / "cache").rglob("train-*") if path.is_file()}
    assert copied == {".parquet", ".segments", ".rows", ".lock"}
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


def test_who_reads_a_few_documents_copies_the_shards_that_hold_them(
    tmp_path: Path, bucket: fsspec.AbstractFileSystem, tiny_model_folder: Path
) -> None:
    stats = tiny_shards(tmp_path / "shards", tiny_model_folder)
    bucket.put(str(tmp_path / "shards"), BUCKET, recursive=True)

    shards = ShardSet(f"memory:/{BUCKET}", stats, "held_out")
    listed = list_documents(shards)
    chosen = listed.filter(pc.equal(listed["shard"], 1)).slice(0, 2)
    tokens = read_tokens(shards, chosen)

    assert list(map(len, tokens)) == chosen["tokens"].to_pylist()
    copied = [path.name for path in (tmp_path / "cache").rglob("*.tokens")]
    assert copied == ["held_out-00001.tokens"]


@pytest.mark.parametrize("at_a_time", [1, 1000])
def test_clusters_in_two_splits_are_found_whatever_fits_into_memory(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(shard_set, "CLUSTERS_AT_A_TIME", at_a_time)
    stats = tiny_shards(tmp_path, tiny_model_folder)
    folder = str(tmp_path)
    assert find_shared_clusters(folder, stats) == []

    for name in ("train-00001", "validation-00000"):
        path = tmp_path / f"{name}.documents.parquet"
        table = pq.read_table(path)
        held_out = pq.read_table(tmp_path / "held_out-00001.documents.parquet")["cluster"]
        clusters = [held_out[len(held_out) - 1].as_py(), *table["cluster"].to_pylist()[1:]]
        pq.write_table(table.set_column(1, "cluster", pa.array(clusters)), path)

    assert find_shared_clusters(folder, stats) == [clusters[0]]
