"""What every registry does, whatever keeps its versions: numbering, promotion, decisions."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from llm_assets.gate.verdict import Decision
from llm_assets.registry.base import (
    BASE_VERSION,
    Alias,
    AliasMove,
    ModelEntry,
    ModelVersion,
    UnknownVersion,
)


class RegistryRules(ABC):
    """A registry over a few primitives; see `Registry` for what its methods promise."""

    @abstractmethod
    def versions(self) -> list[ModelVersion]: ...

    @abstractmethod
    def get(self, version: int) -> ModelVersion: ...

    @abstractmethod
    def history(self) -> list[AliasMove]: ...

    @abstractmethod
    def _changing(self) -> AbstractContextManager[None]:
        """Keep other changes out while the block runs."""

    @abstractmethod
    def _write(self, version: ModelVersion) -> ModelVersion:
        """Add a version or replace what is known of it; done twice it is done once."""

    @abstractmethod
    def _pointer(self, alias: Alias) -> int | None:
        """The number of the version that an alias points to."""

    @abstractmethod
    def _point(self, alias: Alias, version: int, reason: str) -> None:
        """Point an alias at a version and note it in the history."""

    def register(self, entry: ModelEntry) -> ModelVersion:
        with self._changing():
            known = self.versions()
            for version in known:
                if _same(version, entry):
                    # Written again, since a killed run may have left it half written.
                    return self._write(_judged_again(version, entry))
            number = max([BASE_VERSION, *(version.version for version in known)]) + 1
            return self._write(ModelVersion(version=number, **dict(entry)))

    def register_base(self, entry: ModelEntry) -> ModelVersion:
        with self._changing():
            known = {version.version: version for version in self.versions()}.get(BASE_VERSION)
            if known is None or known.model_fingerprint != entry.model_fingerprint:
                known = ModelVersion(version=BASE_VERSION, **dict(entry))
            base = self._write(known)
            if self._pointer("champion") is None:
                self._point("champion", BASE_VERSION, "the first champion is the base model")
        return base

    def find(self, alias: Alias) -> ModelVersion | None:
        number = self._pointer(alias)
        return None if number is None else self.get(number)

    def promote(self, version: int, reason: str) -> None:
        with self._changing():
            self.get(version)
            champion = self._pointer("champion")
            if champion == version:
                return
            if champion is not None:
                self._point("previous", champion, f"version {version} took its place")
            self._point("champion", version, reason)

    def decide(self, version: int, decision: Decision) -> ModelVersion:
        with self._changing():
            found = self.get(version)
            if found.verdict is None:
                raise UnknownVersion(f"Version {version} is the base model, which nothing judged.")
            return self._write(
                found.model_copy(update={"verdict": found.verdict.decided(decision)})
            )


def _same(version: ModelVersion, entry: ModelEntry) -> bool:
    return (
        version.version != BASE_VERSION
        and version.model_fingerprint == entry.model_fingerprint
        and version.evaluation.get("evaluation_fingerprint")
        == entry.evaluation.get("evaluation_fingerprint")
        and version.evaluation.get("models") == entry.evaluation.get("models")
    )


def _judged_again(version: ModelVersion, entry: ModelEntry) -> ModelVersion:
    """The version with a verdict by other thresholds; what people decided stays decided."""
    before, now = version.verdict, entry.verdict
    if before is None or now is None or before.thresholds == now.thresholds:
        return version
    verdict = now.model_copy(update={"decisions": before.decisions})
    return version.model_copy(update={"verdict": verdict})
