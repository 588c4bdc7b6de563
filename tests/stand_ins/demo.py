"""The whole graph on a local Google Cloud, for anyone without an account: `make demo-cloud`.

A tiny model learns a made-up manual from a BigQuery table: Spark batches through the Dataproc
client, training and evaluation through the Vertex AI client, on two replicas whose machines are
taken away once, a version in the Model Registry, a deployed endpoint, the rest in a bucket.

With `--containers`, which the tests of images use, each job runs in the root of its own image.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

import yaml

from artifacts.storage.files import CACHE_VARIABLE
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.cli.pipeline.run import LOG_FOLDER
from llm_assets.cloud.settings import CLOUD_CONFIG_VARIABLE
from tests.conftest import Project, make_project
from tests.stand_ins.bigquery import fill_table, running_bigquery
from tests.stand_ins.google import (
    BUCKET,
    CUDA_IMAGE,
    PROJECT,
    SERVE_IMAGE,
    SPARK_IMAGE,
    LocalGoogle,
    running_local_google,
)
from tests.stand_ins.image_roots import image_root, spark_root
from tests.stand_ins.processes import start_process
from tests.stand_ins.project import TEXTS_TABLE, move_to_cloud
from tests.tiny import tiny_base_model, tiny_texts

CHECKPOINT = re.compile(r"/step-\d+/manifest\.json$")
WENT_ON = re.compile(r"Going on from the checkpoint of step .*")
LOOK_SECONDS = 0.1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--containers",
        nargs=3,
        metavar=("SPARK", "CUDA", "SERVE_TRANSFORMERS"),
        help="containers of buildah in whose roots the jobs run; needs root",
    )
    containers = parser.parse_args().containers
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="demo-") as root, running_local_google() as google:
        folder = Path(root)
        tiny_base_model(folder / "model")
        project = make_project(folder / "project", folder / "model")
        cloud = move_to_cloud(project.config, google)
        if containers:
            spark, cuda, serve = containers
            google.images[SPARK_IMAGE] = spark_root(spark)
            google.images[CUDA_IMAGE] = image_root(cuda)
            google.images[SERVE_IMAGE] = image_root(serve, HOST="127.0.0.1")
        os.environ |= {CLOUD_CONFIG_VARIABLE: str(cloud), CACHE_VARIABLE: str(folder / "cache")}
        with running_bigquery(PROJECT, google.mount) as client:
            texts = {f"section-{number}": text for number, text in enumerate(tiny_texts(240))}
            fill_table(client, TEXTS_TABLE, texts)
            threading.Thread(target=_take_machines_away, args=(google,), daemon=True).start()
            done = _run(project, "run")
        if done == 0:
            print("\nWhat the local Google Cloud saw:")
            _print_jobs(google)
            _print_how_training_went_on(project)
            _print_artifacts(project.config)
            _run(project, "versions")
            _run(project, "stop")
        return done


def _end(number: int, frame: FrameType | None) -> None:
    # Leaves every block on the way out; once is enough.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _take_machines_away(google: LocalGoogle) -> None:
    """Preempt the training after its first checkpoint, as happens to spot machines."""
    from google.cloud.storage import Client

    while not google.vertex.jobs():
        time.sleep(LOOK_SECONDS)
    client = Client()
    while not any(CHECKPOINT.search(blob.name) for blob in client.list_blobs(BUCKET)):
        time.sleep(LOOK_SECONDS)
    (training,) = google.vertex.jobs()
    google.vertex.preempt(training.name)


def _run(project: Project, command: str) -> int:
    llm_assets = [str(Path(sys.executable).parent / "llm-assets"), command]
    process = start_process(llm_assets, cwd=project.folder, env=project.environment())
    try:
        # Never in one long wait: it would sleep through a signal that another thread was given.
        while process.poll() is None:
            time.sleep(LOOK_SECONDS)
    finally:
        process.kill()
        process.wait()
    return process.returncode


def _print_jobs(google: LocalGoogle) -> None:
    for batch in google.dataproc.jobs():
        print(f"  Dataproc batch {batch.name.rsplit('/', 1)[1]}: {batch.state.name}")
    for job in google.vertex.jobs():
        replicas = sum(pool.replica_count for pool in job.job_spec.worker_pool_specs)
        starts = google.vertex.starts(job.name)
        where = f"on {replicas} replicas, {starts} starts"
        print(f"  Vertex AI job {job.display_name} {where}: {job.state.name}")


def _print_how_training_went_on(project: Project) -> None:
    """From the log: the terminal leaves out messages that follow one another within a moment."""
    for log in (project.folder / LOG_FOLDER).iterdir():
        for line in WENT_ON.findall(log.read_text()):
            print(f"  {line}")


def _print_artifacts(config: Path) -> None:
    settings = yaml.safe_load(config.read_text())
    store = Store(settings["store"])
    for asset, history in Pipeline(store, settings["name"]).history().assets.items():
        print(f"  {store.root}/{asset}/{history.current.fingerprint}")


if __name__ == "__main__":
    sys.exit(main())
