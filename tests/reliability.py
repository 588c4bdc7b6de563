"""Writes docs/reliability.md from what tests say of themselves: `python -m tests.reliability`.

A test that injects a fault carries the cell that it proves; values of its parameters may stand in
braces:

    @pytest.mark.fault("checkpoint", "killed rank", sees="...", then="...")
"""

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"
MARK = "fault"
STAGES = (
    "settings and commands",
    "raw_corpus",
    "clean_corpus",
    "tokenized_shards",
    "base_model",
    "checkpoint",
    "eval_metrics",
    "model_version",
    "endpoint",
    "store",
    "Google Cloud",
    "machines of Google Batch",
    "TPU machines (queued resources)",
    "jobs of Vertex AI",
    "batches of Dataproc Serverless",
)
COUNT = re.compile(r"^\d+ faults\.$", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Cell:
    """A fault at a stage."""

    stage: str
    fault: str
    sees: str
    then: str
    test: str
    is_soak: bool


def cells(items: Iterable[pytest.Item]) -> list[Cell]:
    """What the tests say, without repetition."""
    found = []
    for item in items:
        values = getattr(item, "callspec", None)
        for mark in item.iter_markers(MARK):
            stage, fault = mark.args
            texts = [stage, fault, mark.kwargs["sees"], mark.kwargs["then"]]
            if values is not None:
                texts = [text.format_map(_Values(values.params)) for text in texts]
            test = item.nodeid.partition("[")[0]
            found.append(
                Cell(*texts, test=test, is_soak=item.get_closest_marker("soak") is not None)
            )
    return sorted(set(found))


class _Values(dict[str, object]):
    """Parameters by name; what is none of them stays as it is."""

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"


def page(found: Iterable[Cell]) -> str:
    """The page, with its own words and tables of what was found; raises ValueError where one fault
    of a stage stands twice or a stage is unknown."""
    stages: dict[str, dict[str, Cell]] = defaultdict(dict)
    for cell in found:
        if cell.stage not in STAGES or cell.fault in stages[cell.stage]:
            raise ValueError(f"{cell.test}: {cell.stage}, {cell.fault}")
        stages[cell.stage][cell.fault] = cell
    words = PAGE.read_text().partition("\n## ")[0]
    text = COUNT.sub(f"{sum(map(len, stages.values()))} faults.", words)
    for stage in STAGES:
        if stage not in stages:
            continue
        text += f"\n## {stage}\n\n| fault | what the user sees | what happens next | test |\n"
        text += "|---|---|---|---|\n"
        for cell in stages[stage].values():
            file = cell.test.partition("::")[0]
            link = f"[{Path(file).stem}](../{file})" + (" *" if cell.is_soak else "")
            text += f"| {cell.fault} | {cell.sees} | {cell.then} | {link} |\n"
    return text


def marked_files() -> set[Path]:
    """The test files that carry a cell, by the mark itself or by `scene_fault`, which makes it."""
    carries = re.compile(rf"pytest\.mark\.{MARK}\(|^@scene_{MARK}\(", re.MULTILINE)
    return {
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if carries.search(path.read_text()) and path.name != "test_reliability.py"
    }


class Collector:
    """Sees every test, those that are not run too."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)


COLLECTED = Collector()
"""Of this test session."""


def main() -> int:
    """Collect the tests that carry a cell and write the page."""
    os.chdir(ROOT)
    collector = Collector()
    files = [str(path) for path in sorted(marked_files())]
    code = pytest.main(["--collect-only", "-qq", "-n", "0", *files], plugins=[collector])
    if code == 0:
        PAGE.write_text(page(cells(collector.items)))
    return code


if __name__ == "__main__":
    sys.exit(main())
