"""The walks that docs/architecture.md shows are the ways that calls really take."""

import re
import subprocess
from ast import AsyncFunctionDef, ClassDef, FunctionDef, iter_child_nodes, parse
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, Project

HOOK = Path(__file__).parent / "calls_hook"
TITLES = ("A document to the loss", "The learning rate to the optimizer", "A request to its token")


def steps(title: str) -> list[tuple[str, str]]:
    """A walk of the page, as `(file, function)` in order."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split(f"### {title}\n")[1].split("\n#")[0]
    return re.findall(r"^\| `([\w/.]+)` \| `([\w.]+)` \|", section, re.MULTILINE)


def defined(path: Path) -> Iterator[str]:
    """The qualified names of a module's functions and methods."""
    for node in iter_child_nodes(parse(path.read_text())):
        if isinstance(node, FunctionDef | AsyncFunctionDef):
            yield node.name
        if isinstance(node, ClassDef):
            for inner in node.body:
                if isinstance(inner, FunctionDef | AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}"


@pytest.mark.parametrize("title", TITLES)
def test_every_step_of_a_walk_is_a_function_of_its_file(title: str) -> None:
    walk = steps(title)
    assert len(walk) > 4
    for file, function in walk:
        assert function in set(defined(ROOT / file)), f"{file} has no {function}"


@pytest.mark.soak
def test_real_calls_take_the_walks_in_their_order(project: Project, tmp_path: Path) -> None:
    """Followed in every process, from `llm-assets run` to an answer of the endpoint."""
    walks = {title: steps(title) for title in TITLES}
    names = {f"{file}:{function}" for walk in walks.values() for file, function in walk}
    record = tmp_path / "calls.txt"
    following = {
        "PYTHONPATH": str(HOOK),
        "TEST_CALLS": " ".join(names),
        "TEST_CALLS_ROOT": f"{ROOT}/",
        "TEST_CALLS_FILE": str(record),
    }
    try:
        ended = subprocess.run(
            ["llm-assets", "run"],
            cwd=project.folder,
            env=project.environment() | following,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (address,) = set(re.findall(r"http://127\.0\.0\.1:\d+", ended.stdout))
        asked = {"model": "manual", "prompt": "The", "max_tokens": 4, "stream": True}
        assert httpx.post(f"{address}/v1/completions", json=asked).status_code == 200
    finally:
        project.stop()
    calls = [line.split() for line in record.read_text().splitlines()]
    for title, walk in walks.items():
        at = 0
        for file, function in walk:
            later = (int(time) for time, name in calls if name == f"{file}:{function}")
            found = min((time for time in later if time > at), default=None)
            assert found is not None, (
                f"{title}: {file}, {function} is not called after the one before"
            )
            at = found
