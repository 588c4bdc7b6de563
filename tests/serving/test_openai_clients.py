"""What OpenAI's clients send, and what they need back."""

from tests.serving.conftest import Client

NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "seed": 7,
    "user": "me",
    "stop": None,
    "echo": False,
    "logprobs": None,
    "stream_options": None,
}


def test_name_of_the_model_stays_whatever_version_serves(client: Client) -> None:
    listed = client.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["default", "1"]
    assert all({"id", "object", "created", "owned_by"} == set(model) for model in listed)
    assert client.http.get("/v1/models/1").json() == listed[1]
    assert client.http.get("/v1/models/2").status_code == 404
    answer = client.complete(max_tokens=1, model="1").json()
    assert answer["model"] == "1" and answer["system_fingerprint"] == "1-fingerprint-1"


def test_fields_at_the_value_that_changes_nothing_are_accepted(client: Client) -> None:
    plain = client.complete(max_tokens=4).json()["choices"]
    assert client.complete(max_tokens=4, **NEUTRAL).json()["choices"] == plain


def test_prompts_of_a_list_are_answered_in_order(client: Client) -> None:
    prompts = ["The valve", "A pump"]
    alone = [client.complete(p, max_tokens=5).json()["choices"][0]["text"] for p in prompts]
    answer = client.http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 5}).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(alone))
    assert answer["usage"]["completion_tokens"] == 10


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
