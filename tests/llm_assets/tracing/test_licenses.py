"""Licenses of documents, read out of the few groups of rows that may hold them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.tracing.training_text import find_licenses

ROWS, GROUP = 400, 20


def snapshot(folder: Path, licenses: list[str | None]) -> Artifact:
    """Two files of documents in the order of their ids, in groups of rows."""

    def write(draft: Draft) -> None:
        for number, name in enumerate(("docs", "papers")):
            columns = {
                "id": [f"{name}/{row:05d}" for row in range(ROWS)],
                "text": [f"text {row}" for row in range(ROWS)],
                "source": [name] * ROWS,
                "license": [licenses[row % len(licenses)] for row in range(ROWS)],
            }
            path = draft.path / f"part-{number:05d}.parquet"
            pq.write_table(pa.table(columns), path, row_group_size=GROUP)

    return Store(str(folder)).make(Identity(kind="raw_corpus", code_version="1"), write)[0]


def blank(path: Path, spared: set[int]) -> None:
    """Overwrite the columns of a file's groups of rows but for some."""
    metadata = pq.read_metadata(path)
    content = bytearray(path.read_bytes())
    for number in set(range(metadata.num_row_groups)) - spared:
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            begin = column.dictionary_page_offset or column.data_page_offset
            content[begin : begin + column.total_compressed_size] = bytes(
                column.total_compressed_size
            )
    path.write_bytes(content)


def test_of_a_snapshot_in_order_only_the_groups_with_the_documents_are_read(tmp_path: Path) -> None:
    raw = snapshot(tmp_path, ["MIT", "CC-BY-4.0", None])
    blank(raw.path / "part-00000.parquet", {3})
    blank(raw.path / "part-00001.parquet", set())
    wanted = {f"docs/{row:05d}": "docs" for row in (60, 61, 62)}
    assert find_licenses(raw, wanted) == {"docs/00060": "MIT", "docs/00061": "CC-BY-4.0"}


def test_of_a_snapshot_in_no_order_all_are_found(tmp_path: Path) -> None:
    raw = snapshot(tmp_path, ["MIT"])
    path = raw.path / "part-00001.parquet"
    table = pq.read_table(path)
    shuffled = table.take(pa.array([(row * 7) % ROWS for row in range(ROWS)]))
    pq.write_table(shuffled, path, row_group_size=GROUP, write_statistics=False)
    wanted = {"papers/00000": "papers", "papers/00399": "papers", "docs/00200": "docs"}
    assert find_licenses(raw, wanted) == dict.fromkeys(wanted, "MIT")


def test_what_is_not_there_has_none(tmp_path: Path) -> None:
    raw = snapshot(tmp_path, ["MIT"])
    for wanted in ({}, {"docs/99999": "docs"}, {"docs/00001": "elsewhere"}):
        assert find_licenses(raw, wanted) == {}
    for path in raw.path.glob("part-*"):
        pq.write_table(pq.read_table(path).drop_columns("license"), path)
    assert find_licenses(raw, {"docs/00001": "docs"}) == {}
