"""Turns a laptop's project into one that runs on the local Google Cloud."""

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.stand_ins.google import (
    BUCKET,
    CUDA_IMAGE,
    PROJECT,
    REGION,
    SERVE_IMAGE,
    SPARK_IMAGE,
    LocalGoogle,
)
from tests.stand_ins.identity import JOBS_ACCOUNT, SERVING_ACCOUNT
from tests.stand_ins.processes import LocalImage
from tests.stand_ins.serve_image import serve_image

TEXTS_TABLE = f"{PROJECT}.corpus.texts"


def machine(kind: str, accelerator: str | None = None, count: int = 0) -> dict[str, Any]:
    """A machine as a cloud project's file describes it."""
    return {"machine_type": kind, "accelerator_type": accelerator, "accelerator_count": count}


CPU = machine("n1-standard-4")
L4 = machine("g2-standard-8", "NVIDIA_L4", 1)


def cloud_settings(google: LocalGoogle, replicas: int = 1) -> dict[str, Any]:
    """The content of a cloud project's file, machines without accelerators."""
    return {
        "project": PROJECT,
        "region": REGION,
        "bucket": BUCKET,
        "service_account": JOBS_ACCOUNT,
        "serving_account": SERVING_ACCOUNT,
        "images": {"spark": SPARK_IMAGE, "cuda": CUDA_IMAGE, "serve": SERVE_IMAGE},
        "training": CPU | {"replicas": replicas, "strategy": "SPOT"},
        "evaluation": CPU,
        "endpoint": CPU | {"drain_seconds": 0.1},
        "api_endpoint": google.endpoint,
        "rest_endpoint": google.rest.url,
    }


def write_cloud(folder: Path, content: dict[str, Any]) -> Path:
    """Write a cloud project's file into a folder."""
    path = folder / "google_cloud.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def cuda_image() -> LocalImage:
    """What stands for the cuda image: its launcher, in this environment."""
    launcher = [sys.executable, "-m", "recipes.launcher"]
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return LocalImage(entrypoint=launcher, environment=paths)


def move_to_cloud(config: Path, google: LocalGoogle, replicas: int = 2) -> Path:
    """Change a pipeline file's platform and store, and read its text from `TEXTS_TABLE`.

    The training runs on `replicas` machines without accelerators, bought as spot machines. Returns
    the cloud project's file, which lies beside the pipeline file.
    """
    settings = yaml.safe_load(config.read_text())
    folder = f"gs://{BUCKET}/{config.parent.parent.name}"
    source = {
        "type": "bigquery",
        "table": TEXTS_TABLE,
        "watermark_column": "ingested_at",
        "export": f"{folder}/exports",
        "project": PROJECT,
    }
    settings |= {"platform": "google_cloud", "store": f"{folder}/store"}
    config.write_text(yaml.safe_dump(settings | {"raw_corpus": {"sources": [source]}}))
    google.images[CUDA_IMAGE] = cuda_image()
    google.images[SERVE_IMAGE] = serve_image()
    return write_cloud(config.parent, cloud_settings(google, replicas))
