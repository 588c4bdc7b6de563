"""The serve images' program on the variables of Vertex AI, with a real engine."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from artifacts.leases import process_started
from serving.vertex.container import engine_of, parse_command
from tests.serving.conftest import pieces_of
from tests.stand_ins.processes import free_port
from tests.stand_ins.serve_image import VLLM_COMMAND, vllm_image
from tests.waiting import WAIT_SECONDS, wait_until

BY_COMMAND = (sys.executable, "-m", "tests.stand_ins.openai_without_echo", "{port}")
LOADS = ("sleep", "600", "{port}")


def container(model: Path, port: int, log: Path, *engine: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "AIP_STORAGE_URI": str(model),
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": "/alive",
        "AIP_PREDICT_ROUTE": "/answer",
        "HOST": "127.0.0.1",
        "MODEL_VERSION": "7",
        "MODEL_FINGERPRINT": "abc",
        "MODEL_NAME": "manuals",
    }
    command = (sys.executable, "-m", "serving.vertex.container")
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, *(("--", *engine) if engine else ())],
            env=environment,
            stdout=output,
            stderr=output,
        )


@contextmanager
def running(
    model: Path, log: Path, *engine: str
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A container and a client of it; it is told to end after the block, and has to end well."""
    port = free_port()
    process = container(model, port, log, *engine)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield process, client
    finally:
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0, log.read_text()


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path
) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("container") / "log"
    with running(tiny_model_folder, log) as (process, client):
        wait_until(lambda: is_healthy(client) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield client
        (engine,) = psutil.Process(process.pid).children(recursive=True)
    wait_until(lambda: process_started(engine.pid) is None)


def health(client: httpx.Client) -> int | None:
    """The status of its health; None where its port is closed."""
    try:
        return client.get("/alive").status_code
    except httpx.TransportError:
        return None


def is_healthy(client: httpx.Client) -> bool:
    return health(client) == 200


def test_predict_continues_every_instance_and_names_the_model(client: httpx.Client) -> None:
    body = {"instances": ["The valve", {"prompt": "A pump", "max_tokens": 4.0}], "parameters": None}
    answer = client.post("/answer", json=body)
    assert answer.status_code == 200
    assert [type(text) for text in answer.json()["predictions"]] == [str, str]
    assert answer.headers["x-model-version"] == "7"
    assert answer.headers["x-model-fingerprint"] == "abc"


def test_raw_predict_takes_openai_bodies_and_streams(client: httpx.Client) -> None:
    whole = client.post("/answer", json={"prompt": "The valve", "max_tokens": 6}).json()
    body = {"prompt": "The valve", "max_tokens": 6, "stream": True}
    with client.stream("POST", "/answer", json=body) as answer:
        text = "".join(piece["choices"][0]["text"] for piece in pieces_of(answer))
    assert text == whole["choices"][0]["text"]
    assert client.post("/v1/completions", json=body | {"stream": False}).status_code == 200


COMPLETION = '{"prompt": "The valve", "max_tokens": 2, "model": "%s"}'


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/answer", '{"instances": ["a"], "parameters": {"max_tokens": 1.5}}', 400),
        ("/answer", '{"prompt": "a", "max_tokens": 100000}', 400),
        ("/answer", '{"instances": ["' + "a" * 11_000_000 + '"]}', 413),
        # The engine knows the model by the pipeline's name.
        ("/answer", COMPLETION % "manuals", 200),
        ("/answer", COMPLETION % "gpt-4", 404),
        ("/load_lora_adapter", "{}", 404),
        ("/predict", "{}", 404),
    ],
)
def test_a_request_gets_its_status_and_a_refusal_its_reason(
    client: httpx.Client, path: str, body: str, status: int
) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["message"]


def test_port_is_open_while_the_model_is_loaded_and_says_that_it_is_not_ready(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """Vertex AI ends a container whose port is closed; a health of 503 it waits for."""
    with running(tiny_model_folder, tmp_path / "log", *LOADS) as (_, client):
        wait_until(lambda: health(client))
        assert health(client) == 503
        # A name that it will have, too: a client that got 404 would give up.
        named = {"prompt": "The valve", "max_tokens": 2, "model": "manuals"}
        for body in ({"instances": ["The valve"]}, named):
            answer = client.post("/answer", json=body)
            assert answer.status_code == 503
            assert "no version is being served" in answer.json()["error"]["message"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_container_that_is_told_to_end_while_it_begins_ends(
    seed: int, tmp_path: Path, tiny_model_folder: Path
) -> None:
    with running(tiny_model_folder, tmp_path / "log", *LOADS) as (_, client):
        wait_until(lambda: health(client))
        time.sleep(random.Random(seed).uniform(0, 0.1))


def test_command_is_told_how_long_a_text_fits_and_braces_of_its_own_stay(
    tiny_model_folder: Path,
) -> None:
    command = ["a", "{model}", "{port}", "--length", "{context}", "--json", '{"a": 1}']
    config = json.loads((tiny_model_folder / "config.json").read_text())
    told = engine_of(command, tiny_model_folder, None).command
    assert told == (*command[:4], str(config["max_position_embeddings"]), *command[5:])


@pytest.mark.soak
def test_an_engine_by_its_command_answers_and_is_started_again(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    with running(tiny_model_folder, tmp_path / "log", *BY_COMMAND) as (process, client):
        wait_until(lambda: is_healthy(client))
        for _ in range(2):
            answer = client.post("/answer", json={"instances": ["The valve"]})
            assert answer.json() == {"predictions": [" word"]}
            program, server = psutil.Process(process.pid).children(recursive=True)
            server.kill()
            program.wait(WAIT_SECONDS)
            wait_until(lambda: is_healthy(client))


@pytest.mark.parametrize(
    "ending", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_container_ended_while_its_engine_loads_takes_the_engine_along(
    tmp_path: Path, tiny_model_folder: Path, ending: signal.Signals
) -> None:
    process = container(tiny_model_folder, free_port(), tmp_path / "log", *LOADS)
    container_process = psutil.Process(process.pid)
    wait_until(lambda: len(container_process.children(recursive=True)) == 2)
    engines = container_process.children(recursive=True)
    process.send_signal(ending)
    process.wait(WAIT_SECONDS)
    wait_until(lambda: all(process_started(one.pid) is None for one in engines))


def run_to_its_end(model: Path, log: Path, *engine: str) -> str:
    process = container(model, free_port(), log, *engine)
    assert process.wait(WAIT_SECONDS) == 1, log.read_text()
    return log.read_text()


def test_container_that_cannot_serve_ends_and_says_why(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    log = tmp_path / "log"
    assert "is not a whole model folder" in run_to_its_end(tmp_path, log)
    ends = (sys.executable, "-c", "import sys; sys.exit(3)", "{port}")
    assert "ended with exit code 3" in run_to_its_end(tiny_model_folder, log, *ends)
    assert "give a command with {port}" in run_to_its_end(tiny_model_folder, log, "sleep", "1")
    missing = f"env -u AIP_STORAGE_URI {sys.executable} -m serving.vertex.container -- x".split()
    done = subprocess.run(missing, capture_output=True, text=True)
    assert done.returncode == 1 and "AIP_STORAGE_URI" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the image's Dockerfile starts, before a stand-in of vLLM's parser that knows few of its
    arguments."""
    monkeypatch.syspath_prepend(VLLM_COMMAND)
    monkeypatch.setenv("PYTHONPATH", os.fspath(VLLM_COMMAND))
    entrypoint = list(vllm_image().entrypoint)
    return entrypoint[entrypoint.index("--") + 1 :]


def test_the_images_own_command_is_taken_and_nothing_is_served(command: list[str]) -> None:
    assert parse_command(command) == {"engine": "vllm", "vllm": "0.32.0", "refusal": ""}


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--no-such", "thing"], "unrecognized arguments: --no-such thing"),
        (["--max-model-len", "many"], "argument --max-model-len: invalid"),
        (["--enable-auto-tool-choice"], "requires --tool-call-parser"),
    ],
)
def test_a_refusal_is_the_parsers_last_line(
    command: list[str], arguments: list[str], refusal: str
) -> None:
    told = parse_command([*command, *arguments])["refusal"]
    assert refusal in told and "\n" not in told


def test_another_engine_is_named() -> None:
    assert parse_command(["python", "-m", "served"]) == {"engine": "python"}
    assert parse_command([]) == {"engine": "this project's own"}


def test_a_port_that_is_taken_is_named_in_one_message(tmp_path: Path, taken_port: int) -> None:
    assert container(tmp_path, taken_port, tmp_path / "log").wait(WAIT_SECONDS) == 1
    said = (tmp_path / "log").read_text()
    assert f"Cannot listen on 127.0.0.1 port {taken_port}" in said and "Traceback" not in said
