"""The clients, talking to the local Google."""

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


@pytest.fixture(params=["vertex", "dataproc", "batch"])
def each_runner(
    request: pytest.FixtureRequest, google: LocalGoogle, program_in_bucket: None, tmp_path: Path
) -> Runner:
    """A runner for each client."""
    return Runner(request.param, google, output=tmp_path / "dagster.txt")


@pytest.fixture(params=["vertex", "dataproc"])
def runner(
    request: pytest.FixtureRequest,
    google: LocalGoogle,
    program_in_bucket: None,
    tmp_path: Path,
) -> Runner:
    """A runner for each of the two services that keep cancelled jobs."""
    return Runner(request.param, google, output=tmp_path / "dagster.txt")


@pytest.fixture
def vertex_runner(google: LocalGoogle, program_in_bucket: None, tmp_path: Path) -> Runner:
    """A runner for Vertex AI alone."""
    return Runner("vertex", google, output=tmp_path / "dagster.txt")


@pytest.fixture(params=[*MACHINES, VERTEX, SPARK], ids=str)
def scene(
    request: pytest.FixtureRequest, google: LocalGoogle, program_in_bucket: None, tmp_path: Path
) -> Scene:
    """Of each service."""
    runner = Runner(request.param.name, google, output=tmp_path / "dagster.txt")
    return Scene(request.param, runner, google, tmp_path / "starts")
