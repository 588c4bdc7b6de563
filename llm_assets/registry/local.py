"""A registry in a folder: one JSON file a version, one for the aliases with their history."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, ValidationError

from artifacts.atomic import write_atomically
from artifacts.lease import local_lease
from llm_assets.gate.verdict import Decision
from llm_assets.registry.base import (
    BASE_VERSION,
    Alias,
    AliasMove,
    ModelEntry,
    ModelVersion,
    RegistryUnreachable,
    UnknownVersion,
)
from llm_assets.registry.card import render_card


class _Aliases(BaseModel):
    model_config = ConfigDict(extra="forbid")

    current: dict[Alias, int] = {}
    history: list[AliasMove] = []


class LocalRegistry:
    """Keeps the versions of one pipeline under `<store>/registry/<pipeline>/`."""

    def __init__(self, store_root: Path, pipeline: str) -> None:
        self.folder = store_root / "registry" / pipeline

    def register(self, entry: ModelEntry) -> ModelVersion:
        with self._lease():
            known = self.versions()
            for version in known:
                if _same(version, entry):
                    return self._judge_again(version, entry)
            number = max([BASE_VERSION, *(version.version for version in known)]) + 1
            return self._write(ModelVersion(version=number, **dict(entry)))

    def register_base(self, entry: ModelEntry) -> ModelVersion:
        with self._lease():
            base = ModelVersion(version=BASE_VERSION, **dict(entry))
            known = {version.version: version for version in self.versions()}.get(BASE_VERSION)
            if known is None or known.model_fingerprint != entry.model_fingerprint:
                self._write(base)
            else:
                base = known
            if not self._aliases().current:
                self._move("champion", BASE_VERSION, "the first champion is the base model")
        return base

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

    def find(self, alias: Alias) -> ModelVersion | None:
        number = self._aliases().current.get(alias)
        return None if number is None else self.get(number)

    def promote(self, version: int, reason: str) -> None:
        with self._lease():
            self.get(version)
            champion = self._aliases().current.get("champion")
            if champion == version:
                return
            if champion is not None:
                self._move("previous", champion, f"version {version} took its place")
            self._move("champion", version, reason)

    def decide(self, version: int, decision: Decision) -> ModelVersion:
        with self._lease():
            found = self.get(version)
            if found.verdict is None:
                raise UnknownVersion(f"Version {version} is the base model, which nothing judged.")
            return self._write(
                found.model_copy(update={"verdict": found.verdict.decided(decision)})
            )

    def history(self) -> list[AliasMove]:
        return self._aliases().history

    def _judge_again(self, version: ModelVersion, entry: ModelEntry) -> ModelVersion:
        """Take over a verdict by other thresholds; what people decided stays decided."""
        before, now = version.verdict, entry.verdict
        if before is None or now is None or before.thresholds == now.thresholds:
            return version
        verdict = now.model_copy(update={"decisions": before.decisions})
        return self._write(version.model_copy(update={"verdict": verdict}))

    def _aliases(self) -> _Aliases:
        path = self.folder / "aliases.json"
        with self._reachable():
            return _Aliases.model_validate_json(path.read_bytes()) if path.exists() else _Aliases()

    def _move(self, alias: Alias, version: int, reason: str) -> None:
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

    def _version_folder(self, version: int) -> Path:
        return self.folder / "versions" / str(version)

    @contextmanager
    def _lease(self) -> Iterator[None]:
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


def _same(version: ModelVersion, entry: ModelEntry) -> bool:
    return (
        version.version != BASE_VERSION
        and version.model_fingerprint == entry.model_fingerprint
        and version.evaluation.get("evaluation_fingerprint")
        == entry.evaluation.get("evaluation_fingerprint")
        and version.evaluation.get("models") == entry.evaluation.get("models")
    )
