"""Real endpoints with tiny models, on free ports."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from artifacts.model import check_model_folder
from serving import endpoint as process
from serving.endpoint import Endpoint
from serving.engine.program import choose_engine, load_model
from serving.engine.protocol import Chunk, GenerateRequest
from serving.engine.served_model import AnyModel
from serving.settings import EndpointSettings, RolloutSettings
from serving.state import Desired
from tests.tiny import tiny_base_model, tiny_sequence_to_sequence_model

SETTINGS = EndpointSettings(
    port=0,
    # Exact, so that answers are transformers' own whatever this processor does fast.
    weights="f32",
    threads=1,
    max_new_tokens=150,
    max_prompt_tokens=80,
    cache_tokens=4_096,
    max_waiting=24,
    request_timeout=30.0,
    rollout=RolloutSettings(steps=(0.5,), step_seconds=0.5),
)


Engine = TypeVar("Engine")
CONVERSIONS = "TEST_CONVERSIONS"
"""Environment variable with the folder that all endpoints of these tests share."""


@pytest.fixture(scope="session", autouse=True)
def conversions(for_all_workers: Path) -> Path:
    """Where models are converted to, once for all tests."""
    folder = for_all_workers / "conversions"
    os.environ[CONVERSIONS] = str(folder)
    return folder


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second tiny model, which writes something else."""
    folder = tmp_path_factory.mktemp("other") / "model"
    tiny_base_model(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def sequence_to_sequence_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path
) -> Path:
    """A tiny encoder-decoder model with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("t5") / "model"
    tiny_sequence_to_sequence_model(folder, tiny_model_folder)
    return folder


@pytest.fixture(scope="session")
def chat_model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model_folder, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    return folder


def engine_of(folder: Path, kind: type[Engine], conversions: Path) -> Engine:
    """The engine of a small model's kind, loaded into this process."""
    check_model_folder(folder)
    settings = EndpointSettings()
    loaded = load_model(folder, settings, choose_engine(folder, settings, conversions))
    assert isinstance(loaded, kind)
    return loaded


def generate_request(**fields: Any) -> GenerateRequest:
    """A request for one token, but for what is given."""
    return GenerateRequest(
        **{"max_tokens": 1, "max_prompt_tokens": 64, "temperature": 0, "top_p": 1} | fields
    )


def generate(model: AnyModel, request: GenerateRequest) -> Chunk:
    """What a model answers in one piece."""

    async def ask() -> list[Chunk]:
        return [chunk async for chunk in model.generate(request, model.encode(request))]

    (answer,) = asyncio.run(ask())
    return answer


class Client:
    """Talks to one endpoint."""

    def __init__(self, endpoint: Endpoint, state_folder: Path) -> None:
        self.endpoint = endpoint
        self.url, self.pid = endpoint.status.url, endpoint.status.pid
        self.state_folder = state_folder
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def complete(self, prompt: str = "The valve", **fields: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def engine_pids(self) -> list[int]:
        status = process.status(self.state_folder)
        assert status is not None
        return [route.engine_pid for route in status.routes if route.engine_pid]

    def api_server(self) -> psutil.Process:
        status = process.status(self.state_folder)
        assert status is not None
        return psutil.Process(status.api_server_pid)

    def kill_engine(self) -> None:
        (pid,) = self.engine_pids()
        psutil.Process(pid).kill()


def start(folder: Path, model: Path, version: str = "1", **changes: object) -> Client:
    """Start an endpoint, or move the one of this folder to another version."""
    desired = Desired(
        model_folder=model,
        version=version,
        fingerprint=f"fingerprint-{version}",
        settings=SETTINGS.model_copy(update=changes),
        conversions=Path(os.environ[CONVERSIONS]),
    )
    return Client(process.start(folder, desired), folder)


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory, chat_model_folder: Path) -> Iterator[Client]:
    """One whose model takes chats, too, for all tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("chat-endpoint")
    yield start(folder, chat_model_folder)
    process.stop(folder)


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Client]:
    """One endpoint for all tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("endpoint")
    yield start(folder, tiny_model_folder)
    process.stop(folder)
