"""Secrets: there while needed, gone afterwards, never in a message."""

import json
import os
from pathlib import Path

import pytest
import yaml

from artifacts.errors import UserError
from llm_assets.assets.sources import look
from llm_assets.cloud.jobs import hub_access
from llm_assets.cloud.settings import (
    CLOUD_CONFIG_VARIABLE,
    GoogleCloudSettings,
    load_cloud_settings,
)
from llm_assets.pipeline import PipelineResource
from tests.conftest import Project
from tests.llm_assets.in_process import ask
from tests.stand_ins.google import PROJECT, LocalGoogle
from tests.stand_ins.hub import WRITES, Repository, running_hub
from tests.stand_ins.project import move_to_cloud
from tests.tiny import tiny_texts


@pytest.fixture
def settings(google: LocalGoogle, monkeypatch: pytest.MonkeyPatch) -> GoogleCloudSettings:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    changes = {"project": PROJECT, "api_endpoint": google.endpoint}
    return load_cloud_settings().model_copy(update=changes)


def test_token_is_there_while_the_block_runs(
    google: LocalGoogle, settings: GoogleCloudSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    google.secrets.values["hugging-face-token"] = "hf_value\n"
    with hub_access(settings):
        assert os.environ["HF_TOKEN"] == "hf_value"
    assert "HF_TOKEN" not in os.environ
    monkeypatch.setenv("HF_TOKEN", "mine")
    with hub_access(settings):
        assert os.environ["HF_TOKEN"] == "mine", "one's own is left alone"
    assert os.environ["HF_TOKEN"] == "mine"


def test_missing_secret_names_its_setting(settings: GoogleCloudSettings) -> None:
    with pytest.raises(UserError, match=r"secrets\.hugging_face_token"), hub_access(settings):
        pass


def test_a_private_dataset_is_read_by_the_token_which_nothing_keeps(
    google: LocalGoogle,
    project_here: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    place = move_to_cloud(project_here.config, google)
    secrets = {"secrets": {"hugging_face_token": "hugging-face-token"}}
    place.write_text(yaml.safe_dump(yaml.safe_load(place.read_text()) | secrets))
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(place))
    google.secrets.values["hugging-face-token"] = WRITES
    source = {"type": "hugging_face", "name": "web", "dataset": "team/web"}
    project_here.configure(raw_corpus={"sources": [source]})
    rows = [json.dumps({"text": text}).encode() for text in tiny_texts(40)]
    files_of = {"train.jsonl": b"\n".join(rows)}
    with running_hub(tmp_path / "hub-cache") as hub:
        hub.repositories["team/web"] = Repository(private=True, files=files_of)
        assert ask(project_here, "raw_corpus") == ""
        pipeline = PipelineResource(config_path=str(project_here.config))
        look(pipeline)
        assert "HF_TOKEN" not in os.environ
    made = pipeline.record.find_current("raw_corpus")
    assert made is not None and made.stats["documents"] == 40
    assert WRITES not in json.dumps(made.manifest.model_dump(mode="json"))
    assert WRITES not in caplog.text + "".join(capfd.readouterr())
