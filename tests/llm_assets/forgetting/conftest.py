"""What a project's corpora hold."""

import pyarrow.parquet as pq

from tests.conftest import Project


def documents_of(project: Project, kind: str = "clean_corpus") -> dict[str, dict[str, str]]:
    """The documents of a corpus by id."""
    corpus = project.record.current(kind, "test").path
    rows = [row for path in corpus.glob("part-*") for row in pq.read_table(path).to_pylist()]
    return {row["id"]: row for row in rows}
