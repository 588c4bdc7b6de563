"""A Hugging Face Hub on loopback: models and data sets, written by commits, large files by LFS.

It answers what the Hub's API documents (huggingface.co/docs/hub/api, git-lfs/docs/api/batch.md),
and is strict: without the token nothing is written, and nothing private read; a commit may name
only large files whose bytes have arrived with their checksum.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.stand_ins.http_server import Answer, HttpServer, json_answer, start_http_server

LARGE = (".safetensors", ".bin")
WRITES = "write-token"


@dataclass
class Repository:
    """Files of the newest commit, and the messages of all."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def commit(self) -> str:
        """The newest one's name."""
        return hashlib.sha1(json.dumps(self.messages).encode()).hexdigest()


class Hub:
    """The server, what it holds, and what goes wrong with it."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.fault: Callable[[str, str], Answer | None] = lambda method, path: None
        """The answer in the place of the right one, by method and path."""
        self._objects: dict[str, bytes] = {}
        self._server: HttpServer = start_http_server(self._answer)
        self.url = self._server.url

    def stop(self) -> None:
        """Answer nobody any more."""
        self._server.stop()

    def _answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        path = unquote(urlsplit(target).path)
        if (wrong := self.fault(method, path)) is not None:
            return wrong
        is_known = headers.get("authorization") == f"Bearer {WRITES}"
        if method == "PUT" and path.startswith("/upload/"):
            return self._receive(path.removeprefix("/upload/"), body)
        if method == "POST" and not is_known:
            return _refused(401, "Invalid username or password.")
        if (method, path) == ("POST", "/api/validate-yaml"):
            return _validate(json.loads(body)["content"])
        if (method, path) == ("POST", "/api/repos/create"):
            return self._create(json.loads(body))
        routes: tuple[tuple[str, str, Callable[[Repository, str, bytes], Answer]], ...] = (
            ("GET", r"/api/(?:models|datasets)/([^/]+/[^/]+)()", self._describe),
            ("GET", r"/api/(?:models|datasets)/([^/]+/[^/]+)/revision/(.+)", self._describe),
            ("GET", r"/api/(?:models|datasets)/([^/]+/[^/]+)/tree/[^/]+/?(.*)", self._list),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/(main)", self._sort),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch)", self._take),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/(main)", self._commit),
            ("GET", r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self._read),
            ("HEAD", r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self._read),
        )
        for wanted, pattern, answer in routes:
            found = re.fullmatch(pattern, path)
            if found and wanted == method:
                repository = self.repositories.get(found[1])
                if repository is None or (repository.private and not is_known):
                    return _refused(404 if is_known else 401, "Repository not found")
                return answer(repository, found[2], body)
        return _refused(404, f"no {method} {path}")

    def _create(self, asked: dict[str, object]) -> Answer:
        name = "/".join(str(asked[part]) for part in ("organization", "name") if asked.get(part))
        if name in self.repositories:
            return json_answer(409, {"error": "You already created this model repo", "url": name})
        is_private = asked.get("private", asked.get("visibility") == "private")
        self.repositories[name] = Repository(private=bool(is_private))
        return json_answer(200, {"url": f"{self.url}/{name}", "name": name})

    def _describe(self, repository: Repository, revision: str, body: bytes) -> Answer:
        siblings = [{"rfilename": name} for name in repository.files]
        name = next(n for n, known in self.repositories.items() if known is repository)
        about = {"id": name, "sha": repository.commit, "private": repository.private}
        return json_answer(200, about | {"siblings": siblings})

    def _list(self, repository: Repository, folder: str, body: bytes) -> Answer:
        return json_answer(
            200,
            [
                {"type": "file", "path": name, "size": len(content), "oid": _git_hash(content)}
                for name, content in repository.files.items()
            ],
        )

    def _sort(self, repository: Repository, revision: str, body: bytes) -> Answer:
        found = []
        for file in json.loads(body)["files"]:
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            found.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        return json_answer(200, {"files": found})

    def _take(self, repository: Repository, which: str, body: bytes) -> Answer:
        asked = json.loads(body)
        assert asked["operation"] == "upload" and asked["hash_algo"] == "sha256"
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.url}/upload/{one['oid']}"}}}
            for one in asked["objects"]
        ]
        status, headers, content = json_answer(200, {"transfer": "basic", "objects": objects})
        return status, [("content-type", "application/vnd.git-lfs+json"), *headers[1:]], content

    def _receive(self, name: str, body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != name:
            return _refused(400, "the checksum is another")
        self._objects[name] = body
        return json_answer(200, {})

    def _commit(self, repository: Repository, revision: str, body: bytes) -> Answer:
        operations = [json.loads(line) for line in body.splitlines()]
        files = dict(repository.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                if value["oid"] not in self._objects:
                    return _refused(400, f"{value['path']} has not arrived")
                files[value["path"]] = self._objects[value["oid"]]
            elif operation["key"] == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
        repository.files = files
        header = next(one["value"] for one in operations if one["key"] == "header")
        repository.messages.append(header["summary"])
        name = next(n for n, known in self.repositories.items() if known is repository)
        url = f"{self.url}/{name}/commit/{repository.commit}"
        return json_answer(200, {"success": True, "commitOid": repository.commit, "commitUrl": url})

    def _read(self, repository: Repository, name: str, body: bytes) -> Answer:
        content = repository.files.get(name)
        if content is None:
            return 404, [("x-error-code", "EntryNotFound")], b""
        about = [("etag", f'"{hashlib.sha256(content).hexdigest()}"')]
        about += [("x-repo-commit", repository.commit), ("content-length", str(len(content)))]
        return 200, about, content


def _validate(card: str) -> Answer:
    begins, front, _ = card.split("---\n", 2)
    about = yaml.safe_load(front)
    if begins or not re.fullmatch(r"[a-z0-9.-]+", about["license"]):
        return json_answer(400, {"errors": [{"message": "license"}], "warnings": []})
    return json_answer(200, {"errors": [], "warnings": []})


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _refused(status: int, message: str) -> Answer:
    code = {401: "RepoNotFound", 404: "RepoNotFound"}.get(status, "")
    return status, [("x-error-code", code), ("x-error-message", message)], b"{}"


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    """A Hub that this process's clients ask, with their cache in a folder and no long waits."""
    import datasets
    from huggingface_hub import constants

    hub = Hub()
    with pytest.MonkeyPatch.context() as patch:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder))
        patch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        patch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
        patch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0)
        patch.delenv("HF_TOKEN", raising=False)
        yield hub
    hub.stop()
