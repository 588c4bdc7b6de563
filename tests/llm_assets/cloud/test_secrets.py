"""Secrets: there while needed, gone afterwards, never in a message."""

import os

import pytest

from artifacts.errors import UserError
from llm_assets.cloud.jobs import hub_access
from llm_assets.cloud.settings import GoogleCloudSettings, load_cloud_settings
from tests.stand_ins.google import PROJECT, LocalGoogle


@pytest.fixture
def settings(google: LocalGoogle, monkeypatch: pytest.MonkeyPatch) -> GoogleCloudSettings:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    changes = {"project": PROJECT, "api_endpoint": google.endpoint}
    return load_cloud_settings().model_copy(update=changes)


def test_token_is_there_while_the_block_runs(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    google.secrets.values["hugging-face-token"] = "hf_value\n"
    with hub_access(settings):
        assert os.environ["HF_TOKEN"] == "hf_value"
    assert "HF_TOKEN" not in os.environ


def test_missing_secret_names_its_setting(settings: GoogleCloudSettings) -> None:
    with pytest.raises(UserError, match=r"secrets\.hugging_face_token"), hub_access(settings):
        pass


def test_own_token_is_left_alone(
    settings: GoogleCloudSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    with hub_access(settings):
        assert os.environ["HF_TOKEN"] == "mine"
    assert os.environ["HF_TOKEN"] == "mine"
