"""Splits follow from cluster ids alone."""

import numpy as np
import pyarrow as pa

from spark_jobs.clean.history import HELD_OUT, by_hash
from spark_jobs.settings import SplitSettings
from spark_jobs.text import text_hash


def test_a_template_of_many_texts_is_held_out_no_likelier_than_one_text() -> None:
    settings = SplitSettings(validation=0.1, held_out=0.2)
    smallest = [min(text_hash(f"{n}-{text}") for text in range(40)) for n in range(1_000)]

    codes = by_hash(pa.array(smallest), settings, np.full(1_000, 40))

    assert abs(np.sum(codes == HELD_OUT) - 200) < 60
