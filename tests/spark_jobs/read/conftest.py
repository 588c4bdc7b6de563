"""A folder for the text of a source, which is read in small chunks where a test asks for it."""

from pathlib import Path

import pytest

from spark_jobs.read import opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    return folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few kilobytes instead of megabytes."""
    monkeypatch.setattr(opened, "_LEAST_BYTES", 2_000)
    monkeypatch.setattr(opened, "_MOST_BYTES", 20_000)
