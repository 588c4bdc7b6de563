"""The files that are begun first are there, and CI alone tries what a person leaves to it."""

import json
import subprocess
import sys

from tests.distribution import LONGEST_FIRST, ROOT
from tests.needs import EVERYTHING, LEFT_TO_CI

COLLECT = f"""
import json, os, sys
import pytest

class Folders:
    def pytest_collection_finish(self, session):
        paths = [item.nodeid.partition("::")[0] for item in session.items]
        print(json.dumps(sorted(set(map(os.path.dirname, paths)))))

for everything, arguments in json.loads(sys.argv[1]):
    os.environ["{EVERYTHING}"] = everything
    pytest.main(["--collect-only", "-qq", "-n", "0", *arguments], [Folders()])
"""
"""Prints the folders of the tests that each of some pytests would run."""


def test_every_file_that_it_names_exists() -> None:
    assert [file for file in (*LONGEST_FIRST, *LEFT_TO_CI) if not (ROOT / file).exists()] == []


def test_what_is_left_to_ci_is_run_there_and_by_its_name() -> None:
    left, other = "tests/infrastructure", "tests/artifacts/program"
    assert left in LEFT_TO_CI
    no_names = ["-o", f"testpaths={left} {other}"]
    asked = [("", no_names), ("1", no_names), ("", [left])]
    command = [sys.executable, "-c", COLLECT, json.dumps(asked)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in told.splitlines() if line.startswith("[")]
    assert found == [[other], [other, left], [left]]
