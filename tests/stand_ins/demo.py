"""The whole graph on a local Google Cloud, for anyone without an account: `make demo-cloud`.

A tiny model learns a made-up manual: Spark batches through the Dataproc client, training on two
replicas and evaluation through the Vertex AI client, everything else in a bucket.
"""

import os
import subprocess
import tempfile
from pathlib import Path

import yaml

from artifacts.pipelines import Pipeline
from artifacts.store import CACHE_VARIABLE, Store
from llm_assets.cloud.config import CLOUD_CONFIG_VARIABLE
from tests.conftest import make_project
from tests.stand_ins.google import running_local_google
from tests.stand_ins.project import move_to_cloud
from tests.tiny import tiny_base_model


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="demo-") as root, running_local_google() as google:
        folder = Path(root)
        tiny_base_model(folder / "model")
        project = make_project(folder / "project", folder / "model")
        cloud = move_to_cloud(project.config, google)
        os.environ |= {CLOUD_CONFIG_VARIABLE: str(cloud), CACHE_VARIABLE: str(folder / "cache")}
        select = ["dagster", "asset", "materialize", "--select", "*model_version"]
        subprocess.run(select, cwd=project.folder, env=project.environment(), check=True)
        print("\nOn the local Google Cloud:")
        for batch in google.dataproc.batches():
            print(f"  batch {batch.name.rsplit('/', 1)[1]}: {batch.state.name}")
        for job in google.vertex.jobs():
            starts = google.vertex.starts(job.name)
            print(f"  custom job {job.display_name}: {job.state.name}, started {starts} times")
        store = Store(yaml.safe_load(project.config.read_text())["store"])
        for asset, history in Pipeline(store, "manual").history().assets.items():
            print(f"  {store.root}/{asset}/{history.current.fingerprint}")


if __name__ == "__main__":
    main()
