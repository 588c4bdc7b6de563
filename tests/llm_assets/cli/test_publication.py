"""A version goes to a Hugging Face repository whole, with its card, or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from huggingface_hub import constants

from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.card import weights_fingerprint
from tests.conftest import Project
from tests.llm_assets.in_process import type_in
from tests.llm_assets.registry.conftest import base_entry, entry, verdict
from tests.stand_ins.hub import WRITES, Hub, Repository, running_hub
from tests.tiny import tiny_base_model

NAME = "team/manuals"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub of this machine."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with running_hub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def model(project: Project) -> Path:
    """The model of version 1 of the project."""
    store = project.record.store

    def write(draft: Draft) -> None:
        tiny_base_model(draft.path)

    settings = {"optimizer": {"learning_rate": 0.001}}
    identity = Identity(kind="checkpoint", code_version="1", settings=settings, inputs={})
    made, _ = store.make(identity, write)
    weights = weights_fingerprint(made)
    found = {"model_url": made.url, "lineage": {"checkpoint": made.fingerprint}}
    registry = LocalRegistry.of(project.record)
    registry.register_base(base_entry())
    registry.enter(entry(weights).model_copy(update=found), verdict(weights, "base"))
    return made.path


def publish(project: Project, *arguments: str, token: str = WRITES) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", token)
        return type_in(project, "publish", "1", NAME, *arguments)


def refusal(project: Project, token: str = WRITES) -> str:
    """What is said where nothing is published."""
    refused = publish(project, token=token)
    assert refused.exit_code == 1
    assert token == "" or token not in f"{refused.output}{refused.exception}"
    return str(refused.exception)


def test_a_version_is_published_whole_and_private(
    project: Project, hub: Hub, model: Path, tmp_path: Path
) -> None:
    done = publish(project)
    assert done.exit_code == 0, done
    repository = hub.repositories[NAME]
    assert repository.private and repository.messages == ["Version 1 of manual"]
    for path in model.iterdir():
        if path.name != "manifest.json":
            assert repository.files[path.name] == path.read_bytes()
    card = repository.files["README.md"].decode()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "| held_out_bits_per_byte | candidate | 1.0000 |" in card
    assert json.loads(repository.files["settings.json"]) == {
        "checkpoint": {"optimizer": {"learning_rate": 0.001}}
    }
    assert "held_out_bits_per_byte" in json.loads(repository.files["metrics.json"])
    told = b"".join(repository.files[name] for name in ("README.md", "metrics.json"))
    assert str(project.folder).encode() not in told
    assert WRITES not in done.output
    assert publish(project).exit_code == 0
    assert len(repository.messages) == 2


@pytest.mark.fault(
    "settings and commands",
    "Hub token without write permission",
    sees="the Hub's answer, and the variable",
    then="nothing is uploaded",
)
def test_a_refused_token_is_said_and_never_shown(project: Project, hub: Hub, model: Path) -> None:
    assert "The Hub answered 401" in refusal(project, token="hf_wrong")
    assert "HF_TOKEN is not set" in refusal(project, token="")
    assert not hub.repositories


def test_a_public_repository_is_written_only_where_it_was_said(
    project: Project, hub: Hub, model: Path
) -> None:
    hub.repositories[NAME] = Repository(private=False)
    assert "already exists and is public" in refusal(project)
    assert not hub.repositories[NAME].files
    assert publish(project, "--public").exit_code == 0
    assert hub.repositories[NAME].files


def test_damaged_weights_are_not_published(project: Project, hub: Hub, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert "model.safetensors" in refusal(project)
    assert not hub.repositories
