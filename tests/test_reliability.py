"""docs/reliability.md says what the tests prove, and nothing else."""

import pytest

from tests.reliability import COLLECTED, PAGE, cells, marked_files, page


def test_the_page_is_what_the_tests_say() -> None:
    if not marked_files() <= {item.path for item in COLLECTED.items}:
        pytest.skip("only a run of the whole suite sees all cells")
    found = cells(COLLECTED.items)
    assert page(found) == PAGE.read_text(), "run: python -m tests.reliability"
    assert len(found) >= 100
