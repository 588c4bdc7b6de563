"""Workers agree on the checkpoint that they go on from, and read it once between them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from artifacts import checkpoints
from tests.damage import flip_bit
from tests.recipes.conftest import PATIENCE_SECONDS, REPOSITORY

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp")
Found = dict[str, Any]


def save(run: Path, step: int) -> Path:
    """A checkpoint of files as two workers write them."""
    folder = Path(checkpoints.clear_step(str(run), step))
    for number, name in enumerate(FILES):
        (folder / name).write_bytes(bytes([step, number]) * 500)
    checkpoints.commit(str(run), step, {"settings": {}, "inputs": {}}, {})
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """What two workers read, got and said of three runs: `whole`, `damaged` and `lost`."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("whole", "damaged", "lost"):
        older, newer = (save(folder / name, step) for step in (4, 8))
        if name != "whole":
            flip_bit(newer / FILES[1])
        if name == "lost":
            flip_bit(older / FILES[2])
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "recipes.launcher.local", "--workers", "2", "--"),
            *(str(Path(__file__).with_name("find_together.py")), str(folder)),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return first, second


def test_each_file_is_read_once_by_one_of_the_workers(both: tuple[Found, Found]) -> None:
    first, second = (of_worker["whole"] for of_worker in both)
    assert first["got"] == second["got"] == "8"
    assert first["read"] and second["read"]
    assert sorted(first["read"] + second["read"]) == [f"step-8/{name}" for name in FILES]


@pytest.mark.fault(
    "checkpoint",
    "flipped bit in the part of a resumable state that one of two workers reads",
    sees="the step that is damaged, once",
    then="both use the previous state",
)
def test_what_one_worker_finds_damaged_no_worker_takes(both: tuple[Found, Found]) -> None:
    first, second = (of_worker["damaged"] for of_worker in both)
    assert f"step-8/{FILES[1]}" in second["read"], "not the worker that chooses"
    assert first["got"] == second["got"] == "4"
    (line,) = first["lines"]
    assert f"step-8/{FILES[1]} has another checksum" in line and not second["lines"]


def test_where_all_are_damaged_all_workers_end_alike(both: tuple[Found, Found]) -> None:
    first, second = (of_worker["lost"] for of_worker in both)
    assert first["got"] == second["got"]
    assert first["got"].startswith("Every checkpoint of ")
