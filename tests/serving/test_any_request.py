"""Whatever a client sends, the answer is OpenAI's, and no failure of ours."""

import json
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.requests import Request

from serving.api.app import check_origin
from serving.api.requests import ChatRequest, CompletionRequest, PredictRequest, parse
from serving.errors import ServingError
from serving.settings import EndpointSettings
from tests.serving.conftest import Client
from tests.test_any_bytes import JSON
from tests.tiny import END_OF_TEXT

ROUTES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/predict": PredictRequest,
}
JSON_HEADERS = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "a"}
MOST_SECONDS = 10
"""Until any answer."""
HALF_PLANE = 0x8000
"""Characters of which one request holds all: 128 KB at most."""


def characters(start: int, count: int) -> str:
    """So many characters in a row, but for halves of surrogate pairs, which are none."""
    numbers = range(start, min(start + count, 0x110000))
    return "".join(chr(number) for number in numbers if not 0xD800 <= number < 0xE000)


ANYWHERE = st.integers(0, 0x10FFFF)
TEXT = (
    st.text(max_size=12)
    | st.builds(characters, ANYWHERE, st.integers(1, HALF_PLANE))
    | st.builds(lambda text, times: text * times, st.text(max_size=3), st.integers(1, 8_000))
    | st.builds(lambda times: END_OF_TEXT * times, st.integers(1, 8_000))
)
"""Short ones, all characters of a stretch of Unicode, the same again and again."""
TOKENS = st.integers(1, 3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", ""]), "content": TEXT}
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": TEXT | st.lists(TEXT, max_size=3),
    "messages": st.lists(MESSAGE, max_size=3),
    "instances": st.lists(TEXT | st.fixed_dictionaries({"prompt": TEXT}), max_size=3),
    "parameters": st.dictionaries(st.sampled_from(["max_tokens", "temperature", "x"]), TOKENS),
    "n": TOKENS,
    "max_tokens": TOKENS,
    "max_completion_tokens": TOKENS,
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "stream": st.booleans(),
    "stop": st.lists(TEXT, max_size=5),
}
"""Values that a field may well have; any other JSON comes, too."""
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            *("Origin", "Accept", "Authorization", "Content-Encoding", "Expect", "X-Request-Id"),
            *("Access-Control-Request-Method", "X-HTTP-Method-Override", "Range", "Upgrade"),
        ]
    ),
    st.sampled_from(["*", "null", "gzip", "GET", "bytes=0-1", "websocket", "http://a.example"])
    | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
    max_size=2,
)


@st.composite
def bodies(draw: st.DrawFn, kind: type[BaseModel]) -> bytes:
    """Bodies that nearly are requests, any JSON, any bytes."""
    way = draw(st.sampled_from(["fields", "fields", "fields", "json", "bytes"]))
    if way == "bytes":
        return draw(st.binary(max_size=80))
    if way == "json":
        return json.dumps(draw(JSON)).encode()
    given = {"max_tokens": draw(TOKENS)} if "max_tokens" in kind.model_fields else {}
    names = st.sampled_from(sorted({*kind.model_fields, "unknown"}))
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    for name in [*required, *draw(st.lists(names, max_size=4))]:
        likely = LIKELY.get(name, JSON)
        given[name] = draw(likely if draw(st.integers(0, 3)) else JSON)
    return json.dumps(given).encode()


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    path = draw(st.sampled_from(sorted(ROUTES)))
    headers = JSON_HEADERS | draw(HEADERS)
    request = {"method": "POST", "url": path, "content": draw(bodies(ROUTES[path]))}
    if draw(st.integers(0, 4)) == 0:
        request["method"] = draw(
            st.sampled_from(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "PROPFIND"])
        )
        other = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
        request["url"] = draw(
            st.sampled_from([path, "/health", "/metrics", "/v1/models", "/v1/models/x", "/"])
            | other.map(lambda text: "/" + text.replace("/", "%2F"))
        )
    return request | {"headers": headers}


@pytest.fixture(scope="module")
def chatting(chat: Client) -> Client:
    """A client that is not patient."""
    client = Client(chat.endpoint, chat.state_folder)
    client.http.timeout = MOST_SECONDS
    return client


def check(client: Client, request: dict[str, Any]) -> None:
    answer = client.http.request(**request)
    assert answer.status_code < 500, answer.text
    if answer.status_code < 400 or request["method"] == "HEAD":
        return
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and error["code"]


MARK = pytest.mark.fault(
    "endpoint",
    "any request",
    sees="an answer, or an error in OpenAI's shape with the reason",
    then="never an internal server error, and none takes longer than 10 s",
)


@MARK
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@example(request={"method": "GET", "url": "/", "content": b"", "headers": {"Range": "*"}})
@given(request=requests())
def test_any_request_is_answered_or_refused_in_openais_shape(
    chatting: Client, request: dict[str, Any]
) -> None:
    check(chatting, request)


@pytest.mark.fault(
    "endpoint",
    "prompt with every character of half a Unicode plane, private-use ones included",
    sees="400 with its length in tokens, and the limit",
    then="refused within the client's 10 s",
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("start", range(0, 0x110000, HALF_PLANE), ids=hex)
def test_every_character_there_is_can_be_sent(chatting: Client, path: str, start: int) -> None:
    text = characters(start, HALF_PLANE) + END_OF_TEXT
    asked = (
        {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    )
    content = json.dumps(asked, ensure_ascii=False).encode()
    answer = chatting.http.post(path, content=content, headers=JSON_HEADERS)
    assert answer.status_code == 400
    assert "tokens; at most" in answer.json()["error"]["message"]


@pytest.mark.soak
@settings(max_examples=10_000, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_ten_thousand_requests_are_answered_or_refused_in_openais_shape(
    chatting: Client, request: dict[str, Any]
) -> None:
    check(chatting, request)


@pytest.mark.parametrize(
    ("origin", "method"), [("https://evil.example", "POST"), ("", "POST"), ("own", "DELETE")]
)
def test_a_preflight_that_is_not_allowed_is_refused_in_openais_shape(
    client: Client, origin: str, method: str
) -> None:
    headers = {"Origin": client.url if origin == "own" else origin}
    headers |= {"Access-Control-Request-Method": method}
    answer = httpx.options(f"{client.url}/v1/completions", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden_origin"


FAULTS: dict[type[BaseModel], list[tuple[Any, str]]] = {
    CompletionRequest: [
        ([], "body: must be an object."),
        ({}, "prompt: is required."),
        ({"prompt": None}, "prompt: is required."),
        ({"prompt": 3}, "prompt: must be a valid string."),
        ({"prompt": {}}, "prompt: must be a valid string."),
        ({"prompt": []}, "prompt: must not be empty."),
        ({"prompt": [[]]}, "prompt.0: must not be empty."),
        ({"prompt": ["a"] * 33}, "prompt: at most 32 are allowed, and 33 were sent."),
        ({"prompt": [[1]] * 33}, "prompt: at most 32 are allowed, and 33 were sent."),
        ({"prompt": ["a", 1]}, "prompt.1: must be a valid string."),
        ({"prompt": [1, "a"]}, "prompt.1: must be a valid integer."),
        ({"prompt": [[1], "a"]}, "prompt.1: must be an array."),
        ({"prompt": [["a"]]}, "prompt.0.0: must be a valid integer."),
        ({"prompt": "a", "stop": [""]}, "stop.0: must not be empty."),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop: at most 4 are allowed, and 5 were sent."),
        ({"prompt": "a", "stop": ""}, "stop: must not be empty."),
        ({"prompt": "a", "stop": "x" * 257}, "stop: must have at most 256 characters."),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens: must be a valid integer."),
        ({"prompt": "a", "n": 9}, "n: must be less than or equal to 8."),
        ({"prompt": "a", "seed": 2**70}, f"seed: must be less than {2**63}."),
        ({"prompt": "a", "temperature": float("nan")}, "temperature: must be a finite number."),
        ({"prompt": "a", "logprobs": -1}, "logprobs: must be greater than or equal to 0."),
        ({"prompt": "a", "temperature": -1}, "temperature: must be greater than or equal to 0."),
        ({"prompt": "a", "top_p": 0}, "top_p: must be greater than 0."),
        ({"prompt": "a", "logprobs": 6}, "logprobs: must be less than or equal to 5."),
        ({"prompt": ["a", "b"], "stream": True}, "A stream takes one prompt."),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens may be 0 only with echo."),
    ],
    ChatRequest: [
        ({"messages": [USER | {"content": None}]}, "messages.0.content: is required."),
        ({"messages": [USER | {"content": 3}]}, "messages.0.content: must be a valid string."),
        ({"messages": [USER | {"content": ["a"]}]}, "messages.0.content.0: must be an object."),
        (
            {"messages": [USER | {"role": "king"}]},
            "messages.0.role: must be 'system', 'developer', 'user' or 'assistant'.",
        ),
        ({"messages": []}, "messages: must not be empty."),
        ({"messages": {}}, "messages: must be an array."),
        ({"messages": [USER], "top_logprobs": 1}, "top_logprobs requires logprobs."),
    ],
    PredictRequest: [
        ({"instances": []}, "instances: must not be empty."),
        ({"instances": ["a"] * 33}, "instances: at most 32 are allowed, and 33 were sent."),
        ({"instances": [{"prompt": None}]}, "instances.0.prompt: is required."),
    ],
}


@pytest.mark.parametrize(
    ("kind", "body", "told"), [(kind, *fault) for kind in FAULTS for fault in FAULTS[kind]]
)
def test_a_fault_is_told_once_and_in_words_of_json(
    kind: type[BaseModel], body: Any, told: str
) -> None:
    with pytest.raises(ServingError) as refused:
        parse(kind, body)
    error = refused.value.body["error"]
    assert error["message"] == told
    # Of fields together no one is at fault.
    assert error["param"] == (told.partition(":")[0] if ":" in told else "body")


@pytest.mark.parametrize(
    ("allowed", "host"),
    [
        ("Models.example", "models.example:99"),
        ("models.example:8010", "models.example"),
        ("fd00::1", "[fd00::1]:99"),
        ("[fd00::1]:8010", "[fd00::1]"),
    ],
)
def test_a_host_is_known_by_its_name_whatever_the_port(allowed: str, host: str) -> None:
    settings, scope = EndpointSettings(allowed_hosts=(allowed,)), {"type": "http"}
    check_origin(Request(scope | {"headers": [(b"host", host.encode())]}), settings)
    with pytest.raises(ServingError, match="neither loopback nor in"):
        check_origin(Request(scope | {"headers": [(b"host", b"not-" + host.encode())]}), settings)


@pytest.mark.parametrize(
    ("allowed", "sent"),
    [
        ("https://page.example/", "https://page.example"),
        ("HTTPS://Page.Example", "https://page.example"),
        ("https://page.example:443", "https://page.example"),
        ("http://page.example:80/", "http://page.example"),
        ("http://page.example:8080", "http://page.example:8080"),
        ("https://page.example:80", "https://page.example:80"),
        ("http://[FD00::1]:80", "http://[fd00::1]"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("file://", "file://"),
        ("null", "null"),
    ],
)
def test_an_origin_is_known_however_it_is_written_in_the_settings(allowed: str, sent: str) -> None:
    settings = EndpointSettings(allowed_origins=(allowed,))
    for origin, is_known in ((sent, True), (f"{sent}.evil.example", False)):
        headers = [(b"host", b"localhost"), (b"origin", origin.encode())]
        with nullcontext() if is_known else pytest.raises(ServingError, match="is not in"):
            check_origin(Request({"type": "http", "headers": headers}), settings)


@pytest.mark.parametrize("host", ["fe80::1%br-lan.20", "büro.example", "my_host"])
def test_whatever_a_machine_is_called_by_may_be_listened_on(host: str) -> None:
    assert EndpointSettings(host=host).host == host


@pytest.mark.parametrize("field", ["logit_bias", "prompt", "unknown"])
def test_json_however_deep_is_refused_with_what_is_wrong(client: Client, field: str) -> None:
    """Also as deep as Python just reads it, and then has no stack left to write it."""
    for depth in range(900, 1_000):
        nested = "[" * depth + "]" * depth
        content = f'{{"prompt": "a", "{field}": {nested}}}'
        answer = client.http.post("/v1/completions", content=content, headers=JSON_HEADERS)
        assert answer.status_code == 400 and answer.json()["error"]["message"], depth


def test_a_request_that_says_no_length_fits_an_endpoint_of_short_answers() -> None:
    short = EndpointSettings(max_new_tokens=4)
    (asked,) = parse(CompletionRequest, {"prompt": "The valve"}).generate_requests(short)
    assert asked.max_tokens == 4
    with pytest.raises(ServingError, match="at most 4"):
        body = {"messages": [USER], "max_completion_tokens": 64}
        parse(ChatRequest, body).generate_requests(short)


def test_a_body_of_faults_alone_is_refused_at_once() -> None:
    began = perf_counter()
    with pytest.raises(ServingError):
        parse(CompletionRequest, {"prompt": [1, *["a"] * 60_000]})
    assert perf_counter() - began < MOST_SECONDS
