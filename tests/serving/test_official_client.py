"""The official OpenAI client, unmodified, against an endpoint with a chat model."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serving.conftest import Client


@pytest.fixture
def official(chat: Client) -> OpenAI:
    return OpenAI(base_url=f"{chat.url}/v1", api_key="none", max_retries=0)


def test_completions_with_several_choices_count_the_prompt_once(official: OpenAI) -> None:
    one = official.completions.create(model="default", prompt="The valve", max_tokens=5)
    many = official.completions.create(
        model="default", prompt="The valve", max_tokens=5, n=3, temperature=1.0
    )
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert one.usage and many.usage
    assert many.usage.prompt_tokens == one.usage.prompt_tokens
    assert many.usage.completion_tokens <= 15


def test_chat_takes_parts_roles_and_the_newer_limit(official: OpenAI) -> None:
    answer = official.chat.completions.create(
        model="default",
        messages=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "The valve"}]},
        ],
        max_completion_tokens=4,
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 4


def test_a_streamed_message_has_one_role_and_can_be_sent_again(official: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "The valve"}]
    for _ in range(2):
        with official.chat.completions.stream(
            model="default", messages=asked, max_tokens=6
        ) as stream:
            events = sum(1 for _ in stream)
            message = stream.current_completion_snapshot.choices[0].message
        assert events > 2 and message.role == "assistant" and message.content
        asked += [{"role": message.role, "content": message.content}, asked[0]]


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_chats_tokens_have_their_log_probabilities_and_rivals(
    official: OpenAI, temperature: float
) -> None:
    """Bytes together are the answer, where a character is spread over several tokens."""
    asked: dict[str, Any] = {"model": "default", "max_tokens": 6, "temperature": temperature}
    asked |= {"messages": [{"role": "user", "content": "弁"}], "logprobs": True, "top_logprobs": 3}
    answer = official.chat.completions.create(**asked, seed=1)
    whole = answer.choices[0]
    pieces = list(official.chat.completions.create(**asked, seed=1, stream=True))
    assert whole.logprobs and whole.logprobs.content and answer.usage
    streamed = [
        token
        for piece in pieces
        for choice in piece.choices
        if choice.logprobs
        for token in choice.logprobs.content or ()
    ]
    for tokens in (whole.logprobs.content, streamed):
        assert len(tokens) == answer.usage.completion_tokens
        written = b"".join(bytes(token.bytes or ()) for token in tokens)
        assert whole.message.content in written.decode(errors="ignore")
        for token in tokens:
            assert len(token.top_logprobs) == 3
            assert token.logprob <= token.top_logprobs[0].logprob + 1e-6


def test_places_in_a_stream_go_on_from_piece_to_piece(official: OpenAI) -> None:
    pieces = official.completions.create(
        model="default", prompt="The valve", max_tokens=12, logprobs=1, echo=True, stream=True
    )
    text, tokens, places = "", "", []
    for piece in pieces:
        text += piece.choices[0].text
        if found := piece.choices[0].logprobs:
            for token, place in zip(found.tokens or (), found.text_offset or (), strict=True):
                places.append((place, len(tokens)))
                tokens += token
    assert tokens.startswith(text) and text.startswith("The valve") and len(places) > 12
    assert all(place == expected for place, expected in places)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {}}}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"tools": [{"type": "function"}]}, 'tools: [{"type": "function"}] is not supported'),
        ({"response_format": SCHEMA}, 'response_format: {"type": "json_schema", '),
        ({"response_format": {"type": "json_object"}}, '{"type": "json_object"} is not supported'),
        ({"presence_penalty": 0.5}, "presence_penalty: 0.5 is not supported"),
        ({"logit_bias": {"5": 1}}, 'logit_bias: {"5": 1} is not supported'),
        ({"extra_body": {"speed": 1}}, "speed is not supported"),
        ({"temperature": 3}, "temperature: must be less than or equal to 2"),
    ],
)
def test_refusals_are_in_the_apis_words(official: OpenAI, asked: dict, told: str) -> None:
    turns = [{"role": "user", "content": "The valve"}]
    with pytest.raises(openai.BadRequestError) as refused:
        official.chat.completions.create(model="default", messages=turns, **asked)

    message = refused.value.body["message"]
    assert told in message and "should have" not in message
    if "not supported" in told:
        supported = message.partition("Supported: ")[2]
        assert "messages" in supported and "stop" in supported and "tools" not in supported


def test_root_describes_the_endpoint_and_its_own_page_may_ask(chat: Client) -> None:
    root = chat.http.get("/")
    assert root.headers["content-type"].startswith("text/plain") and "llm-assets board" in root.text
    own = {"origin": chat.url}
    asked = {"prompt": "The valve", "max_tokens": 1}
    assert chat.http.post("/v1/completions", json=asked, headers=own).status_code == 200
    other = {"origin": "http://127.0.0.1:1"}
    assert chat.http.post("/v1/completions", json=asked, headers=other).status_code == 403
