"""The few REST calls that a check makes: enabled APIs, rights, quotas, images in the registry."""

import json
import urllib.parse
from typing import Any

from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.http_server import Answer, json_answer, start_http_server
from tests.stand_ins.iam import Iam
from tests.stand_ins.identity import SERVICE_ACCOUNT
from tests.stand_ins.tokens import TokenServer


class RestServer:
    """What is enabled, allowed and pushed; tests change the fields."""

    def __init__(self, tokens: TokenServer, region: str, iam: Iam) -> None:
        self.region = region
        self._iam = iam
        self.disabled: set[str] = set()
        """APIs that are not enabled."""
        self.quotas: dict[str, int] = {}
        """Metric to limit in the region."""
        self.images: set[str] = set()
        """`project/repository/name:tag`."""
        self.billing: bool | None = True
        """Whether the project has an open billing account; None where the caller may not see."""
        self.region_quotas: dict[str, int] = {}
        """Compute Engine's quotas of the region."""
        self.subnetworks: dict[str, bool] = {}
        """Name to whether it has private access to Google's APIs."""
        self.hides_network = False
        """Whether the caller may see neither of them."""
        self._tokens = tokens
        self._server = start_http_server(self._answer)
        self.url = self._server.url

    def stop(self) -> None:
        self._server.stop()

    def reset(self) -> None:
        """Everything enabled, nothing allowed or pushed."""
        self.disabled.clear()
        self.quotas.clear()
        self.images.clear()
        self.billing = True
        self.region_quotas = {"CPUS": 24, "N2_CPUS": 24, "DISKS_TOTAL_GB": 4096}
        self.subnetworks.clear()
        self.hides_network = False

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        try:
            self._tokens.authorize(headers.get("authorization"))
        except RpcFailed:
            return json_answer(401, {})
        return json_answer(*self.answer(target, body))

    def answer(self, target: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON content for a request."""
        parts = urllib.parse.urlparse(target)
        query = urllib.parse.parse_qs(parts.query)
        if parts.path.endswith("/services:batchGet"):
            return 200, {"services": [self._service(name) for name in query["names"]]}
        if parts.path.endswith("/billingInfo"):
            return self._billing(parts.path.removeprefix("/v1/"))
        if parts.path.endswith("/consumerQuotaMetrics"):
            return 200, {"metrics": [self._metric(m, v) for m, v in self.quotas.items()]}
        if parts.path.endswith(":testIamPermissions"):
            return 200, {"permissions": self._granted(parts.path, json.loads(body))}
        if parts.path.endswith("/iam:troubleshoot"):
            asked = json.loads(body)["accessTuple"]
            state = self._iam.troubleshoot(
                asked["principal"], asked["permission"], asked["fullResourceName"]
            )
            return 200, {"access": state}
        if parts.path.startswith("/compute/v1/"):
            return self._network(parts.path)
        if parts.path.startswith("/v2/") and "/manifests/" in parts.path:
            image = parts.path.removeprefix("/v2/").replace("/manifests/", ":")
            return (200 if image in self.images else 404), {}
        return 404, {}

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
        quotas = [{"metric": m, "limit": v, "usage": 4} for m, v in self.region_quotas.items()]
        return 200, {"name": self.region, "quotas": quotas}

    def _service(self, name: str) -> dict[str, str]:
        disabled = name.rsplit("/", 1)[1] in self.disabled
        return {"name": name, "state": "DISABLED" if disabled else "ENABLED"}

    def _metric(self, metric: str, limit: int) -> dict[str, Any]:
        bucket = {"effectiveLimit": str(limit), "dimensions": {"region": self.region}}
        return {"metric": metric, "consumerQuotaLimits": [{"quotaBuckets": [bucket]}]}
