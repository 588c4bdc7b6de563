"""What is cached of documents is what would be made of them, and is made once."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_jobs.runtime.parquet import cached_rows


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.lists(st.lists(st.integers(0, 12), min_size=1, unique=True), min_size=1))
def test_the_rows_of_a_document_are_made_once(runs: list[list[int]], tmp_path: Path) -> None:
    key = f"entry-{len(list(tmp_path.iterdir()))}"
    before: set[int] = set()
    for documents in runs:
        made: list[int] = []

        def make(
            places: np.ndarray, documents: list[int] = documents, made: list[int] = made
        ) -> pa.Table:
            made += [documents[place] for place in places]
            return pa.table({"square": [documents[place] ** 2 for place in places]})

        ids = pa.chunked_array([[str(document) for document in documents]])
        rows = cached_rows(str(tmp_path), key, ids, make)

        assert rows.to_pydict() == {"square": [document**2 for document in documents]}
        assert sorted(made) == sorted(set(documents) - before)
        before |= set(documents)
