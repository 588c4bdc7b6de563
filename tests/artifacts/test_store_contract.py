"""What a store promises, on a local disk and in Cloud Storage alike."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pytest

from artifacts.errors import DamagedArtifact, MissingArtifact
from artifacts.store import store
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.rewrite import rewrite
from artifacts.store.store import Draft, Store

IDENTITY = Identity(kind="clean_corpus", code_version="1", settings={"a": 1})


def build_local(draft: Draft) -> None:
    """Write as a step on this machine does."""
    (draft.path / "sub").mkdir()
    (draft.path / "part.txt").write_text("hello")
    (draft.path / "sub" / "other.txt").write_text("there")
    draft.stats["documents"] = 2


def build_by_url(draft: Draft) -> None:
    """Write as a job elsewhere does."""
    with fsspec.open(f"{draft.url}/part.txt", "wb") as file:
        file.write(b"hello")
    draft.stats["documents"] = 1


@pytest.mark.parametrize("build", [build_local, build_by_url])
def test_what_was_made_is_found_and_whole(any_store: Store, build) -> None:
    made, fresh = any_store.make(IDENTITY, build)
    assert fresh
    found = any_store.find(IDENTITY)
    assert found is not None and found.manifest == made.manifest
    found.verify()
    assert (found.path / "part.txt").read_text() == "hello"
    entries = {entry.path: entry.bytes for entry in found.manifest.files}
    assert entries["part.txt"] == 5
    assert any_store.make(IDENTITY, pytest.fail)[1] is False, "what exists is not built again"


def test_two_who_need_its_files_at_once_fetch_them_once(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who fetched again would cut the files that the other one reads."""
    made, _ = any_store.make(IDENTITY, build_local)
    fetched, fetch = [], store.download_folder

    def slowly(url: str, *more: Any) -> None:
        fetched.append(url)
        time.sleep(0.5)
        fetch(url, *more)

    monkeypatch.setattr(store, "download_folder", slowly)
    with ThreadPoolExecutor(2) as readers:
        texts = readers.map(lambda _: (made.path / "part.txt").read_text(), range(2))
        assert list(texts) == ["hello", "hello"]
    assert len(fetched) == (0 if any_store.is_local else 1)


def test_a_copy_of_what_was_rewritten_elsewhere_is_fetched_again(any_store: Store) -> None:
    made, _ = any_store.make(IDENTITY, build_local)
    assert (made.path / "part.txt").read_text() == "hello"
    rewrite(made, [("part.txt", b"*****")], made.stats, "it was forgotten")
    again = any_store.load(IDENTITY.kind, made.fingerprint)
    assert (again.path / "part.txt").read_text() == "*****"


def test_without_its_manifest_an_artifact_does_not_exist(any_store: Store) -> None:
    def break_off(draft: Draft) -> None:
        build_local(draft)
        build_by_url(draft)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        any_store.make(IDENTITY, break_off)
    assert any_store.find(IDENTITY) is None
    with pytest.raises(MissingArtifact, match="clean_corpus"):
        any_store.load("clean_corpus", IDENTITY.fingerprint)
    artifact, fresh = any_store.make(IDENTITY, build_by_url)
    assert fresh
    assert [entry.path for entry in artifact.manifest.files] == ["part.txt"]


@pytest.mark.parametrize(
    ("content", "fault"), [(b"hallo", "checksum"), (b"hello!", "bytes"), (None, "absent")]
)
def test_damage_is_noticed(any_store: Store, content: bytes | None, fault: str) -> None:
    artifact, _ = any_store.make(IDENTITY, build_by_url)
    path = f"{artifact.url}/part.txt"
    if content is None:
        any_store.filesystem.rm(path)
    else:
        any_store.filesystem.pipe_file(path, content)
    any_store.filesystem.invalidate_cache()
    with pytest.raises(DamagedArtifact, match=fault):
        artifact.verify()


def test_pipeline_record_keeps_current_and_previous(any_store: Store) -> None:
    record = Pipeline(any_store, "main")
    first, _ = any_store.make(IDENTITY, build_by_url)
    second, _ = any_store.make(IDENTITY.model_copy(update={"code_version": "2"}), build_by_url)
    record.advance(first)
    record.advance(second)
    record.advance(second)
    history = record.history().assets["clean_corpus"]
    assert history.current.fingerprint == second.fingerprint
    assert [entry.fingerprint for entry in history.previous] == [first.fingerprint]
    third = IDENTITY.extend(settings={"a": 3})
    assert record.explain_change(third) == ["code version: 2 -> 1", "settings.a: 1 -> 3"]
