"""Splits follow from cluster ids alone."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.clean.history import HELD_OUT, by_hash
from spark_jobs.settings import SplitSettings
from spark_jobs.text import text_hash
from tests.spark_jobs.splits import split_of

RANK = {"held_out": 0, "validation": 1, "train": 2}


def test_shares_are_met_on_many_documents() -> None:
    settings = SplitSettings(validation=0.1, held_out=0.2)
    splits = [split_of(text_hash(str(n)), settings) for n in range(10_000)]

    assert abs(splits.count("held_out") - 2_000) < 150
    assert abs(splits.count("validation") - 1_000) < 120


def test_a_template_of_many_texts_is_held_out_no_likelier_than_one_text() -> None:
    settings = SplitSettings(validation=0.1, held_out=0.2)
    smallest = [min(text_hash(f"{n}-{text}") for text in range(40)) for n in range(1_000)]

    codes = by_hash(pa.array(smallest), settings, np.full(1_000, 40))

    assert abs(np.sum(codes == HELD_OUT) - 200) < 60


@given(st.lists(st.text(), min_size=1), st.floats(0.01, 0.49), st.floats(0.01, 0.49))
def test_a_bridge_between_clusters_is_resolved_towards_held_out(
    members: list[str], validation: float, held_out: float
) -> None:
    settings = SplitSettings(validation=validation, held_out=held_out)
    hashes = [text_hash(member) for member in members]

    together = split_of(min(hashes), settings)

    assert RANK[together] == min(RANK[split_of(one, settings)] for one in hashes)
