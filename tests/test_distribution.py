"""The files that are begun first are there, and CI alone tries what a person leaves to it."""

import os
import subprocess
import sys

from tests.distribution import LONGEST_FIRST, ROOT
from tests.needs import EVERYTHING, LEFT_TO_CI


def test_every_file_that_it_names_exists() -> None:
    assert [file for file in (*LONGEST_FIRST, *LEFT_TO_CI) if not (ROOT / file).exists()] == []


def collected(*arguments: str, **variables: str) -> set[str]:
    """The folders of the tests that a pytest would run, of a part of this tree."""
    environment = {name: value for name, value in os.environ.items() if name != EVERYTHING}
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0", *arguments],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in listed.stdout.splitlines() if line.startswith("tests/")]
    return {line.rpartition("/")[0] for line in lines}


def test_what_is_left_to_ci_is_run_there_and_by_its_name() -> None:
    left, other = "tests/infrastructure", "tests/artifacts/program"
    assert left in LEFT_TO_CI
    no_names = ("-o", f"testpaths={left} {other}")
    assert collected(*no_names) == {other}
    assert collected(*no_names, **{EVERYTHING: "1"}) == {left, other}
    assert collected(left) == {left}
