"""The table of calls in docs/google_cloud.md names what the code calls, and what stands for it."""

import ast
import re
from pathlib import Path

from google.cloud.aiplatform_v1.services.endpoint_service.transports import (
    EndpointServiceGrpcTransport,
)
from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport
from google.cloud.aiplatform_v1.services.model_service.transports import ModelServiceGrpcTransport
from google.cloud.dataproc_v1.services.batch_controller.transports import (
    BatchControllerGrpcTransport,
)
from google.cloud.secretmanager_v1.services.secret_manager_service.transports import (
    SecretManagerServiceGrpcTransport,
)

from tests.stand_ins.dataproc import Dataproc
from tests.stand_ins.endpoints import VertexEndpoints
from tests.stand_ins.grpc_server import OPERATIONS, Operations, service_methods, snake_case
from tests.stand_ins.models import VertexModels
from tests.stand_ins.projects import PROJECT_METHODS, Projects
from tests.stand_ins.secret_manager import SecretManager
from tests.stand_ins.vertex import VertexJobs

ROOT = Path(__file__).parents[3]
SHIPPED = ("artifacts", "llm_assets", "recipes", "serving", "spark_jobs")
SERVICES = (
    (service_methods(EndpointServiceGrpcTransport), VertexEndpoints),
    (service_methods(JobServiceGrpcTransport), VertexJobs),
    (service_methods(ModelServiceGrpcTransport), VertexModels),
    (service_methods(BatchControllerGrpcTransport), Dataproc),
    (service_methods(SecretManagerServiceGrpcTransport), SecretManager),
    (PROJECT_METHODS, Projects),
    (OPERATIONS, Operations),
)
PAGE = (ROOT / "docs" / "google_cloud.md").read_text()
TABLE = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.partition("## Calls, rights")[2].splitlines()
    if line.startswith("|") and not line.startswith("|---")
][1:]
CALLS = {name for row in TABLE for name in re.findall(r"`([A-Z]\w+)`", row[0])}
IMPLIED = {"GetOperation"}
"""Methods that Google's clients call by themselves, while they wait for a change."""


def called() -> set[str]:
    """Methods of Google's services that shipped code of the cloud names."""
    methods = {path.rsplit("/", 1)[1] for service, _ in SERVICES for path in service}
    by_name = {snake_case(method): method for method in methods}
    sources = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(text) for path in sources if "google" in (text := path.read_text())]
    names = {n.attr for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return {method for name, method in by_name.items() if name in names}


def test_table_names_every_method_that_is_called_and_no_other() -> None:
    assert called() | IMPLIED == CALLS


def test_every_method_in_the_table_has_a_stand_in() -> None:
    served = {
        path.rsplit("/", 1)[1]
        for service, stand_in in SERVICES
        for path in service
        if hasattr(stand_in, snake_case(path.rsplit("/", 1)[1]))
    }
    assert served >= CALLS


def test_every_path_that_the_rest_stand_in_answers_is_in_the_table() -> None:
    answered = re.findall(
        r'endswith\("[/:]([\w:]+)"\)', (ROOT / "tests" / "stand_ins" / "rest.py").read_text()
    )
    calls = " ".join(row[0] for row in TABLE).lower()
    assert len(answered) >= 5
    assert [path for path in answered if path.lower() not in calls] == []


def test_rows_are_whole_and_name_modules_that_exist() -> None:
    assert [row[0] for row in TABLE if len(row) != 4 or not row[1]] == []
    modules = {name for row in TABLE for name in re.findall(r"`(\w+\.py)`", row[2])}
    present = {path.name for path in (ROOT / "tests" / "stand_ins").glob("*.py")}
    assert modules and modules <= present
