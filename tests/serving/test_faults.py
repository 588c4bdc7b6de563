"""A running endpoint under load, with rude clients and a dying engine."""

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serving.server import LOOK_SECONDS
from serving.state import StateFolder
from tests.serving.conftest import HEAD, Client, pieces_of, raw_request, served
from tests.waiting import WAIT_SECONDS, wait_until

TOKEN = "correct horse"
AUTHORIZED = HEAD + f"Authorization: Bearer {TOKEN}\r\n".encode()
LENGTH = 2_000
"""Tokens of an answer that takes seconds."""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, chat_model_folder: Path) -> Iterator[Client]:
    """An endpoint that asks for a token, is impatient, and logs where there is no space."""
    folder = tmp_path_factory.mktemp("strict")
    (folder / "endpoint.log").symlink_to("/dev/full")
    limits = {"request_timeout": 3.0, "body_timeout": 1.0, "engine_timeout": 4.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENDPOINT_TOKEN", TOKEN)
        with served(folder, chat_model_folder, token_variable="ENDPOINT_TOKEN", **limits) as client:
            client.http.headers["Authorization"] = f"Bearer {TOKEN}"
            yield client


def test_the_engine_does_not_know_the_clients_token(strict: Client) -> None:
    (pid,) = strict.engine_pids()
    assert TOKEN not in psutil.Process(pid).environ().values()


@pytest.mark.fault("endpoint", "wrong token", sees="401", then="nothing is read")
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic abc", f"bearer{TOKEN}"])
def test_wrong_or_no_token_is_401(strict: Client, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/completions", "/predict", "/v1/chat/completions"):
        answer = httpx.post(strict.url + path, json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{strict.url}/metrics", headers=headers).status_code == 401
    assert httpx.get(f"{strict.url}/health").status_code == 200


@pytest.mark.fault(
    "endpoint", "log on a full disk", sees="nothing", then="the endpoint keeps answering"
)
def test_log_on_a_full_disk_does_not_stop_the_answers(strict: Client) -> None:
    with pytest.raises(OSError), Path("/dev/full").open("w") as full:
        full.write("x")
    assert strict.complete(max_tokens=2).status_code == 200


@pytest.mark.fault(
    "endpoint",
    "status cannot be written",
    sees="a line in the log",
    then="the endpoint keeps answering",
)
def test_status_that_cannot_be_written_does_not_stop_the_answers(strict: Client) -> None:
    state, status = StateFolder(strict.state_folder), strict.state_folder / "status.json"
    kept, wanted = status.read_bytes(), state.desired.read()
    assert wanted is not None
    status.unlink()
    (status / "in the way").mkdir(parents=True)
    try:
        state.desired.write(wanted)
        time.sleep(2 * LOOK_SECONDS)
        assert strict.complete(max_tokens=2).status_code == 200
    finally:
        (status / "in the way").rmdir()
        status.rmdir()
        status.write_bytes(kept)


def test_model_without_chat_template_says_so(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = client.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "completions" in answer.json()["error"]["message"]


@pytest.mark.fault(
    "endpoint", "client sends its body slowly", sees="408", then="its slot is free again"
)
def test_client_that_sends_slowly_is_cut_off(strict: Client) -> None:
    with strict.connect() as slow:
        slow.sendall(AUTHORIZED + b"Content-Length: 50\r\n\r\n{")
        assert b" 408 " in slow.recv(4096).splitlines()[0]
    assert strict.complete(max_tokens=1).status_code == 200


@pytest.mark.fault(
    "endpoint",
    "client does not read its answer",
    sees="nothing",
    then="its slot is free after the request timeout",
)
def test_client_that_does_not_read_holds_no_place(strict: Client) -> None:
    with strict.connect() as silent:
        silent.sendall(raw_request(AUTHORIZED, stream=True))
        wait_until(lambda: silent.recv(1, socket.MSG_PEEK))
        wait_until(lambda: strict.metric("serving_requests_in_flight") == 0)


@pytest.mark.fault(
    "endpoint", "client disconnects during a stream", sees="nothing", then="generation stops"
)
def test_client_that_leaves_mid_stream_gives_its_place_back(strict: Client) -> None:
    body = {"prompt": "The valve", "max_tokens": 150, "temperature": 1.0, "stream": True}
    with strict.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: strict.metric("serving_requests_in_flight") == 0)


@pytest.mark.fault(
    "endpoint",
    "more requests than the endpoint accepts",
    sees="429 with Retry-After",
    then="all others are answered",
)
def test_more_than_it_can_take_is_429_with_retry_after(client: Client) -> None:
    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=client.url, timeout=60, limits=limits) as http:
            body = {"prompt": "The valve", "max_tokens": 40}
            return await asyncio.gather(
                *(http.post("/v1/completions", json=body) for _ in range(200))
            )

    answers = asyncio.run(flood())
    counts = Counter(answer.status_code for answer in answers)
    assert set(counts) == {200, 429}
    assert counts[200] >= 24
    assert all("retry-after" in a.headers for a in answers if a.status_code == 429)
    assert len({a.json()["choices"][0]["text"] for a in answers if a.status_code == 200}) == 1
    assert client.complete(max_tokens=1).status_code == 200


def test_prompts_are_not_logged(client: Client) -> None:
    secret = "zebra crossing"
    assert client.complete(secret, max_tokens=1).status_code == 200
    lines = (client.state_folder / "endpoint.log").read_text().splitlines()
    requests = [json.loads(line) for line in lines if '"request"' in line]
    assert requests[-1]["path"] == "/v1/completions" and requests[-1]["status"] == 200
    assert not any(secret in line for line in lines)


@pytest.fixture(scope="module")
def lengthy(tmp_path_factory: pytest.TempPathFactory, long_model_folder: Path) -> Iterator[Client]:
    """An endpoint that writes one answer for so long that its engine can be met in the middle."""
    limits = {"max_new_tokens": LENGTH, "request_timeout": WAIT_SECONDS}
    with served(tmp_path_factory.mktemp("lengthy"), long_model_folder, **limits) as client:
        client.http.timeout = WAIT_SECONDS
        yield client


@pytest.mark.fault(
    "endpoint",
    "engine {how} during a stream",
    sees="a pause",
    then="the stream is completed, by a new engine if this one died",
)
@pytest.mark.parametrize("how", ["killed", "stopped (SIGSTOP)"])
def test_engine_lost_mid_answer_and_the_answer_completed(lengthy: Client, how: str) -> None:
    """A stopped one is known by doing nothing, and told to go on: 10 s at most, also under load."""
    body: dict[str, Any] = {"prompt": "The valve", "max_tokens": LENGTH, "ignore_eos": True}
    wait_until(lambda: lengthy.http.get("/health").status_code == 200)
    whole = lengthy.complete(**body).json()["choices"][0]["text"]
    before = lengthy.metric("serving_engine_restarts_total")
    pieces, gap, heard = [], 0.0, time.monotonic()
    with lengthy.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        for piece in pieces_of(answer):
            gap, heard = max(gap, time.monotonic() - heard), time.monotonic()
            pieces.append(piece["choices"][0]["text"])
            if len(pieces) == 1:
                (pid,) = lengthy.engine_pids()
                os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    written = "".join(pieces)
    assert written[:20] == whole[:20] and len(written) > len(whole) // 2
    assert lengthy.metric("serving_engine_restarts_total") - before == (how == "killed")
    assert gap > 0.5, "no engine was lost in the middle of the answer"
    assert how == "killed" or gap <= 10
