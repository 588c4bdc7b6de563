"""Google's own bucket of models: what a serving container is pointed to."""

import itertools
import json
import urllib.parse
import urllib.request

COPIES = "caip-tenant-local"


class ModelCopies:
    """Copies uploaded models, as Vertex AI does before it starts a container.

    "Custom container requirements for inference", section "Access model artifacts": the address in
    `AIP_STORAGE_URI` is a directory in a bucket that Vertex AI manages, not `artifactUri`.
    """

    def __init__(self, storage_url: str) -> None:
        self._storage = f"{storage_url}/storage/v1/b"
        self._numbers = itertools.count(1)

    def copy(self, uri: str) -> str:
        """Copy the objects under `gs://bucket/folder`; returns the copy's address."""
        bucket, _, folder = uri.removeprefix("gs://").partition("/")
        folder = folder.rstrip("/") + "/"
        copy = f"{next(self._numbers)}/model"
        query = urllib.parse.urlencode({"prefix": folder})
        with urllib.request.urlopen(f"{self._storage}/{bucket}/o?{query}") as reply:
            found = json.load(reply).get("items", [])
        for item in found:
            source = urllib.parse.quote(item["name"], safe="")
            target = urllib.parse.quote(f"{copy}/{item['name'].removeprefix(folder)}", safe="")
            address = f"{self._storage}/{bucket}/o/{source}/rewriteTo/b/{COPIES}/o/{target}"
            urllib.request.urlopen(urllib.request.Request(address, method="POST")).close()
        return f"gs://{COPIES}/{copy}"
