"""Resource Manager: a project's number, and which rights the caller has on it."""

from typing import Any

from google.cloud import resourcemanager_v3
from google.iam.v1 import iam_policy_pb2

from tests.stand_ins.grpc_server import MethodTypes, plain_types
from tests.stand_ins.iam import Iam
from tests.stand_ins.identity import SERVICE_ACCOUNT

PROJECT_METHODS = {
    "/google.cloud.resourcemanager.v3.Projects/TestIamPermissions": plain_types(
        iam_policy_pb2.TestIamPermissionsRequest, iam_policy_pb2.TestIamPermissionsResponse
    ),
    "/google.cloud.resourcemanager.v3.Projects/GetProject": MethodTypes(
        resourcemanager_v3.GetProjectRequest.deserialize, resourcemanager_v3.Project.serialize
    ),
}
NUMBER = "123456789012"
VERTEX_AI_AGENT = f"service-{NUMBER}@gcp-sa-aiplatform.iam.gserviceaccount.com"


class Projects:
    """One project; names of it in answers have its number, as Google's have."""

    def __init__(self, iam: Iam) -> None:
        self._iam = iam

    def test_iam_permissions(self, request: iam_policy_pb2.TestIamPermissionsRequest) -> Any:
        place = f"//cloudresourcemanager.googleapis.com/{request.resource}"
        granted = [p for p in request.permissions if self._iam.allows(SERVICE_ACCOUNT, p, place)]
        return iam_policy_pb2.TestIamPermissionsResponse(permissions=granted)

    def get_project(self, request: resourcemanager_v3.GetProjectRequest) -> Any:
        return resourcemanager_v3.Project(
            name=f"projects/{NUMBER}", project_id=request.name.rsplit("/", 1)[1]
        )
