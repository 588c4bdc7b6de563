"""A version goes to a Hugging Face repository whole, with its card, or not at all."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.card import weights_fingerprint
from tests.conftest import Project
from tests.llm_assets.registry.conftest import base_entry, entry, verdict
from tests.stand_ins.hub import WRITES, Hub, Repository
from tests.tiny import tiny_base_model

NAME = "team/manuals"


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A Hub of this machine."""
    hub = Hub()
    yield hub
    hub.stop()


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


def publish(
    project: Project, hub: Hub, *arguments: str, token: str = WRITES
) -> subprocess.CompletedProcess[str]:
    told = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        ["llm-assets", "publish", "1", NAME, *arguments],
        cwd=project.folder,
        env=project.environment() | told,
        capture_output=True,
        text=True,
    )


def test_a_version_is_published_whole_and_private(
    project: Project, hub: Hub, model: Path, tmp_path: Path
) -> None:
    done = publish(project, hub)
    assert done.returncode == 0, done.stderr
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
    assert WRITES not in done.stdout + done.stderr
    assert publish(project, hub).returncode == 0
    assert len(repository.messages) == 2


@pytest.mark.fault(
    "settings and commands",
    "Hub token without write permission",
    sees="the Hub's answer, and the variable",
    then="nothing is uploaded",
)
def test_a_refused_token_is_said_and_never_shown(project: Project, hub: Hub, model: Path) -> None:
    refused = publish(project, hub, token="hf_wrong")
    assert refused.returncode == 1 and "The Hub answered 401" in refused.stderr
    assert "hf_wrong" not in refused.stdout + refused.stderr
    absent = publish(project, hub, token="")
    assert absent.returncode == 1 and "HF_TOKEN is not set" in absent.stderr
    assert not hub.repositories


def test_a_public_repository_is_written_only_where_it_was_said(
    project: Project, hub: Hub, model: Path
) -> None:
    hub.repositories[NAME] = Repository(private=False)
    refused = publish(project, hub)
    assert refused.returncode == 1 and "already exists and is public" in refused.stderr
    assert not hub.repositories[NAME].files
    assert publish(project, hub, "--public").returncode == 0
    assert hub.repositories[NAME].files


def test_damaged_weights_are_not_published(project: Project, hub: Hub, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    refused = publish(project, hub)
    assert refused.returncode == 1 and "model.safetensors" in refused.stderr
    assert not hub.repositories
