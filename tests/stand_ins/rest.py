"""The few REST calls that a check makes: enabled APIs, rights, quotas, images in the registry."""

import json
import urllib.parse
from typing import Any

import grpc

from tests.stand_ins import discovery
from tests.stand_ins.conformance import TABLE, check_rights
from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.http_server import Answer, json_answer, start_http_server
from tests.stand_ins.iam import Iam
from tests.stand_ins.identity import SERVICE_ACCOUNT
from tests.stand_ins.tokens import TokenServer

OF_OTHERS = ("aiplatform", "bigquery", "storage", "tpu")
METHODS = {
    method: row["api"]
    for method, row in TABLE.items()
    if "api" in row and not row["api"].startswith(OF_OTHERS)
}
"""Those that are answered here, and the descriptions of their APIs."""
MOST_NAMES = 30
PAGE_SIZE = 2
REGION_QUOTAS = {"CPUS": 24, "N2_CPUS": 24, "DISKS_TOTAL_GB": 4096}
USED = 4
"""Processors and GB of disks that others use in the region."""


class RestServer:
    """What is enabled, allowed and pushed; tests change the fields."""

    def __init__(self, tokens: TokenServer, region: str, iam: Iam) -> None:
        self.region = region
        self._iam = iam
        self._tokens = tokens
        self.reset()
        self._server = start_http_server(self._answer)
        self.url = self._server.url

    def stop(self) -> None:
        self._server.stop()

    def reset(self) -> None:
        """Everything enabled, nothing allowed or pushed."""
        self.disabled: set[str] = set()
        """APIs that are not enabled."""
        self.quotas: dict[str, int] = {}
        """Metric to limit in the region."""
        self.images: set[str] = set()
        """`project/repository/name:tag`."""
        self.billing: bool | None = True
        """Whether the project has an open billing account; None where the caller may not see."""
        self.region_quotas = dict(REGION_QUOTAS)
        """Compute Engine's quotas of the region."""
        self.subnetworks: dict[str, bool] = {}
        """Name to whether it has private access to Google's APIs."""
        self.hides_network = False
        """Whether the caller may see neither of them."""

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        try:
            caller = self._tokens.authorize(headers.get("authorization"))
            return json_answer(*self.answer(method, target, body, caller))
        except RpcFailed as failure:
            status = 401 if failure.code is grpc.StatusCode.UNAUTHENTICATED else 403
            return json_answer(status, {"error": {"message": failure.message}})

    def answer(self, verb: str, target: str, body: bytes, caller: str) -> tuple[int, Any]:
        """Status and JSON content for a request; raises RpcFailed where the caller may not."""
        parts = urllib.parse.urlparse(target)
        query = urllib.parse.parse_qs(parts.query)
        if parts.path.startswith("/v2/") and "/manifests/" in parts.path:
            image = parts.path.removeprefix("/v2/").replace("/manifests/", ":")
            return (200 if image in self.images else 404), {}
        content = json.loads(body or b"null")
        for method, api in METHODS.items():
            if (
                discovery.pattern(api, method).fullmatch(parts.path)
                and discovery.methods(api)[method]["httpMethod"] == verb
            ):
                if unknown := discovery.unknown_names(api, method, query, content):
                    return 400, {"error": {"message": f"Unknown names: {', '.join(unknown)}"}}
                check_rights(method, None, {"caller": caller}, self._iam.allows)
                return self._perform(method, parts.path, query, content)
        return 404, {}

    def _perform(
        self, method: str, path: str, query: dict[str, list[str]], content: Any
    ) -> tuple[int, Any]:
        match method.rpartition(".")[2]:
            case "batchGet":
                names = query["names"]
                if len(names) > MOST_NAMES:
                    return 400, {"error": {"message": f"At most {MOST_NAMES} names."}}
                return 200, {"services": [self._service(name) for name in names]}
            case "getBillingInfo":
                return self._billing(path.removeprefix("/v1/"))
            case "list":
                return 200, self._limits(query)
            case "testIamPermissions" if "*" in str(content["permissions"]):
                return 400, {"error": {"message": "Permissions with wildcards are not allowed."}}
            case "testIamPermissions":
                return 200, {"permissions": self._granted(path, content)}
            case "troubleshoot":
                asked = content["accessTuple"]
                state = self._iam.troubleshoot(
                    asked["principal"], asked["permission"], asked["fullResourceName"]
                )
                return 200, {"access": state}
        return self._network(path)

    def _limits(self, query: dict[str, list[str]]) -> dict[str, Any]:
        """A page of quotas; those of regions are in the full view alone."""
        start = int(query.get("pageToken", ["0"])[0])
        end = start + PAGE_SIZE
        limits = list(self.quotas.items()) if query.get("view") == ["FULL"] else []
        page = {"metrics": [self._metric(metric, limit) for metric, limit in limits[start:end]]}
        return page | ({"nextPageToken": str(end)} if end < len(limits) else {})

    def _granted(self, path: str, body: dict[str, list[str]]) -> list[str]:
        """The caller's permissions on a service account or a repository."""
        name = path.removeprefix("/v1/").removesuffix(":testIamPermissions")
        host = "iam" if "/serviceAccounts/" in name else "artifactregistry"
        place = f"//{host}.googleapis.com/{name}"
        return [p for p in body["permissions"] if self._iam.allows(SERVICE_ACCOUNT, p, place)]

    def _billing(self, name: str) -> tuple[int, Any]:
        """`ProjectBillingInfo`: a closed account keeps its name, and `billingEnabled`, where it is
        false, is left out."""
        if self.billing is None:
            return 403, {}
        account = {"name": name, "billingAccountName": "billingAccounts/012345-567890-ABCDEF"}
        return 200, account | ({"billingEnabled": True} if self.billing else {})

    def _network(self, path: str) -> tuple[int, Any]:
        """`Region.quotas` and `Subnetwork.privateIpGoogleAccess`, of this project and region."""
        place, _, name = path.partition("/subnetworks/")
        if self.hides_network:
            return 403, {}
        if not place.endswith(f"/regions/{self.region}") or (name and name not in self.subnetworks):
            return 404, {}
        if name:
            return 200, {"name": name, "privateIpGoogleAccess": self.subnetworks[name]}
        quotas = [{"metric": m, "limit": v, "usage": USED} for m, v in self.region_quotas.items()]
        return 200, {"name": self.region, "quotas": quotas}

    def _service(self, name: str) -> dict[str, str]:
        disabled = name.rsplit("/", 1)[1] in self.disabled
        return {"name": name, "state": "DISABLED" if disabled else "ENABLED"}

    def _metric(self, metric: str, limit: int) -> dict[str, Any]:
        bucket = {"effectiveLimit": str(limit), "dimensions": {"region": self.region}}
        return {"metric": metric, "consumerQuotaLimits": [{"quotaBuckets": [bucket]}]}
