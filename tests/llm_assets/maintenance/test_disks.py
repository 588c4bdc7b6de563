"""A disk that is full or read-only, at every stage: one line says so, the same goes on later."""

import shutil
from collections.abc import Iterator

import pytest

from tests.conftest import Project
from tests.damage import delete
from tests.faults import Disk, small_disk
from tests.llm_assets.forgetting.conftest import documents_of
from tests.llm_assets.in_process import ask, content

MEGABYTES = 256
ROOM = {
    "raw_corpus": 40,
    "base_model": 100,
    "clean_corpus": 80,
    "tokenized_shards": 60,
    "checkpoint": 300,
    "eval_metrics": 24,
    "model_version": 0,
}
"""Stage to the kilobytes that are left to it, so that it fails in the middle of its work."""
QUICK = ("raw_corpus", "base_model")
STAGES = [
    pytest.param(asset, marks=() if asset in QUICK else pytest.mark.soak, id=asset)
    for asset in ROOM
]


@pytest.fixture
def disk(judged: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A disk of its own for the judged project's store, which is on it."""
    monkeypatch.setenv("LLM_ASSETS_CONFIG", str(judged.config))
    with small_disk(judged.folder / "store", MEGABYTES) as mounted:
        shutil.copytree(judged.folder / "as it was", mounted.folder, dirs_exist_ok=True)
        yield mounted


def forget(project: Project, asset: str) -> dict[str, str | None]:
    """Remove a stage's artifact and all that could make it again without work; what it held."""
    artifact = project.current(asset)
    before = content(artifact)
    delete(artifact)
    for folder in ("cache", "runs"):
        shutil.rmtree(project.folder / "store" / folder, ignore_errors=True)
    return before


def one_line(said: str) -> str:
    assert said and "Traceback" not in said and '  File "' not in said, said
    return said


@pytest.mark.fault(
    "{asset}",
    "disk full in the middle of the work",
    sees="the path, the free space, and what to do",
    then="no finished work is lost; once there is space, the same command gives the same content",
)
@pytest.mark.parametrize("asset", STAGES)
def test_a_full_disk_is_named_and_the_same_command_goes_on(
    judged: Project, disk: Disk, asset: str
) -> None:
    before = forget(judged, asset)
    disk.leave(ROOM[asset])
    assert "No space left on the disk" in one_line(ask(judged, asset))
    disk.grow(MEGABYTES)
    assert ask(judged, asset) == ""
    assert content(judged.current(asset)) == before


@pytest.mark.fault(
    "{asset}",
    "disk read-only",
    sees="the path, and that it is mounted read-only",
    then="nothing is recorded as built",
)
@pytest.mark.parametrize("asset", STAGES)
def test_a_read_only_disk_is_named(judged: Project, disk: Disk, asset: str) -> None:
    forget(judged, asset)
    disk.read_only()
    assert "mounted read-only" in one_line(ask(judged, asset))
    assert judged.record.find_current(asset) is None


@pytest.mark.fault(
    "store",
    "disk read-only while `trace` or `forget` searches",
    sees="the path, and that it is mounted read-only, in one line",
    then="nothing is begun",
)
@pytest.mark.parametrize(
    "command", [("trace", "--version", "1", "--text"), ("forget", "--reason", "any", "--yes")]
)
def test_a_read_only_disk_ends_a_search_before_spark_is_started(
    judged: Project, disk: Disk, command: tuple[str, ...]
) -> None:
    shutil.rmtree(judged.folder / "store" / "cache", ignore_errors=True)
    document = next(iter(documents_of(judged).values()))
    disk.read_only()
    asked = document["text"] if command[0] == "trace" else document["id"]
    ended = judged.run("llm-assets", *command, asked)
    assert ended.returncode == 1
    (said,) = ended.stderr.splitlines()
    assert "is on a file system that is mounted read-only" in said
