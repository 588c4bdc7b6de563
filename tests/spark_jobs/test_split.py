"""Splits follow from cluster ids alone."""

from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.settings import SplitSettings
from spark_jobs.text.normalize import text_hash
from tests.spark_jobs.splits import split_of

RANK = {"held_out": 0, "validation": 1, "train": 2}


def test_shares_are_met_on_many_documents() -> None:
    settings = SplitSettings(validation=0.1, held_out=0.2)
    splits = [split_of(text_hash(str(n)), settings) for n in range(10_000)]

    assert abs(splits.count("held_out") - 2_000) < 150
    assert abs(splits.count("validation") - 1_000) < 120


@given(st.lists(st.text(), min_size=1), st.floats(0.01, 0.49), st.floats(0.01, 0.49))
def test_a_bridge_between_clusters_is_resolved_towards_held_out(
    members: list[str], validation: float, held_out: float
) -> None:
    settings = SplitSettings(validation=validation, held_out=held_out)
    hashes = [text_hash(member) for member in members]

    together = split_of(min(hashes), settings)

    assert RANK[together] == min(RANK[split_of(one, settings)] for one in hashes)
