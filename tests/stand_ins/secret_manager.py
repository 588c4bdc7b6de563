"""Secret Manager: the versions of a project's secrets."""

import re
from typing import Any

import google_crc32c
import grpc
from google.cloud import secretmanager_v1

from tests.stand_ins.faults import RpcFailed, invalid, not_found

VERSION = re.compile(r"projects/([^/]+)/secrets/([^/]+)/versions/(latest|[0-9]+)")


class SecretManager:
    """Holds one version of each secret, which may have been destroyed."""

    def __init__(self, project: str) -> None:
        self._project = project
        self.reset()

    def reset(self) -> None:
        """No secrets."""
        self.values: dict[str, str] = {}
        """Secret's short name to its value."""
        self.destroyed: set[str] = set()
        """Secrets whose version has no value any more."""

    def get_secret_version(self, request: secretmanager_v1.GetSecretVersionRequest) -> Any:
        name = self._named(request.name)
        states = secretmanager_v1.SecretVersion.State
        state = states.DESTROYED if name in self.destroyed else states.ENABLED
        return secretmanager_v1.SecretVersion(name=request.name, state=state)

    def access_secret_version(self, request: secretmanager_v1.AccessSecretVersionRequest) -> Any:
        name = self._named(request.name)
        if name in self.destroyed:
            text = f"Secret Version [{request.name}] is in DESTROYED state."
            raise RpcFailed(grpc.StatusCode.FAILED_PRECONDITION, text)
        data = self.values[name].encode()
        checksum = int.from_bytes(google_crc32c.Checksum(data).digest(), "big")
        payload = secretmanager_v1.SecretPayload(data=data, data_crc32c=checksum)
        return secretmanager_v1.AccessSecretVersionResponse(name=request.name, payload=payload)

    def _named(self, whole: str) -> str:
        """The secret of a version that is there."""
        named = VERSION.fullmatch(whole)
        if not named:
            raise invalid(f"{whole} names no version.")
        project, name, version = named.groups()
        if project != self._project or name not in self.values or version not in ("1", "latest"):
            raise not_found(f"Secret [{whole}]")
        return name
