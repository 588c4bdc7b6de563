"""Secret Manager: values by name."""

from typing import Any

import google_crc32c
from google.cloud import secretmanager_v1

from tests.stand_ins.faults import not_found


class SecretManager:
    """Holds the latest version of each secret."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        """Secret's short name to its value."""

    def access_secret_version(self, request: secretmanager_v1.AccessSecretVersionRequest) -> Any:
        name = request.name.split("/")[3]
        if name not in self.values:
            raise not_found(f"Secret [{request.name}]")
        data = self.values[name].encode()
        checksum = int.from_bytes(google_crc32c.Checksum(data).digest(), "big")
        payload = secretmanager_v1.SecretPayload(data=data, data_crc32c=checksum)
        return secretmanager_v1.AccessSecretVersionResponse(name=request.name, payload=payload)
