"""Resource Manager: which rights the caller has on the project."""

from typing import Any

from google.iam.v1 import iam_policy_pb2

from tests.stand_ins.grpc_server import MethodTypes

PROJECT_METHODS = {
    "/google.cloud.resourcemanager.v3.Projects/TestIamPermissions": MethodTypes(
        iam_policy_pb2.TestIamPermissionsRequest.FromString,
        iam_policy_pb2.TestIamPermissionsResponse.SerializeToString,
    )
}


class Projects:
    """Grants every right but those that a test takes away."""

    def __init__(self) -> None:
        self.denied: set[str] = set()

    def test_iam_permissions(self, request: iam_policy_pb2.TestIamPermissionsRequest) -> Any:
        granted = [p for p in request.permissions if p not in self.denied]
        return iam_policy_pb2.TestIamPermissionsResponse(permissions=granted)
