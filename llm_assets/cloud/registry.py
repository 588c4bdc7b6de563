"""The model registry of a store in the cloud: the local registry's files, kept in the bucket."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from artifacts.store import Store
from llm_assets.gate.verdict import Decision
from llm_assets.registry.base import (
    Alias,
    AliasMove,
    ModelEntry,
    ModelVersion,
    Registry,
    RegistryUnreachable,
)
from llm_assets.registry.local import LocalRegistry
from llm_assets.resources.pipeline import PipelineResource
from llm_assets.resources.registry import RegistryResource

Result = TypeVar("Result")


class BucketRegistry:
    """Every call works on a fresh copy of the files; a change goes back under the store's lease."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self._store = store
        self._pipeline = pipeline
        self._url = f"{store.root}/registry/{pipeline}"

    def register(self, entry: ModelEntry) -> ModelVersion:
        return self._change(lambda registry: registry.register(entry))

    def register_base(self, entry: ModelEntry) -> ModelVersion:
        return self._change(lambda registry: registry.register_base(entry))

    def versions(self) -> list[ModelVersion]:
        return self._read(lambda registry: registry.versions())

    def get(self, version: int) -> ModelVersion:
        return self._read(lambda registry: registry.get(version))

    def find(self, alias: Alias) -> ModelVersion | None:
        return self._read(lambda registry: registry.find(alias))

    def promote(self, version: int, reason: str) -> None:
        self._change(lambda registry: registry.promote(version, reason))

    def decide(self, version: int, decision: Decision) -> ModelVersion:
        return self._change(lambda registry: registry.decide(version, decision))

    def history(self) -> list[AliasMove]:
        return self._read(lambda registry: registry.history())

    def _read(self, function: Callable[[LocalRegistry], Result]) -> Result:
        with self._copy() as (registry, _):
            return function(registry)

    def _change(self, function: Callable[[LocalRegistry], Result]) -> Result:
        with self._store.lease(f"registry-{self._pipeline}"), self._copy() as (registry, before):
            result = function(registry)
            self._send_changes(registry.folder, before)
            return result

    @contextmanager
    def _copy(self) -> Iterator[tuple[LocalRegistry, dict[str, bytes]]]:
        """`(registry over a copy, the files' content by relative path)`."""
        with tempfile.TemporaryDirectory(prefix="registry-") as root:
            registry = LocalRegistry(Path(root), self._pipeline)
            before = self._fetch()
            for name, content in before.items():
                path = registry.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            yield registry, before

    def _fetch(self) -> dict[str, bytes]:
        filesystem = self._store.filesystem
        folder = filesystem._strip_protocol(self._url)
        try:
            filesystem.invalidate_cache()
            paths = filesystem.find(folder)
            contents = filesystem.cat(paths) if paths else {}
        except OSError as error:
            raise RegistryUnreachable(
                f"The model registry {self._url} cannot be read: {error}. Without it nobody knows "
                "which model serves, so nothing was promoted."
            ) from error
        return {path[len(folder) + 1 :]: content for path, content in contents.items()}

    def _send_changes(self, folder: Path, before: dict[str, bytes]) -> None:
        """Versions first, aliases last: an alias never points at what is not there yet."""
        paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
        for path in sorted(paths, key=lambda path: path.name == "aliases.json"):
            name = path.relative_to(folder).as_posix()
            content = path.read_bytes()
            if before.get(name) != content:
                relative = self._url.removeprefix(f"{self._store.root}/")
                self._store.write_bytes(f"{relative}/{name}", content)


class BucketRegistryResource(RegistryResource):
    """A folder of the bucket."""

    def open(self, pipeline: PipelineResource) -> Registry:
        return BucketRegistry(pipeline.store, pipeline.settings.name)
