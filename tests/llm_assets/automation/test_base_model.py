"""The sensor that looks for another base model: in a folder, and on a Hub."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from artifacts.store.identity import Identity
from llm_assets.automation.sensors import newest_revision
from recipes.model.base_model import BaseModelSettings, identify
from tests.damage import flip_bit
from tests.llm_assets.automation.conftest import Automated
from tests.stand_ins.http_server import json_answer, start_http_server

SENSOR = "base_model_changed"
PINNED, NEWER = "1" * 40, "2" * 40


@pytest.fixture
def based(automated: Automated, tmp_path: Path, tiny_model_folder: Path) -> Automated:
    """A project whose base model, a folder of its own, was read."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model_folder, folder)
    automated.project.configure(base_model={"folder": str(folder)})
    evaluate(automated, read_base(automated, tmp_path))
    automated.cursor = None
    return automated


def read_base(automated: Automated, tmp_path: Path) -> str:
    """A run makes `base_model` of the folder as it is; returns its fingerprint."""
    settings = identify(BaseModelSettings(folder=str(tmp_path / "base")))
    return make(automated, Identity(kind="base_model", code_version="1", settings=settings))


def evaluate(automated: Automated, base: str) -> None:
    """A run comes as far as to evaluate a model that was trained from a base model."""
    inputs = {"base_model": base}
    make(automated, Identity(kind="eval_metrics", code_version="1", inputs=inputs))


def make(automated: Automated, identity: Identity) -> str:
    record = automated.project.record
    made, _ = record.store.make(identity, lambda draft: None)
    record.advance(made)
    return made.fingerprint


def retrain_base(tmp_path: Path) -> None:
    """Somebody puts other weights into the folder."""
    flip_bit(next((tmp_path / "base").glob("*.safetensors")))


def test_other_weights_in_the_folder_are_told_and_read_only_where_the_files_changed(
    based: Automated, tmp_path: Path
) -> None:
    assert "is the one that was trained on" in str(based.tick(SENSOR))
    before = json.loads(based.cursor or "")
    based.tick(SENSOR)
    assert json.loads(based.cursor or "") == before
    retrain_base(tmp_path)
    assert "is not the one that the model was trained on" in str(based.tick(SENSOR))
    after = json.loads(based.cursor or "")
    assert after["state"] != before["state"] and after["identity"] != before["identity"]


def test_a_model_that_is_still_being_copied_is_waited_for(based: Automated, tmp_path: Path) -> None:
    based.automate(new_base_model="retrain", quiet_minutes=60)
    retrain_base(tmp_path)
    for _ in range(2):
        assert "waiting until they are unchanged" in str(based.tick(SENSOR))
    based.automate(quiet_minutes=0)
    based.expect_run(SENSOR)


def test_other_weights_are_trained_from_where_the_settings_say_so(
    based: Automated, tmp_path: Path
) -> None:
    based.automate(new_base_model="retrain", retry_minutes=60)
    retrain_base(tmp_path)
    request = based.expect_run(SENSOR)
    assert not request.run_config
    run = based.launch(request)
    assert f"{run[:8]} is under way" in str(based.tick(SENSOR))
    base = read_base(based, tmp_path)
    based.end(run, succeeded=False)
    assert "the next try is at" in str(based.tick(SENSOR))
    based.automate(blackouts=["00:00-24:00"], retry_minutes=0)
    assert "blackout 00:00-24:00" in str(based.tick(SENSOR))
    evaluate(based, base)
    assert "is the one that was trained on" in str(based.tick(SENSOR))


def test_nothing_is_looked_at_where_the_settings_say_so(based: Automated, tmp_path: Path) -> None:
    retrain_base(tmp_path)
    based.automate(new_base_model="ignore")
    assert "`ignore`" in str(based.tick(SENSOR))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub on this machine, which says of every model that its main branch is at NEWER."""
    told = json_answer(200, {"id": "owner/name", "sha": NEWER, "siblings": []})
    server = start_http_server(lambda *request: told)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    yield
    server.stop()


@pytest.mark.usefixtures("hub")
def test_a_newer_revision_on_the_hub_is_told_with_what_to_write(automated: Automated) -> None:
    automated.project.configure(base_model={"folder": None, "hub": "o/n", "revision": PINNED})
    told = str(automated.tick(SENSOR))
    assert f"is at revision {NEWER}" in told and f"pins {PINNED}" in told
    automated.project.configure(base_model={"revision": NEWER})
    assert "at the pinned revision" in str(automated.tick(SENSOR))


def test_where_the_hub_cannot_be_asked_this_machines_cache_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert newest_revision("owner/name") is None
    seen = tmp_path / "models--owner--name" / "refs" / "main"
    seen.parent.mkdir(parents=True)
    seen.write_text(NEWER)
    assert newest_revision("owner/name") == NEWER


def test_text_is_not_read_on_from_a_version_of_another_base_model(
    based: Automated, tmp_path: Path
) -> None:
    based.automate(least_coverage=0.9)
    base = based.project.record.find_current("base_model")
    assert base is not None
    based.teach("second", coverage=0.5, base_model=base.fingerprint)
    based.expect_run()
    retrain_base(tmp_path)
    read_base(based, tmp_path)
    assert "was made from another base model" in str(based.tick())
