"""The few calls to the storage stand-in that a mounted bucket is made of."""

import http.client
import json
import urllib.parse
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

BOUNDARY = uuid.uuid4().hex.encode()
"""Between the parts of an upload."""


@dataclass(frozen=True)
class Object:
    """An object as storage describes it."""

    name: str
    size: int
    generation: int


class PreconditionFailed(Exception):
    """The object has another generation than the one that was asked for."""


class BucketObjects:
    """The objects of one bucket, over one connection."""

    def __init__(self, storage_url: str, bucket: str) -> None:
        self._connection = http.client.HTTPConnection(urllib.parse.urlparse(storage_url).netloc)
        self._bucket = bucket
        self._objects = f"/storage/v1/b/{bucket}/o"

    def exists(self) -> bool:
        """Whether there is such a bucket."""
        return self._call("GET", f"/storage/v1/b/{self._bucket}") is not None

    def find(self, name: str) -> Object | None:
        reply = self._call("GET", f"{self._objects}/{_quote(name)}")
        return None if reply is None else _describe(json.loads(reply))

    def list(self, prefix: str, delimiter: str = "/") -> tuple[list[Object], list[str]]:
        """Objects of this prefix up to the delimiter, and the prefixes that go on after it."""
        asked = {"prefix": prefix, "delimiter": delimiter}
        reply = self._call("GET", f"{self._objects}?{urllib.parse.urlencode(asked)}")
        found = json.loads(reply or b"{}")
        return [_describe(item) for item in found.get("items", [])], found.get("prefixes", [])

    def read(self, found: Object) -> bytes | None:
        """The content of a generation; None where it is gone."""
        asked = f"alt=media&generation={found.generation}"
        return self._call("GET", f"{self._objects}/{_quote(found.name)}?{asked}")

    def write(self, name: str, content: bytes, generation: int) -> Object:
        """Write over a known generation, 0 where there is none; raises PreconditionFailed."""
        asked = f"uploadType=multipart&ifGenerationMatch={generation}"
        path = f"/upload/storage/v1/b/{self._bucket}/o?{asked}"
        # In another form of upload the stand-in forgets the precondition.
        parts = [b"application/json\r\n\r\n" + json.dumps({"name": name}).encode()]
        parts += [b"application/octet-stream\r\n\r\n" + content]
        body = b"".join(b"--%b\r\nContent-Type: %b\r\n" % (BOUNDARY, part) for part in parts)
        kind = {"Content-Type": f"multipart/related; boundary={BOUNDARY.decode()}"}
        reply = self._call("POST", path, body + b"--%b--" % BOUNDARY, kind)
        assert reply is not None
        return _describe(json.loads(reply))

    def copy(self, name: str, target: str) -> Object:
        path = f"{self._objects}/{_quote(name)}/rewriteTo/b/{self._bucket}/o/{_quote(target)}"
        reply = self._call("POST", path)
        assert reply is not None
        return _describe(json.loads(reply)["resource"])

    def remove(self, name: str) -> None:
        """Remove an object; nothing happens where there is none."""
        self._call("DELETE", f"{self._objects}/{_quote(name)}")

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes | None:
        """The reply's body; None where there is nothing of that name."""
        try:
            self._connection.request(method, path, body, headers)
            reply = self._connection.getresponse()
        except (http.client.HTTPException, ConnectionError):
            # The server closes a connection that was idle.
            self._connection.close()
            self._connection.request(method, path, body, headers)
            reply = self._connection.getresponse()
        content = reply.read()
        if reply.status == 404:
            return None
        if reply.status == 412:
            raise PreconditionFailed(path)
        if reply.status >= 400:
            raise OSError(f"{method} {path}: {reply.status} {content[:200]!r}")
        return content


def _describe(item: dict[str, Any]) -> Object:
    return Object(item["name"], int(item.get("size", 0)), int(item["generation"]))


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="")
