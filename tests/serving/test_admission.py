"""Who is let in, for how long, and what a client that leaves costs."""

import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from serving import endpoint as process
from tests.faults import stopped
from tests.serving.conftest import HEAD, Client, raw_request, start
from tests.waiting import WAIT_SECONDS, wait_until

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system turns') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}<assistant>"
)


HEADER_TIMEOUT = 1.0
PROMISED_SECONDS = 5.0
"""In which `/health` tells that an engine does not answer."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, chat_model_folder: Path) -> Iterator[Client]:
    """An endpoint with room for few connections, and one page that may use it.

    It is started where few more files may be open than are, and more may be asked for.
    """
    folder = tmp_path_factory.mktemp("guarded")
    model = shutil.copytree(chat_model_folder, folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(number) for number in os.listdir("/proc/self/fd")) + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        client = start(
            folder,
            model,
            max_connections=12,
            header_timeout=HEADER_TIMEOUT,
            # Work that ends while a test waits for it was not ended by this.
            request_timeout=2 * WAIT_SECONDS,
            max_waiting=2,
            allowed_origins=("https://page.example",),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    yield client
    process.stop(folder)


def in_flight(client: Client) -> float:
    return client.metric("serving_requests_in_flight")


def post(client: Client, **headers: str) -> httpx.Response:
    body = json.dumps({"prompt": "The valve", "max_tokens": 1})
    given = {"Content-Type": "application/json"} | headers
    return client.http.post("/v1/completions", content=body, headers=given)


@pytest.mark.fault(
    "endpoint",
    "idle connection, or a header that never ends",
    sees="closed after `endpoint.header_timeout`",
    then="the endpoint keeps answering",
)
@pytest.mark.parametrize("beginning", [b"", b"GET /health HTTP/1.1\r\nX-Slow: "])
def test_silent_connection_and_unfinished_header_are_closed(
    guarded: Client, beginning: bytes
) -> None:
    with guarded.connect() as silent:
        silent.sendall(beginning)
        started = time.monotonic()
        while silent.recv(4096):
            pass
    assert time.monotonic() - started < 5


def test_connection_in_use_is_not_taken_for_a_silent_one(guarded: Client) -> None:
    with guarded.connect() as busy:
        began = answered = time.monotonic()
        while answered - began < 3 * HEADER_TIMEOUT:
            answer = b""
            with suppress(ConnectionError):
                busy.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = busy.recv(4096)
            if not answer:
                assert time.monotonic() - answered > HEADER_TIMEOUT, "it was in use all the time"
                return
            answered = time.monotonic()
            time.sleep(HEADER_TIMEOUT / 20)


@pytest.mark.fault(
    "endpoint",
    "too many connections",
    sees="503 with a reason",
    then="the endpoint keeps answering",
)
def test_more_connections_than_allowed_are_told_so_and_the_rest_go_on(guarded: Client) -> None:
    held = [guarded.connect() for _ in range(20)]
    try:
        refused = held[-1].recv(4096)
        assert refused.startswith(b"HTTP/1.1 503 ")
        head, body = refused.split(b"\r\n\r\n")
        assert b"retry-after: 2" in head.split(b"\r\n")
        assert json.loads(body)["error"]["code"] == "unavailable"
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: httpx.get(f"{guarded.url}/health").status_code == 200)


def test_as_many_files_may_be_open_as_the_machine_allows(guarded: Client) -> None:
    now, most = guarded.api_server().rlimit(psutil.RLIMIT_NOFILE)
    assert now == most == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.fault(
    "endpoint", "400 MB in one header", sees="connection closed", then="memory use stays level"
)
def test_endless_header_is_refused_before_it_is_kept(guarded: Client) -> None:
    server = guarded.api_server()
    before = server.memory_info().rss
    with guarded.connect() as endless:
        endless.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
        with pytest.raises(OSError):
            for _ in range(400):
                endless.sendall(b"a" * 65_536)
                time.sleep(0.001)
    assert server.memory_info().rss - before < 20_000_000


@pytest.mark.fault(
    "endpoint",
    "bytes that are not HTTP",
    sees="400 in OpenAI's shape",
    then="the endpoint keeps answering",
)
def test_malformed_request_is_answered_in_openais_shape(guarded: Client) -> None:
    with guarded.connect() as rude:
        rude.sendall(b"\x00\x01 nonsense\r\n\r\n")
        answer = rude.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_http"


@pytest.mark.fault(
    "endpoint",
    "two different lengths for a body, as in request smuggling",
    sees="400",
    then="the connection is closed, and what followed is not answered",
)
@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 99\r\n",
        b"HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
        b"HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
    ],
)
def test_a_body_with_two_lengths_is_refused_and_nothing_after_it_answered(
    guarded: Client, head: bytes
) -> None:
    with guarded.connect() as smuggler:
        smuggler.sendall(
            b"POST /v1/completions " + head + b"Host: localhost\r\n\r\n0\r\n\r\n"
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        answers = b"".join(iter(lambda: smuggler.recv(4096), b""))
    assert answers.startswith(b"HTTP/1.1 400 ") and answers.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost:99"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "https://page.example"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_hosts_pages_and_content_types(
    guarded: Client, headers: dict[str, str], status: int
) -> None:
    assert post(guarded, **headers).status_code == status


def test_page_may_send_the_headers_of_openais_client(guarded: Client) -> None:
    """As the official JavaScript client sends them from a browser, which asks before."""
    names = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
    statuses = [
        guarded.http.options("/v1/chat/completions", headers=asked | {"Origin": page}).status_code
        for page in ("https://page.example", "https://evil.example")
    ]
    assert statuses == [200, 403]


def test_page_reads_which_version_answered_which_request(guarded: Client) -> None:
    headers = post(guarded, Origin="https://page.example").headers
    exposed = headers["access-control-expose-headers"].split(", ")
    assert {"X-Model-Version", "X-Model-Fingerprint", "X-Request-Id", "Retry-After"} == set(exposed)


@pytest.mark.fault(
    "endpoint",
    "more unfinished bodies than accepted requests",
    sees="nothing",
    then="complete requests are answered meanwhile",
)
def test_a_body_that_is_on_its_way_takes_nobodys_place(guarded: Client) -> None:
    held = [guarded.connect() for _ in range(5)]
    try:
        for connection in held:
            connection.sendall(HEAD + b"Content-Length: 50\r\n\r\n{")
        for _ in range(3):
            assert post(guarded).status_code == 200
    finally:
        for connection in held:
            connection.close()


@pytest.mark.fault(
    "endpoint",
    "client that keeps sending requests and never reads an answer",
    sees="connection closed after `endpoint.header_timeout`",
    then="its slot and its connection are free again",
)
def test_a_client_that_reads_nothing_is_let_go(guarded: Client) -> None:
    """Its own buffer, the kernel's and the server's fill up, in the middle of an answer."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        deaf.connect(("127.0.0.1", httpx.URL(guarded.url).port))
        deaf.sendall(200 * raw_request(ignore_eos=True, logprobs=1, stream=True))
        port = deaf.getsockname()[1]

        def is_connected() -> bool:
            found = guarded.api_server().net_connections("tcp")
            return any(one.raddr and one.raddr.port == port for one in found)

        wait_until(is_connected)
        wait_until(lambda: not is_connected())
        wait_until(lambda: in_flight(guarded) == 0)


@pytest.mark.fault(
    "endpoint", "client disconnects before a whole answer", sees="nothing", then="generation stops"
)
def test_work_ends_when_its_client_has_gone(guarded: Client) -> None:
    """The engine stands still meanwhile, so that no answer can end the work."""
    (pid,) = guarded.engine_pids()
    with stopped(pid) as engine:

        def are_in_flight(count: int) -> bool:
            # The server has it go on after a second, in which nobody may have looked.
            engine.suspend()
            return in_flight(guarded) == count

        with guarded.connect() as impatient:
            impatient.sendall(raw_request())
            wait_until(lambda: are_in_flight(1))
        wait_until(lambda: are_in_flight(0))
    assert guarded.complete(max_tokens=2).status_code == 200


@pytest.mark.fault(
    "endpoint",
    "half a surrogate pair, or turns that the chat template rejects",
    sees="400 with the reason",
    then="does not count against the version",
)
def test_half_a_surrogate_pair_and_a_templates_own_refusal_are_400(guarded: Client) -> None:
    broken = guarded.http.post(
        "/v1/completions",
        content=b'{"prompt": "\\ud800"}',
        headers={"Content-Type": "application/json"},
    )
    assert broken.status_code == 400 and "surrogate" in broken.json()["error"]["message"]
    turns = [{"role": "system", "content": "be brief"}]
    refused = guarded.http.post("/v1/chat/completions", json={"messages": turns})
    assert refused.status_code == 400
    assert "no system turns" in refused.json()["error"]["message"]


@pytest.mark.fault(
    "endpoint",
    "another local user tries to reach the engine",
    sees="no port, and no named socket",
    then="nothing is answered",
)
def test_engine_answers_its_api_server_alone(guarded: Client) -> None:
    (pid,) = guarded.engine_pids()
    connections = psutil.Process(pid).net_connections("all")
    assert {(one.family, one.laddr) for one in connections} == {(socket.AF_UNIX, "")}


@pytest.mark.fault(
    "endpoint",
    "idle engine stopped (SIGSTOP)",
    sees="nothing",
    then="it continues within 5 s",
)
def test_an_engine_that_was_stopped_goes_on_within_five_seconds(guarded: Client) -> None:
    (pid,) = guarded.engine_pids()
    with stopped(pid) as engine:
        wait_until(lambda: engine.status() != psutil.STATUS_STOPPED, PROMISED_SECONDS)
        assert guarded.complete(max_tokens=1).status_code == 200
    assert guarded.engine_pids() == [pid]
