"""Real endpoints with tiny models, on free ports."""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
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
from serving.settings import EndpointSettings, OpenAIEngine, RolloutSettings
from serving.state import Desired, StateFolder
from tests.tiny import change_config, tiny_base_model, tiny_sequence_to_sequence_model
from tests.waiting import WAIT_SECONDS

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


@pytest.fixture(scope="session")
def long_model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The tiny model with places for an answer that takes longer than a test has."""
    folder = tmp_path_factory.mktemp("long") / "model"
    return change_config(tiny_model_folder, folder, max_position_embeddings=32_000)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def engine_of(folder: Path, kind: type[Engine], conversions: Path) -> Engine:
    """The engine of a small model's kind, loaded into this process."""
    check_model_folder(folder)
    settings = EndpointSettings()
    loaded = load_model(folder, settings, choose_engine(folder, settings, conversions))
    assert isinstance(loaded, kind)
    return loaded


def asking(folder: Path, engine: OpenAIEngine, conversions: Path) -> AnyModel:
    """A model that another server computes, as an engine's program loads it."""
    settings = SETTINGS.model_copy(update={"engine": engine})
    return load_model(folder, settings, choose_engine(folder, settings, conversions))


def generate_request(**fields: Any) -> GenerateRequest:
    """A request for one token, but for what is given."""
    return GenerateRequest(
        **{"max_tokens": 1, "max_prompt_tokens": 64, "temperature": 0, "top_p": 1} | fields
    )


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that awaits something, as pytest calls tests."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


async def chunks_of(model: AnyModel, request: GenerateRequest) -> list[Chunk]:
    """The pieces of an answer."""
    return [chunk async for chunk in model.generate(request, model.encode(request))]


def generate(model: AnyModel, *requests: GenerateRequest) -> list[Chunk]:
    """What a model answers to requests that wait together, each in one piece."""

    async def ask() -> list[list[Chunk]]:
        whole = [request.model_copy(update={"stream": False}) for request in requests]
        return await asyncio.gather(*(chunks_of(model, request) for request in whole))

    answers = [answer for (answer,) in asyncio.run(ask())]
    assert not any(answer.error for answer in answers), answers
    return answers


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def raw_request(head: bytes = HEAD, **fields: object) -> bytes:
    """A request for a long completion, byte by byte."""
    body = json.dumps({"prompt": "The valve", "max_tokens": 150, **fields}).encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def pieces_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The pieces of a stream as they come, to the line that ends it."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    last = ""
    for line in filter(None, answer.iter_lines()):
        last = line.removeprefix("data: ")
        if last != "[DONE]":
            yield json.loads(last)
    assert last == "[DONE]"


class Client:
    """Talks to one endpoint."""

    def __init__(self, endpoint: Endpoint, state_folder: Path) -> None:
        self.endpoint = endpoint
        self.url, self.pid = endpoint.status.url, endpoint.status.pid
        self.state_folder = state_folder
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def complete(self, prompt: str = "The valve", **fields: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def stream(self, path: str = "/v1/completions", **fields: object) -> list[dict[str, Any]]:
        """The pieces of a whole stream."""
        with self.http.stream("POST", path, json=fields | {"stream": True}) as answer:
            return list(pieces_of(answer))

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", httpx.URL(self.url).port))
        connection.settimeout(WAIT_SECONDS)
        return connection

    def metric(self, name: str) -> float:
        """Of all lines of that metric together."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def engine_pids(self) -> list[int]:
        status = StateFolder(self.state_folder).running
        assert status is not None
        return [route.engine_pid for route in status.routes if route.engine_pid]

    def api_server(self) -> psutil.Process:
        status = StateFolder(self.state_folder).running
        assert status is not None
        return psutil.Process(status.api_server_pid)

    def kill_engine(self) -> None:
        (pid,) = self.engine_pids()
        psutil.Process(pid).kill()


def desired(model: Path, version: str = "1", **changes: object) -> Desired:
    """A version to be served, which is converted once for all tests."""
    return Desired(
        model_folder=model,
        version=version,
        fingerprint=f"fingerprint-{version}",
        name="manual",
        settings=SETTINGS.model_copy(update=changes),
        conversions=Path(os.environ[CONVERSIONS]),
    )


def start(folder: Path, model: Path, version: str = "1", **changes: object) -> Client:
    """Start an endpoint, or move the one of this folder to another version."""
    return Client(process.start(folder, desired(model, version, **changes)), folder)


@contextmanager
def served(folder: Path, model: Path, version: str = "1", **changes: object) -> Iterator[Client]:
    """An endpoint that is stopped at the end of the block."""
    try:
        yield start(folder, model, version, **changes)
    finally:
        process.stop(folder)


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory, chat_model_folder: Path) -> Iterator[Client]:
    """One whose model takes chats, too, for all tests that leave it as it was."""
    with served(tmp_path_factory.mktemp("chat-endpoint"), chat_model_folder) as client:
        yield client


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Client]:
    """One endpoint for all tests that leave it as it was."""
    with served(tmp_path_factory.mktemp("endpoint"), tiny_model_folder) as client:
        yield client
