"""A store of each kind: one contract, two places."""

import uuid
from pathlib import Path

import pytest

from artifacts.storage.files import CACHE_VARIABLE
from artifacts.store.store import Store
from tests.stand_ins.google import BUCKET, LocalGoogle


@pytest.fixture
def cloud_root(
    google: LocalGoogle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A fresh folder of the local Google's bucket."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return f"gs://{BUCKET}/stores/{uuid.uuid4().hex}"


@pytest.fixture(params=["local", "cloud"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store on the local disk, and one in the local Google."""
    if request.param == "local":
        return Store(str(tmp_path / "store"))
    return Store(request.getfixturevalue("cloud_root"))
