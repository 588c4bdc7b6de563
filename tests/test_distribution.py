"""The files that are begun first are there."""

from tests.distribution import LONGEST_FIRST, ROOT


def test_every_file_that_it_names_exists() -> None:
    assert [file for file in LONGEST_FIRST if not (ROOT / file).exists()] == []
