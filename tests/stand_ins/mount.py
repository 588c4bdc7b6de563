"""What stands for the buckets that Vertex AI mounts under /gcs: a folder kept equal to storage."""

import json
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

SCAN_SECONDS = 0.3


class Mount:
    """`<folder>/<bucket>/<name>`: objects come in before a job starts, written files go out.

    As with the real mount, a file goes out once it is no longer being written.
    """

    def __init__(self, folder: Path, storage_url: str, bucket: str) -> None:
        self.folder = folder
        self._root = folder / bucket
        self._root.mkdir(parents=True, exist_ok=True)
        self._objects = f"{storage_url}/storage/v1/b/{bucket}/o"
        self._uploads = f"{storage_url}/upload/storage/v1/b/{bucket}/o"
        self._known: dict[str, tuple[int, int]] = {}
        self._pending: dict[str, tuple[int, int]] = {}
        self._generations: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def pull(self) -> None:
        """Bring the folder to what storage holds."""
        with self._lock:
            self._push(settled_only=False)
            present = {item["name"]: item["generation"] for item in self._list()}
            for name, generation in present.items():
                path = self._root / name
                if self._generations.get(name) != generation or not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self._call("GET", f"{self._quote(name)}?alt=media"))
                    self._note(name, generation)
            for name in set(self._known) - set(present):
                (self._root / name).unlink(missing_ok=True)
                del self._known[name]

    def push(self) -> None:
        """Bring storage to what the folder holds."""
        with self._lock:
            self._push(settled_only=False)

    def _watch(self) -> None:
        while not self._stopped.wait(SCAN_SECONDS):
            with self._lock:
                self._push(settled_only=True)

    def _push(self, settled_only: bool) -> None:
        found = self._scan()
        for name, stamp in found.items():
            settled = self._pending.get(name) == stamp or not settled_only
            if self._known.get(name) != stamp and settled:
                self._upload(name)
        self._pending = found
        for name in set(self._known) - set(found):
            self._call("DELETE", self._quote(name), missing_ok=True)
            del self._known[name]

    def _scan(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in self._root.rglob("*"):
            try:
                if path.is_file():
                    status = path.stat()
                    name = path.relative_to(self._root).as_posix()
                    found[name] = (status.st_mtime_ns, status.st_size)
            except FileNotFoundError:
                continue
        return found

    def _note(self, name: str, generation: str) -> None:
        status = (self._root / name).stat()
        self._known[name] = (status.st_mtime_ns, status.st_size)
        self._generations[name] = generation

    def _upload(self, name: str) -> None:
        try:
            content = (self._root / name).read_bytes()
        except FileNotFoundError:
            return
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        reply = self._request("POST", f"{self._uploads}?{query}", content)
        try:
            self._note(name, json.loads(reply)["generation"])
        except FileNotFoundError:
            self._known[name] = (0, 0)

    def _list(self) -> list[dict[str, Any]]:
        return json.loads(self._call("GET", "")).get("items", [])

    def _quote(self, name: str) -> str:
        return "/" + urllib.parse.quote(name, safe="")

    def _call(self, method: str, path: str, missing_ok: bool = False) -> bytes:
        return self._request(method, f"{self._objects}{path}", None, missing_ok)

    def _request(
        self, method: str, url: str, body: bytes | None, missing_ok: bool = False
    ) -> bytes:
        request = urllib.request.Request(url, data=body, method=method)
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.read()
        except urllib.error.HTTPError as error:
            if missing_ok and error.code == 404:
                return b""
            raise
