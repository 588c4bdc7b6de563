"""A registry in a folder of the store."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from artifacts.leases.lease import local_lease
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from llm_assets.registry.base import Content, GenerationChanged, Registry
from llm_assets.registry.card import CARD_NAME, render_card
from llm_assets.registry.records import ModelVersion, RegistryUnreachable
from llm_assets.registry.state import RegistryState


class LocalRegistry(Registry):
    """Keeps the versions of one pipeline under `<store>/registry/<pipeline>/`.

    A file's generation is a hash of its content, and a file lock keeps two writers apart.
    """

    def __init__(self, store_root: Path, pipeline: str) -> None:
        self.root = str(store_root)
        self._path = store_root / layout.registry(pipeline)
        self.folder = str(self._path)

    @classmethod
    def of(cls, record: Pipeline) -> Self:
        """The registry of a pipeline whose store is on this machine."""
        store = record.store
        return cls(store.local_path(store.root), record.name)

    def _read(self, name: str) -> Content:
        with self._reachable():
            try:
                content = (self._path / name).read_bytes()
            except FileNotFoundError:
                return None
        return content, _generation(content)

    def _write(self, name: str, content: bytes, generation: int | None) -> None:
        with self._reachable(), local_lease(self._path / "registry.lock"):
            now = self._read(name)
            if generation is not None and generation != (now[1] if now else 0):
                raise GenerationChanged
            files.write(self._path / name, content)

    def _published(self) -> set[int]:
        with self._reachable():
            return {int(path.parent.name) for path in self._path.glob(f"versions/*/{CARD_NAME}")}

    def _publish(self, state: RegistryState, touched: list[ModelVersion]) -> None:
        for version in state.versions:
            path = self._path / "versions" / str(version.version) / CARD_NAME
            card = render_card(state, self._locate(version)).encode()
            with self._reachable():
                if not path.exists() or path.read_bytes() != card:
                    files.write(path, card)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn a folder or file that cannot be read into an error that says so."""
        try:
            yield
        except OSError as error:
            raise RegistryUnreachable(
                f"The model registry {self.folder} cannot be read or written: {error}. Without it "
                "nobody knows which model serves, so nothing was promoted."
            ) from error


def _generation(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8]) or 1
