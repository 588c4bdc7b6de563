"""Every row that is sent to a shard arrives there, once."""

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_jobs.tokenize import shuffle as exchange
from spark_jobs.tokenize.shuffle import ExchangeWriter, Range, read_ranges
from tests.stand_ins.google import BUCKET, LocalGoogle

Sent = list[list[tuple[int, list[str]]]]
"""For each writer, the shard and the rows of every table."""


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sent=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.lists(st.text(), min_size=1)), min_size=1),
        min_size=1,
    ),
    buffer=st.integers(1, 200),
)
def test_what_several_writers_send_arrives_whole(
    sent: Sent, buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "BUFFER_BYTES", buffer)
    ranges: dict[int, list[Range]] = defaultdict(list)
    expected: dict[int, list[str]] = defaultdict(list)
    for tables in sent:
        with ExchangeWriter(str(tmp_path)) as writer:
            for shard, rows in tables:
                writer.add(shard, pa.table({"row": pa.array(rows, pa.string())}))
                expected[shard] += rows
        for shard, found in writer.ranges.items():
            ranges[shard] += found

    arrived = {shard: read_ranges(found)["row"].to_pylist() for shard, found in ranges.items()}

    assert arrived == expected


def test_an_attempt_that_fails_leaves_the_next_one_alone(tmp_path: Path) -> None:
    table = pa.table({"row": ["a"]})
    with pytest.raises(OSError, match="lost"), ExchangeWriter(str(tmp_path)) as first:
        first.add(0, table)
        raise OSError("the worker was lost")

    with ExchangeWriter(str(tmp_path)) as second:
        second.add(0, table)

    assert not first.ranges
    assert read_ranges(second.ranges[0]).equals(table)


def test_rows_arrive_through_a_bucket(google: LocalGoogle) -> None:
    tables = [pa.table({"row": [f"{number}" * 1_000] * 900}) for number in range(6)]

    with ExchangeWriter(f"gs://{BUCKET}/exchange") as writer:
        for number, table in enumerate(tables):
            writer.add(number % 2, table)

    for shard in range(2):
        assert read_ranges(writer.ranges[shard]).equals(pa.concat_tables(tables[shard::2]))
