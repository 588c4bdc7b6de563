"""Ten minutes of everything at once, and a hundred model changes with each engine under load.

`SOAK_SECONDS=120` makes the minutes two, `SOAK_CHANGES=10` the changes ten.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from artifacts.leases import process_started
from serving.logs import MAX_BYTES, before
from serving.settings import RolloutSettings
from serving.state import StateFolder
from tests.serving.conftest import HEAD, Client, raw_request, served, start
from tests.serving.test_openai_engine import BY_COMMAND
from tests.serving.test_rollout import in_threads, load
from tests.waiting import wait_until

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
CHANGES = int(os.environ.get("SOAK_CHANGES", "100"))
QUIET_SHARE = 0.15
GOOD_CLIENTS = 8
SETTINGS = {
    "max_waiting": 64,
    "header_timeout": 3.0,
    "body_timeout": 3.0,
    "engine_timeout": 5.0,
    "request_timeout": 60.0,
    "rollout": RolloutSettings(steps=(0.2, 0.6), step_seconds=2.0, min_requests=20),
}
RUDE_PAUSE = 0.25


def ask(client: Client, number: int) -> tuple[int, float]:
    """What one good client gets, and its seconds; an answer that is not whole counts as 0."""
    body = {"prompt": f"The valve {number}", "max_tokens": 10}
    began = time.monotonic()
    url = f"{client.url}/v1/completions"
    try:
        if number % 2:
            answer = httpx.post(url, json=body, timeout=90)
            status = answer.status_code if answer.status_code != 200 or answer.json() else 0
        else:
            with httpx.stream("POST", url, json=body | {"stream": True}, timeout=90) as streamed:
                lines = [line for line in streamed.iter_lines() if line]
                status = streamed.status_code
            if status == 200 and (lines[-1] != "data: [DONE]" or '"error"' in "".join(lines)):
                status = 0
    except httpx.HTTPError:
        status = 0
    return status, time.monotonic() - began


def silent(client: Client, generator: random.Random) -> None:
    with ExitStack() as held:
        for _ in range(10):
            held.enter_context(client.connect())
        time.sleep(2)


def slow(client: Client, generator: random.Random) -> None:
    with client.connect() as connection, suppress(OSError):
        sent = HEAD + b"Content-Length: 50\r\n\r\n{"
        for byte in sent if generator.random() < 0.5 else HEAD:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)


def vanishing(client: Client, generator: random.Random) -> None:
    with client.connect() as connection:
        connection.sendall(raw_request(stream=generator.random() < 0.5))
        time.sleep(generator.random() / 4)


def malformed(client: Client, generator: random.Random) -> None:
    content = generator.choice(
        [
            generator.randbytes(300) + b"\r\n\r\n",
            HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            HEAD + b"X-Long: " + b"a" * 100_000,
            HEAD + b'Content-Length: 20\r\n\r\n{"prompt": "\\ud800"}',
            b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        ]
    )
    with client.connect() as connection, suppress(OSError):
        connection.sendall(content)
        connection.settimeout(5)
        connection.recv(4096)


def good(client: Client, answers: list[tuple[int, float]]) -> list[Callable[[], None]]:
    return [
        lambda number=number: answers.append(ask(client, number))  # type: ignore[misc]
        for number in range(GOOD_CLIENTS)
    ]


def rude(client: Client) -> list[Callable[[], None]]:
    def paced(work: Callable[[Client, random.Random], None], seed: int) -> Callable[[], None]:
        generator = random.Random(seed)

        def once() -> None:
            work(client, generator)
            time.sleep(RUDE_PAUSE)

        return once

    return [paced(work, n) for n, work in enumerate((silent, slow, vanishing, malformed))]


def p95(answers: list[tuple[int, float]]) -> float:
    return sorted(seconds for _, seconds in answers)[int(len(answers) * 0.95)]


def replaced(client: Client, pid: int) -> bool:
    status = StateFolder(client.state_folder).running
    routes = status.routes if status else []
    return process_started(pid) is None and any(r.ready and r.engine_pid != pid for r in routes)


def disturb(client: Client, other_model: Path) -> None:
    """A rollout, two killed engines, a stopped one, spread over the time that is left."""
    pause = SECONDS * (1 - QUIET_SHARE) / 5
    time.sleep(pause)
    start(client.state_folder, other_model, "2", **SETTINGS)
    for _ in range(2):
        time.sleep(pause)
        (pid,) = client.engine_pids()
        psutil.Process(pid).kill()
        wait_until(lambda pid=pid: replaced(client, pid))
    time.sleep(pause)
    (stopped,) = map(psutil.Process, client.engine_pids())
    stopped.suspend()
    wait_until(lambda: stopped.status() != psutil.STATUS_STOPPED)
    time.sleep(pause)


@pytest.mark.soak
@pytest.mark.fault(
    "endpoint",
    "ten minutes of silent, slow, vanishing and malformed clients, a rollout, two killed engines "
    "and a stopped one",
    sees="well-behaved clients: nothing but latency, which at most doubles at the 95th percentile",
    then="the stopped engine continues; memory, open files and log do not grow; each crash is one "
    "line in the log",
)
def test_good_clients_lose_nothing_among_rude_ones_and_dying_engines(
    tmp_path: Path, tiny_model_folder: Path, other_model_folder: Path
) -> None:
    folder = tmp_path / "endpoint"
    with served(folder, tiny_model_folder, "1", **SETTINGS) as client:
        quiet: list[tuple[int, float]] = []
        with in_threads(*good(client, quiet)):
            time.sleep(SECONDS * QUIET_SHARE)
        server = client.api_server()
        memory, files = server.memory_info().rss, server.num_fds()
        loud: list[tuple[int, float]] = []
        with in_threads(*good(client, loud), *rude(client)):
            disturb(client, other_model_folder)
        time.sleep(5)
        logs = [p for p in (folder / "endpoint.log", before(folder / "endpoint.log")) if p.exists()]
        size = sum(path.stat().st_size for path in logs)
        lines = [line for path in logs for line in path.read_text().splitlines()]
        assert [line for line in lines if not line.startswith("{")] == []
        events = [json.loads(line) for line in lines]
        assert [event for event in events if "traceback" in event] == []
        told = Counter(event["event"] for event in events)
        print(
            f"quiet {len(quiet)} requests, p95 {p95(quiet):.2f} s; loud {len(loud)}, "
            f"p95 {p95(loud):.2f} s; memory {memory / 1e6:.0f} -> "
            f"{server.memory_info().rss / 1e6:.0f} MB; files {files} -> {server.num_fds()}; "
            f"log {size / 1e6:.1f} MB; {dict(told)}"
        )

        assert Counter(status for status, _ in quiet + loud) == {200: len(quiet + loud)}
        assert p95(loud) <= 2 * p95(quiet)
        assert client.api_server().pid == server.pid
        assert server.memory_info().rss - memory < 50_000_000
        # Clients had connections open then, which are closed now.
        assert server.num_fds() <= files
        assert size <= 2 * MAX_BYTES
        assert (told["engine_ended"], told["engine_restarted"]) == (2, 2)
        assert told["api_server_ended"] == 0
        assert "serving_requests_in_flight 0" in client.http.get("/metrics").text


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["openvino", "transformers", BY_COMMAND], ids=str)
def test_model_changes_lose_no_request(
    tmp_path: Path, tiny_model_folder: Path, other_model_folder: Path, engine: Any
) -> None:
    models = (tiny_model_folder, other_model_folder)
    check_model_changes(tmp_path / "endpoint", models, engine=engine, request_timeout=60.0)


def check_model_changes(folder: Path, models: tuple[Path, Path], **settings: Any) -> None:
    """Change an endpoint's model `CHANGES` times under load: every request is answered, one engine
    is left, and memory does not grow."""
    settings |= {"rollout": RolloutSettings(steps=(0.5,), step_seconds=0.5, min_requests=20)}
    with served(folder, models[0], "0", **settings) as client:
        server = client.api_server()
        with load(client) as answers:
            for number in range(1, CHANGES + 1):
                start(folder, models[number % 2], str(number), **settings)
                if number == 1:
                    memory = server.memory_info().rss
        print(f"{len(answers)} requests during {CHANGES} changes")

        assert Counter(status for status, _ in answers) == {200: len(answers)}
        assert client.api_server().pid == server.pid
        assert server.memory_info().rss - memory < 50_000_000
        assert answers[-1] == (200, str(CHANGES)) and len(client.engine_pids()) == 1
