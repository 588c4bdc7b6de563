"""Splits follow from cluster ids alone."""

import numpy as np
import pyarrow as pa
import pytest

from spark_jobs.clean.history import HELD_OUT, by_hash
from spark_jobs.settings import SplitSettings
from spark_jobs.text import text_hash


def test_a_template_of_many_texts_is_held_out_no_likelier_than_one_text() -> None:
    settings = SplitSettings(validation=0.1, held_out=0.2)
    smallest = [min(text_hash(f"{n}-{text}") for text in range(40)) for n in range(1_000)]

    codes = by_hash(pa.array(smallest), settings, np.full(1_000, 40))

    assert abs(np.sum(codes == HELD_OUT) - 200) < 60


@pytest.mark.parametrize("raised", ["validation", "held_out"])
def test_a_share_that_is_raised_moves_clusters_only_towards_held_out(raised: str) -> None:
    clusters = pa.array([text_hash(f"{number}") for number in range(1_000)])
    shares = {"validation": 0.1, "held_out": 0.1}

    before = by_hash(clusters, SplitSettings(**shares), np.ones(1_000))
    after = by_hash(clusters, SplitSettings(**shares | {raised: 0.2}), np.ones(1_000))

    # Codes of splits ascend from training to held-out text.
    assert (after >= before).all() and (after > before).any()
