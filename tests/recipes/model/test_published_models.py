"""docs/models.md says which families of models are trained exactly, and which are refused."""

from pathlib import Path

import pytest

from tests.published_models import FAMILIES, PAGE, page, rows

SAMPLE = ("OPT", "Mamba", "T5 v1.1, FLAN-T5", "Marian (OPUS-MT)", "XLM-R")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_of_the_page_is_what_happens(name: str, tmp_path: Path) -> None:
    (published,) = (one for one in FAMILIES if one.name == name)
    written = PAGE.read_text().splitlines()
    for row in rows(published, tmp_path):
        assert row in written, "run: python -m tests.published_models"


@pytest.mark.soak
def test_the_page_is_what_happens() -> None:
    assert len(FAMILIES) >= 40
    assert page() == PAGE.read_text(), "run: python -m tests.published_models"
