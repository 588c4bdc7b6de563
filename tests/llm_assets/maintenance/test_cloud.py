"""Maintenance of a store in Cloud Storage."""

import time
import uuid
from pathlib import Path

import pytest

from artifacts.storage.files import CACHE_VARIABLE
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.maintenance.cleaning import plan_removals, read_contents, remove, take_inventory
from llm_assets.maintenance.doctor import check_artifacts
from llm_assets.operation_settings import RetentionSettings
from llm_assets.registry.state import RegistryState
from tests.stand_ins.google import BUCKET, LocalGoogle


def make(store: Store, kind: str, inputs: dict[str, str]) -> Artifact:
    def build(draft: Draft) -> None:
        (draft.path / "content").write_text(kind)

    return store.make(Identity(kind=kind, code_version="1", inputs=inputs), build)[0]


@pytest.mark.soak
def test_the_same_rules_hold_and_damage_is_set_aside(
    google: LocalGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    store = Store(f"gs://{BUCKET}/stores/{uuid.uuid4().hex}")
    old, raw = make(store, "raw_corpus", {"text": "old"}), make(store, "raw_corpus", {})
    clean = make(store, "clean_corpus", {"raw_corpus": raw.fingerprint})
    Pipeline(store, "manual").advance(clean)

    def plan() -> list[str]:
        settings = RetentionSettings(days=0)
        contents = read_contents(store)
        removals = plan_removals(contents, "manual", RegistryState(), settings, time.time() + 1, {})
        remove(store, removals)
        return [removal.place for removal in removals]

    assert plan() == [f"raw_corpus/{old.fingerprint}"]
    assert not store.exists("raw_corpus", old.fingerprint) and plan() == []
    assert store.in_the_making() == []

    store.filesystem.pipe_file(f"{clean.url}/content", b"CLEAN_CORPUS")
    (finding,) = check_artifacts(store, take_inventory(store).artifacts())
    assert finding.fault == "content has another checksum than its manifest"
    assert finding.repair
    finding.repair()
    assert not store.exists("clean_corpus", clean.fingerprint)
    make(store, "clean_corpus", {"raw_corpus": raw.fingerprint}).verify()
