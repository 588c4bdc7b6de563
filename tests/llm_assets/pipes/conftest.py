"""The clients, talking to the local Google."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.llm_assets.pipes.runner import PROGRAM, Runner
from tests.llm_assets.pipes.scenes import MACHINES, SPARK, VERTEX, Scene
from tests.stand_ins.google import BUCKET, LocalGoogle


@pytest.fixture
def program_in_bucket(google: LocalGoogle) -> None:
    from google.cloud import storage

    bucket = storage.Client().bucket(BUCKET)
    bucket.blob("report.py").upload_from_string(PROGRAM.read_text())
    bucket.delete_blobs(list(bucket.list_blobs(prefix="messages/")))


@pytest.fixture
def runner_of(
    google: LocalGoogle, program_in_bucket: None, tmp_path: Path
) -> Callable[[str], Runner]:
    """Makes a runner for a client."""
    return lambda name: Runner(name, google, output=tmp_path / "dagster.txt")


@pytest.fixture(params=["vertex", "dataproc", "batch"])
def each_runner(request: pytest.FixtureRequest, runner_of: Callable[[str], Runner]) -> Runner:
    """A runner for each client."""
    return runner_of(request.param)


@pytest.fixture(params=["vertex", "dataproc"])
def runner(request: pytest.FixtureRequest, runner_of: Callable[[str], Runner]) -> Runner:
    """A runner for each of the two services that keep cancelled jobs."""
    return runner_of(request.param)


@pytest.fixture
def vertex_runner(runner_of: Callable[[str], Runner]) -> Runner:
    """A runner for Vertex AI alone."""
    return runner_of("vertex")


@pytest.fixture(params=[*MACHINES, VERTEX, SPARK], ids=str)
def scene(
    request: pytest.FixtureRequest,
    google: LocalGoogle,
    runner_of: Callable[[str], Runner],
    tmp_path: Path,
) -> Scene:
    """Of each service."""
    return Scene(request.param, runner_of(request.param.name), google, tmp_path / "starts")
