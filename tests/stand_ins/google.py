"""All stand-ins together, and the environment in which clients find them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from google.cloud.aiplatform_v1 import EndpointServiceClient, JobServiceClient, ModelServiceClient
from google.cloud.batch_v1 import BatchServiceClient
from google.cloud.dataproc_v1 import BatchControllerClient
from google.cloud.secretmanager_v1 import SecretManagerServiceClient
from google.cloud.tpu_v2 import TpuClient

from tests.stand_ins.conformance import check_call
from tests.stand_ins.dataproc import Dataproc
from tests.stand_ins.endpoints import VertexEndpoints
from tests.stand_ins.google_batch import GoogleBatch
from tests.stand_ins.grpc_server import GoogleServer, service_methods
from tests.stand_ins.iam import Iam
from tests.stand_ins.identity import (
    JOBS_ACCOUNT,
    SERVICE_ACCOUNT,
    SERVING_ACCOUNT,
    ServiceAccountKey,
    make_certificates,
)
from tests.stand_ins.model_copies import COPIES, ModelCopies
from tests.stand_ins.models import VertexModels
from tests.stand_ins.mount import open_mount
from tests.stand_ins.processes import REPOSITORY, LocalImage
from tests.stand_ins.projects import PROJECT_METHODS, VERTEX_AI_AGENT, Projects
from tests.stand_ins.rest import USED, RestServer
from tests.stand_ins.secret_manager import SecretManager
from tests.stand_ins.serve_image import serve_image
from tests.stand_ins.serving_containers import ServingContainers
from tests.stand_ins.storage import StorageServer
from tests.stand_ins.tokens import TokenServer
from tests.stand_ins.tpu import LOCATION_METHODS, Tpu
from tests.stand_ins.vertex import VertexJobs

PROJECT = "local-project"
REGION = "us-central1"
BUCKET = "local-bucket"
HIERARCHICAL_BUCKET = "local-hierarchical-bucket"
CUDA_IMAGE = f"{REGION}-docker.pkg.dev/{PROJECT}/llm-assets/cuda:local"
SERVE_IMAGE = f"{REGION}-docker.pkg.dev/{PROJECT}/llm-assets/serve:local"
SPARK_IMAGE = f"{REGION}-docker.pkg.dev/{PROJECT}/llm-assets/spark:local"
CLIENTS: dict[Any, str] = {
    BatchControllerClient: "dataproc",
    BatchServiceClient: "batch",
    EndpointServiceClient: "endpoints",
    JobServiceClient: "vertex",
    ModelServiceClient: "models",
    SecretManagerServiceClient: "secrets",
    TpuClient: "tpu",
}
"""Generated client to the stand-in that answers it."""


class LocalGoogle:
    """A started local Google Cloud; `environment` makes the generated clients reach it."""

    def __init__(self, folder: Path) -> None:
        certificates = make_certificates()
        authority = folder / "authority.pem"
        authority.write_bytes(certificates.authority)
        self.tokens = TokenServer()
        keys = [
            ServiceAccountKey(folder / f"{account}.json", PROJECT, self.tokens.uri, account)
            for account in (SERVICE_ACCOUNT, JOBS_ACCOUNT, SERVING_ACCOUNT)
        ]
        self.tokens.public_pems = {key.account: key.public_pem for key in keys}
        credentials = {
            key.account: {"GOOGLE_APPLICATION_CREDENTIALS": str(key.path)} for key in keys
        }
        self.iam = Iam(PROJECT)
        self.storage = StorageServer()
        self.storage.make_bucket(BUCKET)
        self.storage.make_bucket(HIERARCHICAL_BUCKET)
        self.server = GoogleServer(
            certificates,
            self.tokens.authorize,
            lambda method, request, caller: check_call(
                method, request, caller, VERTEX_AI_AGENT, self.iam.allows
            ),
        )
        self.environment = {
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(authority),
            **credentials[SERVICE_ACCOUNT],
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "STORAGE_EMULATOR_HOST": self.storage.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "LOCAL_GOOGLE_ENDPOINT": self.server.endpoint,
            # Google's auth library asks about credentials at addresses of its own choice. With a
            # proxy that passes nothing on, such a question does not leave this machine.
            "HTTPS_PROXY": self.storage.url,
            "NO_PROXY": "127.0.0.1,localhost",
        }
        child_environment = self.environment | {"PYTHONPATH": str(REPOSITORY)}
        of_jobs = child_environment | credentials[JOBS_ACCOUNT]
        self.images = {
            CUDA_IMAGE: LocalImage(),
            SPARK_IMAGE: LocalImage(),
            SERVE_IMAGE: serve_image(),
        }
        self.mount = open_mount(
            folder / "gcs",
            self.storage.direct_url,
            [BUCKET, HIERARCHICAL_BUCKET],
            hierarchical=[HIERARCHICAL_BUCKET],
        )
        parts = (self.images, of_jobs, self.mount, self.server.operations)
        self.dataproc = Dataproc(REGION, self.storage.download, folder / "dataproc", *parts)
        self.vertex = VertexJobs(REGION, folder / "vertex", *parts)
        self.batch = GoogleBatch(folder / "batch", *parts)
        self.tpu = Tpu(
            lambda: self.tokens.issue(JOBS_ACCOUNT),
            self.tokens.authorize,
            self.iam.allows,
            folder / "tpu",
            *parts,
        )
        self.models = VertexModels(self.server.operations)
        self.storage.make_bucket(COPIES)
        self.endpoints = VertexEndpoints(
            ServingContainers(
                folder / "endpoints",
                self.images,
                child_environment | credentials[SERVING_ACCOUNT],
                ModelCopies(self.storage.direct_url).copy,
            ),
            self.models,
            self.server.operations,
            self.tokens.authorize,
        )
        self.secrets = SecretManager(PROJECT)
        self.storage.allows = lambda bucket, permission: self.iam.allows(
            SERVICE_ACCOUNT, permission, f"//storage.googleapis.com/projects/_/buckets/{bucket}"
        )
        jobs = (self.dataproc, self.vertex, self.batch, self.tpu)
        self._with_processes: tuple[Any, ...] = (*jobs, self.endpoints)
        self.rest = RestServer(self.tokens, REGION, self.iam)
        self.dataproc.free_cores = lambda: self.rest.region_quotas["CPUS"] - USED
        for client, name in CLIENTS.items():
            self.server.add_methods(service_methods(client), getattr(self, name))
        self.server.add_methods(LOCATION_METHODS, self.tpu)
        self.server.add_methods(PROJECT_METHODS, Projects(self.iam))
        self.server.start()

    @property
    def endpoint(self) -> str:
        """The `api_endpoint` of every gRPC service."""
        return self.server.endpoint

    def reset(self) -> None:
        """Forget jobs, faults and call records; objects in storage stay."""
        for service in (*self._with_processes, self.models, self.secrets, self.iam, self.rest):
            service.reset()
        self.server.faults.clear()
        self.tokens.revoked = False
        self.storage.clear()

    def stop(self) -> None:
        """End every server and every process that was started."""
        parts = (*self._with_processes, self.mount, self.server, self.storage, self.rest)
        for part in (*parts, self.tokens):
            part.stop()


@contextlib.contextmanager
def running_local_google() -> Iterator[LocalGoogle]:
    """Start the local Google and point this process's environment at it while the block runs."""
    with tempfile.TemporaryDirectory(prefix="local-google-") as folder:
        google = LocalGoogle(Path(folder))
        try:
            with patch.dict(os.environ, google.environment):
                yield google
        finally:
            google.stop()
