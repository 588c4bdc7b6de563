"""Another server with OpenAI's routes as the engine: here, a second endpoint of this project."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from artifacts.errors import UserError
from artifacts.model import read_tokenizer
from serving import endpoint as process
from serving.engine.program import choose_engine
from serving.engine.protocol import Chunk
from serving.engine.served_model import ServedTokenizer
from serving.settings import OpenAIEngine
from tests.serving.conftest import (
    SETTINGS,
    Client,
    asking,
    generate_request,
    pieces_of,
    served,
    start,
)
from tests.serving.test_comparison import desired, judge, version_that_serves
from tests.stand_ins.http_server import Answer, json_answer, start_http_server
from tests.stand_ins.processes import free_port
from tests.tiny import change_config
from tests.waiting import wait_until

KEY = "a key that is told to nobody"


def serving(model: str) -> tuple[str, ...]:
    """The command of another endpoint of this project, as the serve image begins it."""
    variables = (f"AIP_STORAGE_URI={model}", "AIP_HTTP_PORT={port}", "HOST=127.0.0.1")
    return ("env", *variables, sys.executable, "-m", "serving.vertex.container")


BY_COMMAND = OpenAIEngine(command=serving("{model}"), model="default")
WITHOUT_ECHO = (sys.executable, "-m", "tests.stand_ins.openai_without_echo", "{port}")
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 6},
    {"max_tokens": 3, "echo": True},
    {"max_tokens": 0, "echo": True, "logprobs": 0},
    {"max_tokens": 20, "stop": ["l"]},
    {"max_tokens": 6, "temperature": 1.0, "seed": 7, "n": 2},
    {"max_tokens": 6, "prompt": [5, 6, 7], "ignore_eos": True},
]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Client]:
    """The other server, which asks for a key."""
    folder = tmp_path_factory.mktemp("outside")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINE_KEY", KEY)
        limits = {"max_new_tokens": 100, "max_prompt_tokens": 100}
        with served(folder, tiny_model_folder, token_variable="ENGINE_KEY", **limits) as server:
            server.http.headers["Authorization"] = f"Bearer {KEY}"
            yield server


def at(server: Client, **changes: Any) -> OpenAIEngine:
    given = {"address": f"{server.url}/v1", "model": "default", "key_variable": "ENGINE_KEY"}
    return OpenAIEngine(**given | changes)


@pytest.fixture(scope="module")
def through(
    outside: Client, tmp_path_factory: pytest.TempPathFactory, chat_model_folder: Path
) -> Iterator[Client]:
    """An endpoint whose engine is the other server."""
    folder = tmp_path_factory.mktemp("through")
    with served(folder, chat_model_folder, engine=at(outside)) as client:
        yield client


def choices(client: Client, asked: dict[str, Any]) -> tuple[Any, Any]:
    answer = client.http.post("/v1/completions", json={"prompt": "The valve", **asked})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"], answer.json()["usage"]


@pytest.mark.parametrize("asked", ASKED, ids=[" ".join(asked) for asked in ASKED])
def test_answers_are_those_of_an_engine_of_ones_own(
    through: Client, client: Client, asked: dict[str, Any]
) -> None:
    assert choices(through, asked) == choices(client, asked)


def test_log_probabilities_of_prompt_and_answer_pass_through(
    through: Client, client: Client
) -> None:
    asked = {"max_tokens": 4, "echo": True, "logprobs": 2}
    (one,), (other,) = choices(through, asked)[0], choices(client, asked)[0]
    for key in ("tokens", "text_offset"):
        assert one["logprobs"][key] == other["logprobs"][key]
    for key in ("token_logprobs", "top_logprobs"):
        assert one["logprobs"][key][0] is None
        for mine, own in zip(one["logprobs"][key][1:], other["logprobs"][key][1:], strict=True):
            assert mine == pytest.approx(own, abs=1e-4)


def test_a_stream_counts_its_tokens_and_a_chat_has_the_versions_own_template(
    through: Client,
) -> None:
    turns = [{"role": "user", "content": "The valve"}]
    options = {"include_usage": True}
    pieces = through.stream(
        "/v1/chat/completions", messages=turns, max_tokens=8, stream_options=options
    )
    text = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces[:-1])
    raw, usage = choices(through, {"prompt": "<user>The valve<assistant>", "max_tokens": 8})
    assert text == raw[0]["text"] and len(pieces) > 3
    assert pieces[-1]["usage"]["completion_tokens"] == usage["completion_tokens"] == 8


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_characters_that_end_a_line_elsewhere_pass_through(
    tiny_model_folder: Path, conversions: Path, character: str
) -> None:
    """Of a server that writes them as they are, as JSON allows."""

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if not json.loads(body).get("stream"):
            return json_answer(200, {"choices": [{"text": "a", "finish_reason": "length"}]})
        written = [("one", None), (character, None), ("two", "length")]
        choices = [{"index": 0, "text": text, "finish_reason": end} for text, end in written]
        lines = [json.dumps({"choices": [choice]}, ensure_ascii=False) for choice in choices]
        events = "".join(f"data: {line}\r\n\r\n" for line in [*lines, "[DONE]"])
        return 200, [("content-type", "text/event-stream")], events.encode()

    server = start_http_server(answer)
    engine = OpenAIEngine(address=f"{server.url}/v1", model="default")
    model = asking(tiny_model_folder, engine, conversions)

    async def told() -> list[Chunk]:
        request = generate_request(prompt="The valve", stream=True)
        return [chunk async for chunk in model.generate(request, model.encode(request))]

    chunks = asyncio.run(told())
    assert "".join(chunk.text for chunk in chunks) == f"one{character}two"
    assert not [chunk.error for chunk in chunks if chunk.error]


def test_what_the_engine_refuses_is_told_in_its_words(through: Client, outside: Client) -> None:
    answer = through.complete(max_tokens=120)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"The engine at {outside.url}/v1 refuses: max_tokens is 120" in message


def test_its_tokens_are_those_of_transformers_which_is_not_in_memory(
    through: Client, outside: Client, chat_model_folder: Path, conversions: Path
) -> None:
    (pid,) = through.engine_pids()
    mapped = {Path(one.path).name for one in psutil.Process(pid).memory_maps()}
    assert any(name.startswith("tokenizers") for name in mapped)
    assert not any(name.startswith("libtorch") for name in mapped)
    settings = SETTINGS.model_copy(update={"engine": at(outside)})
    choice = choose_engine(chat_model_folder, settings, conversions)
    assert choice.converted is not None
    own, whole = ServedTokenizer.read(choice.converted), read_tokenizer(chat_model_folder)
    for text in ("The valve <|endoftext|> opens.", " \n水\u2028\U0001f600", ""):
        assert own.encode(text) == whole.encode(text)
        assert own.decode(own.encode(text)) == whole.decode(whole.encode(text))
    assert own.chat["chat_template"] == whole.chat_template


def test_a_tokenizer_that_changes_is_read_again_and_refused_if_it_is_damaged(
    outside: Client, tmp_path: Path, chat_model_folder: Path
) -> None:
    folder = change_config(chat_model_folder, tmp_path / "model")
    settings = SETTINGS.model_copy(update={"engine": at(outside)})
    before = choose_engine(folder, settings, tmp_path).converted
    assert choose_engine(folder, settings, tmp_path).converted == before
    (folder / "chat_template.jinja").write_text("another")
    after = choose_engine(folder, settings, tmp_path).converted
    assert after is not None and ServedTokenizer.read(after).chat["chat_template"] == "another"
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(UserError, match=rf"The tokenizer in {folder} cannot be read"):
        choose_engine(folder, settings, tmp_path)


def test_its_key_is_in_no_file_and_no_command_line(through: Client) -> None:
    written = [path for path in through.state_folder.rglob("*") if path.is_file()]
    assert written and not any(KEY.encode() in path.read_bytes() for path in written)
    (pid,) = through.engine_pids()
    assert KEY not in " ".join(psutil.Process(pid).cmdline())


def test_a_client_that_leaves_ends_the_work_of_the_other_server(
    through: Client, outside: Client
) -> None:
    body = {"prompt": "The valve", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with through.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: outside.metric("serving_requests_in_flight") == 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_variable": None}, r"refuses: A valid bearer token is required\."),
        ({"key_variable": "NOT_SET"}, "`endpoint.engine.key_variable` names NOT_SET, which is not"),
        ({"key_variable": "NO_HEADER"}, "NO_HEADER, which is not set or holds no key. Put the"),
        # As a file that was read into the variable has it.
        (
            {"key_variable": "WITH_BREAK", "model": "{model}"},
            "refuses: There is no model '/.*' here",
        ),
        ({"address": "http://127.0.0.1:9/v1"}, "The engine at http://127.0.0.1:9/v1 does not ans"),
        (
            {"address": "http://127.0.0.1:{port}/v1", "command": ("no-such", "{port}")},
            "ended with exit code 1",
        ),
    ],
)
def test_engine_that_is_not_there_or_refuses_is_told_before_it_serves(
    outside: Client,
    tmp_path: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setenv("NO_HEADER", f"{KEY}\n{KEY}")
    monkeypatch.setenv("WITH_BREAK", f"{KEY}\n")
    with pytest.raises(UserError, match=message) as refused:
        asking(tiny_model_folder, at(outside, **changes), tmp_path)
    assert KEY not in str(refused.value)


@pytest.mark.fault(
    "endpoint",
    "another server as the engine, which stops",
    sees="503 with the engine's address",
    then="it serves again once that server does",
)
def test_engine_that_is_down_is_503_and_named(tmp_path: Path, tiny_model_folder: Path) -> None:
    port = free_port()
    server = start(tmp_path / "outside", tiny_model_folder, port=port)
    engine = at(server, key_variable=None)
    with served(tmp_path / "through", tiny_model_folder, engine=engine) as through:
        process.stop(server.state_folder)
        answer = through.complete(max_tokens=2)
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert f"The engine at {server.url}/v1 does not answer" in answer.text
        with served(tmp_path / "outside", tiny_model_folder, port=port):
            answer = through.complete(max_tokens=2)
            assert answer.status_code == 200, answer.text


def server_of(client: Client) -> psutil.Process:
    """The server that an engine's command has started."""
    (pid,) = client.engine_pids()
    (found,) = psutil.Process(pid).children()
    return found


@pytest.mark.soak
@pytest.mark.fault(
    "endpoint",
    "another server as the engine, killed during an answer",
    sees="a pause",
    then="the server is restarted, and the stream is completed",
)
def test_server_killed_in_the_middle_of_an_answer_is_started_again(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """Of some hundred tokens, so that it dies long before the last one is written."""
    folder = change_config(tiny_model_folder, tmp_path / "model", max_position_embeddings=1_024)
    limits = {"max_new_tokens": 500, "request_timeout": 240.0}
    body = {"prompt": "The valve", "max_tokens": 500, "ignore_eos": True}
    with served(tmp_path, folder, engine=BY_COMMAND, **limits) as through:
        through.http.timeout = 240
        whole = through.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        text, tokens, killed = "", 0, server_of(through)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with through.http.stream("POST", "/v1/completions", json=body) as answer:
            for piece in pieces_of(answer):
                if not text:
                    killed.kill()
                text += "".join(choice["text"] for choice in piece["choices"])
                tokens = (piece.get("usage") or {}).get("completion_tokens", tokens)
        # Of nearly equal tokens another may win once the rest is computed in other batches, but
        # where the answer goes on, none is missing and none comes twice.
        assert tokens == 500 and text[:1_000] == whole[:1_000]
        wait_until(lambda: through.complete(max_tokens=1).status_code == 200)
        again = server_of(through)
        assert again.pid != killed.pid
    wait_until(lambda: not again.is_running())


def test_server_that_cannot_be_compared_serves_where_a_setting_accepts_that(
    tmp_path: Path, tiny_model_folder: Path, conversions: Path
) -> None:
    model, engine = tiny_model_folder, OpenAIEngine(command=WITHOUT_ECHO)
    judged = judge(model)
    message = r"nothing shows that its engine serves what was judged: .*Only no echo.*unchecked"
    try:
        with pytest.raises(UserError, match=message):
            process.start(tmp_path, desired(model, judged, conversions, engine=engine))
        accepted = engine.model_copy(update={"unchecked": True})
        endpoint = process.start(tmp_path, desired(model, judged, conversions, engine=accepted))
        assert endpoint.route.comparison is None and version_that_serves(endpoint) == "2"
        answer = Client(endpoint, tmp_path).complete(max_tokens=1, echo=True, logprobs=1)
        assert answer.status_code == 400 and "Only no echo" in answer.text
    finally:
        process.stop(tmp_path)
