"""What a running endpoint answers."""

import json
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from serving.journal import find_entries, is_answer
from tests.serving.conftest import Client
from tests.waiting import wait_until


def test_openvino_serves_without_torch_in_memory(client: Client) -> None:
    (pid,) = client.engine_pids()
    loaded = {Path(mapped.path).name for mapped in psutil.Process(pid).memory_maps()}
    assert any(name.startswith("libopenvino_genai") for name in loaded)
    assert not any(name.startswith("libtorch") for name in loaded)


def test_idle_engine_keeps_no_page_of_the_file_of_its_weights(client: Client) -> None:
    client.complete().raise_for_status()
    (pid,) = client.engine_pids()

    def kept_bytes() -> list[int]:
        mapped = psutil.Process(pid).memory_maps()
        return [one.rss for one in mapped if one.path.endswith("openvino_model.bin")]

    # Given back when the answer is out; that the file is mapped shows that it is looked for.
    assert len(kept_bytes()) == 1
    wait_until(lambda: kept_bytes() == [0], told=lambda: f"bytes kept: {kept_bytes()}")


def test_health_names_the_version_that_serves(client: Client) -> None:
    answer = client.http.get("/health")
    assert answer.status_code == 200
    assert answer.json()["versions"] == [
        {"version": "1", "fingerprint": "fingerprint-1", "share": 1.0, "ready": True}
    ]


def test_completion_continues_raw_text_as_the_model_itself_does(
    client: Client, tiny_model_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    prompt = tokenizer("The valve opens", return_tensors="pt")
    (written,) = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = client.complete("The valve opens", max_tokens=12)
    assert answer.status_code == 200
    expected = tokenizer.decode(written[len(prompt["input_ids"][0]) :], skip_special_tokens=True)
    assert answer.json()["choices"][0]["text"] == expected
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert answer.headers["x-model-version"] == "1"
    assert answer.headers["x-model-fingerprint"] == "fingerprint-1"


def test_stream_adds_up_to_the_whole_answer(client: Client) -> None:
    whole = client.complete(max_tokens=16).json()["choices"][0]["text"]
    streamed = client.stream(prompt="The valve", max_tokens=16)
    pieces = [piece["choices"][0] for piece in streamed]
    assert "".join(piece["text"] for piece in pieces) == whole
    assert pieces[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The valve", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "The valve", "max_tokens": 2, "stream": True}),
        ("/predict", {"instances": ["The valve"], "parameters": {"max_tokens": 2}}),
    ],
)
def test_every_answer_names_its_model_and_request(
    client: Client, path: str, body: dict[str, object]
) -> None:
    name = ""
    for _ in range(2):
        before = name
        answered = client.http.post(path, json=body, headers={"X-Request-Id": "mine"})
        headers = answered.headers
        assert headers["x-model-version"] == "1"
        assert headers["x-model-fingerprint"] == "fingerprint-1"
        name = headers["x-request-id"]
        assert name.startswith("mine-") and len(name) == len("mine-") + 12
        assert name != before, "a client may give two requests one name"
    # The end of a stream is sent before its record is written.
    wait_until(lambda: find_entries(client.state_folder, name, days=1))
    (kept,) = find_entries(client.state_folder, name, days=1)
    assert kept.version == "1"
    if not body.get("stream"):
        content = answered.json()
        said = content["predictions"][0] if path == "/predict" else content["choices"][0]["text"]
        assert path == "/predict" or content["id"] == f"cmpl-{name}"
        assert is_answer(client.state_folder, kept, said)
        assert kept.answer == said, "by default texts are kept"


def test_refusal_names_its_request(client: Client) -> None:
    refused = client.complete(temperature=-1)
    assert refused.status_code == 400 and len(refused.headers["x-request-id"]) == 32


def test_instances_and_prompts_of_a_list_are_answered_in_order(client: Client) -> None:
    prompts = ["The valve", "A pump", "No motor"]
    alone = [client.complete(p, max_tokens=8).json()["choices"][0]["text"] for p in prompts]
    body = {"instances": prompts, "parameters": {"max_tokens": 8}}
    assert client.http.post("/predict", json=body).json() == {"predictions": alone}
    own = {"instances": [{"prompt": "A pump", "max_tokens": 8}]}
    assert client.http.post("/predict", json=own).json() == {"predictions": [alone[1]]}
    answer = client.http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 8}).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(alone))
    assert answer["usage"]["completion_tokens"] == 24


NEUTRAL = {"n": 1, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}}
NEUTRAL |= {"seed": 7, "user": "me", "stop": None, "echo": False, "logprobs": None}
NEUTRAL |= {"stream_options": None}
"""What OpenAI's clients send."""


def test_fields_at_the_value_that_changes_nothing_are_accepted(client: Client) -> None:
    plain = client.complete(max_tokens=4).json()["choices"]
    assert client.complete(max_tokens=4, **NEUTRAL).json()["choices"] == plain


def test_name_of_the_model_stays_whatever_version_serves(client: Client) -> None:
    listed = client.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["manual", "1"]
    assert all({"id", "object", "created", "owned_by"} == set(model) for model in listed)
    assert client.http.get("/v1/models/1").json() == listed[1]
    assert client.http.get("/v1/models/2").status_code == 404
    for asked, told in ((None, "manual"), ("default", "manual"), ("manual", "manual"), ("1", "1")):
        answer = client.complete(max_tokens=1, model=asked).json()
        assert answer["model"] == told and answer["system_fingerprint"] == "1-fingerprint-1"
    (piece,) = client.stream(prompt="The valve", max_tokens=1)
    assert piece["model"] == "manual"


def test_every_piece_of_a_stream_counts_its_tokens_where_asked(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = client.stream(
        prompt="The valve", max_tokens=5, ignore_eos=True, stream_options=options
    )
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts) and counts[-2:] == [5, 5]
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["prompt_tokens"] > 0


def test_a_seed_draws_the_same_again_and_other_choices_others(client: Client) -> None:
    asked = {"max_tokens": 8, "temperature": 1.5, "n": 2}
    first, again, other = (
        [choice["text"] for choice in client.complete(**asked, seed=seed).json()["choices"]]
        for seed in (7, 7, 70)
    )
    assert first == again != other
    assert first[0] != first[1]


def test_every_request_has_its_own_temperature(client: Client) -> None:
    hot = [client.complete(max_tokens=12, temperature=1.5).json()["choices"][0]["text"]] + [
        client.complete(max_tokens=12, temperature=1.5, top_p=0.9).json()["choices"][0]["text"]
        for _ in range(3)
    ]
    cold = {client.complete(max_tokens=12).json()["choices"][0]["text"] for _ in range(3)}
    assert len(set(hot)) > 1
    assert len(cold) == 1


@pytest.mark.parametrize("least", [{"temperature": 1e-300}, {"temperature": 1.0, "top_p": 1e-300}])
def test_numbers_that_are_nothing_in_32_bits_take_the_likeliest_token(
    client: Client, least: dict[str, float]
) -> None:
    likeliest = client.complete(max_tokens=4).json()["choices"][0]["text"]
    assert client.complete(max_tokens=4, **least).json()["choices"][0]["text"] == likeliest


def test_text_ends_before_the_stop_string_that_is_complete_first(client: Client) -> None:
    """Also where a token completes another one, too, that begins before it."""
    whole = client.complete(max_tokens=24).json()["choices"][0]["text"]
    for start in range(1, len(whole) - 3):
        shorter, longer = whole[start : start + 2], whole[start - 1 : start + 3]
        if whole.index(shorter) == start:
            answer = client.complete(max_tokens=24, stop=[longer, shorter]).json()["choices"][0]
            assert answer["text"] == whole[:start] and answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"prompt": ""}', 400, "empty"),
        (b'{"prompt": "a", "max_tokens": 10000}', 400, "at most 150"),
        (b'{"prompt": "a", "model": "gpt-4"}', 404, "gpt-4"),
        (json.dumps({"prompt": "valve " * 200}).encode(), 400, "at most"),
        (json.dumps({"prompt": "x" * 1_000_000}).encode(), 413, "larger"),
        (b'\xff\xfe{"prompt": "a"}', 400, "not JSON"),
        (b'{"instances": ["a", ""]}', 400, "empty"),
        (b'{"instances": ["a"], "parameters": {"max_tokens": 10000}}', 400, "at most 150"),
        (b'{"instances": ["a"], "parameters": {"speed": 2}}', 400, "speed"),
    ],
)
def test_bad_request_is_refused_with_its_reason(
    client: Client, body: bytes, status: int, names: str
) -> None:
    path = "/predict" if b"instances" in body else "/v1/completions"
    answer = client.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert names in answer.json()["error"]["message"]
    assert client.complete(max_tokens=1).status_code == 200


def test_a_method_that_a_route_does_not_have_is_answered_with_those_it_has(client: Client) -> None:
    answer = client.http.get("/v1/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/load_model", "/generate", "/docs", "/v1/completions/"])
def test_no_other_route_is_reachable(client: Client, path: str) -> None:
    assert client.http.post(path, json={}).status_code == 404
    assert client.http.get(path).status_code == 404
