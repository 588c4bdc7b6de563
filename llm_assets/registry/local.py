"""A registry in a folder of the store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from artifacts.errors import reason_of
from artifacts.storage import files
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.registry.base import Registry
from llm_assets.registry.card import CARD_NAME, render_card
from llm_assets.registry.state import ModelVersion, RegistryState, RegistryUnreachable


class LocalRegistry(Registry):
    """Keeps the versions of one pipeline under `<store>/registry/<pipeline>/`."""

    def __init__(self, store_root: Path, pipeline: str) -> None:
        super().__init__(Store(str(store_root)), pipeline)

    @classmethod
    def of(cls, record: Pipeline) -> Self:
        """The registry of a pipeline whose store is on this machine."""
        store = record.store
        return cls(store.local_path(store.root), record.name)

    def _published(self) -> set[int]:
        with self._reachable():
            return {
                int(path.parent.name) for path in Path(self.folder).glob(f"versions/*/{CARD_NAME}")
            }

    def _publish(self, state: RegistryState, touched: list[ModelVersion]) -> None:
        for version in state.versions:
            path = Path(self.folder) / "versions" / str(version.version) / CARD_NAME
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
                f"The model registry {self.folder} cannot be read or written. "
                f"{reason_of(error) or error}\nWithout it nobody knows which model serves, so "
                "nothing was promoted."
            ) from error
