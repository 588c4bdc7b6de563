"""A registry in a folder: one JSON file a version, one for the aliases with their history."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, ValidationError

from artifacts.atomic import write_atomically
from artifacts.lease import local_lease
from llm_assets.registry.base import (
    Alias,
    AliasMove,
    ModelVersion,
    RegistryUnreachable,
    UnknownVersion,
)
from llm_assets.registry.card import render_card
from llm_assets.registry.rules import RegistryRules


class _Aliases(BaseModel):
    model_config = ConfigDict(extra="forbid")

    current: dict[Alias, int] = {}
    history: list[AliasMove] = []


class LocalRegistry(RegistryRules):
    """Keeps the versions of one pipeline under `<store>/registry/<pipeline>/`."""

    def __init__(self, store_root: Path, pipeline: str) -> None:
        self.folder = store_root / "registry" / pipeline

    def versions(self) -> list[ModelVersion]:
        with self._reachable():
            numbers = sorted(
                int(p.parent.name) for p in self.folder.glob("versions/*/version.json")
            )
        return [self.get(number) for number in numbers]

    def get(self, version: int) -> ModelVersion:
        path = self._version_folder(version) / "version.json"
        with self._reachable():
            if not path.exists():
                raise UnknownVersion(f"The registry {self.folder} has no version {version}.")
            return ModelVersion.model_validate_json(path.read_bytes())

    def history(self) -> list[AliasMove]:
        return self._aliases().history

    def _pointer(self, alias: Alias) -> int | None:
        return self._aliases().current.get(alias)

    def _point(self, alias: Alias, version: int, reason: str) -> None:
        aliases = self._aliases()
        aliases.current[alias] = version
        aliases.history.append(AliasMove(alias=alias, version=version, reason=reason))
        content = aliases.model_dump_json(indent=2).encode()
        write_atomically(LocalFileSystem(), str(self.folder / "aliases.json"), content)

    def _write(self, version: ModelVersion) -> ModelVersion:
        folder = self._version_folder(version.version)
        files = {"card.md": render_card(version), "version.json": version.model_dump_json(indent=2)}
        for name, content in files.items():
            write_atomically(LocalFileSystem(), str(folder / name), content.encode())
        return version

    def _aliases(self) -> _Aliases:
        path = self.folder / "aliases.json"
        with self._reachable():
            return _Aliases.model_validate_json(path.read_bytes()) if path.exists() else _Aliases()

    def _version_folder(self, version: int) -> Path:
        return self.folder / "versions" / str(version)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._reachable(), local_lease(self.folder / "registry.lock"):
            yield

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn a folder or file that cannot be read into an error that says so."""
        try:
            yield
        except (OSError, ValidationError, ValueError) as error:
            raise RegistryUnreachable(
                f"The model registry {self.folder} cannot be read or written: {error}. Without it "
                "nobody knows which model serves, so nothing was promoted."
            ) from error
