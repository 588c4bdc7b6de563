"""vLLM itself, on a processor, behind the container of Vertex AI and behind a local endpoint.

`python -m tests.serving.test_vllm` writes the table of its architectures into the docs.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from artifacts.errors import UserError
from serving import endpoint as process
from serving.settings import OpenAIEngine
from tests.needs import needs, vllm
from tests.serving import test_architectures as architectures
from tests.serving.conftest import Client, pieces_of
from tests.serving.test_comparison import desired, judge
from tests.serving.test_container import is_healthy, running
from tests.serving.test_soak import check_model_changes
from tests.tiny import tiny_base_model, train_tiny_model
from tests.waiting import wait_until

pytestmark = [pytest.mark.soak, needs("vLLM's program, in VLLM_PROGRAM or the path")]
COMMAND = (vllm() or "vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}")
# In bfloat16 vLLM's workers die by SIGILL on processors whose AMX a virtual machine keeps back.
COMMAND += ("--generation-config", "vllm", "--enforce-eager", "--dtype", "float32")
COMMAND += ("--max-model-len",)
LOAD_SECONDS = 400
LIMITS = {"start_timeout": float(LOAD_SECONDS), "request_timeout": 120.0}
CONTEXT = 256
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


ON_A_PROCESSOR = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
HEAD = "| architecture | vLLM 0.32.0 on a CPU | difference from transformers, nats per token |"


@pytest.fixture(scope="module", autouse=True)
def on_a_processor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ON_A_PROCESSOR.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tiny model, whose heads are as wide as vLLM's kernels for processors take them."""
    folder = tmp_path_factory.mktemp("vllm")
    tiny_base_model(folder / "base", heads=2)
    train_tiny_model(folder / "model", folder / "base", 60)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return folder / "model"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("container") / "log"
    with running(model, log, *COMMAND, "{context}") as (started, client):
        client.timeout = 120
        wait_until(lambda: is_healthy(client) or started.poll() is not None, LOAD_SECONDS)
        assert started.poll() is None, log.read_text()
        yield client
        processes = psutil.Process(started.pid).children(recursive=True)
    wait_until(lambda: not any(one.is_running() for one in processes))


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/answer", json={"prompt": "The valve", "max_tokens": 8} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_predict_raw_predict_and_streams_say_the_same(served: httpx.Client) -> None:
    text = complete(served)["text"]
    asked = {"instances": ["The valve", {"prompt": "The valve", "max_tokens": 8.0}]}
    answer = served.post("/answer", json=asked | {"parameters": {"max_tokens": 8}})
    assert answer.json() == {"predictions": [text, text]}
    assert answer.headers["x-model-version"] == "7"
    body = {"prompt": "The valve", "max_tokens": 8, "stream": True}
    with served.stream("POST", "/answer", json=body) as stream:
        assert text == "".join(piece["choices"][0]["text"] for piece in pieces_of(stream))


def test_a_chat_has_the_models_template(served: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "The valve"}], "max_tokens": 6}
    answer = served.post("/answer", json=chat).json()
    raw = complete(served, prompt="<user>The valve<assistant>", max_tokens=6)
    assert answer["choices"][0]["message"]["content"] == raw["text"]


def test_tokens_of_prompt_and_answer_have_their_log_probabilities(served: httpx.Client) -> None:
    choice = complete(served, echo=True, logprobs=2, max_tokens=3)
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["token_logprobs"][0] is None and all(x <= 0 for x in told["token_logprobs"][1:])
    for token, logprob, top in list(
        zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
    )[-3:]:
        assert top[token] == pytest.approx(logprob) and logprob == pytest.approx(max(top.values()))


def test_what_is_too_long_is_refused(served: httpx.Client) -> None:
    for body in ({"prompt": "The valve " * CONTEXT}, {"max_tokens": CONTEXT}):
        answer = served.post("/answer", json={"prompt": "The valve"} | body)
        assert answer.status_code == 400 and "at most" in answer.json()["error"]["message"]


def test_a_killed_engine_is_started_again_and_the_stream_completed(served: httpx.Client) -> None:
    whole = complete(served, max_tokens=200, ignore_eos=True)["text"]
    body = {"prompt": "The valve", "max_tokens": 200, "ignore_eos": True, "stream": True}
    text = ""
    with served.stream("POST", "/answer", json=body, timeout=LOAD_SECONDS) as stream:
        for piece in pieces_of(stream):
            if not text:
                kill_vllm(os.getpid())
            text += piece["choices"][0]["text"]
    assert text == whole
    wait_until(lambda: is_healthy(served), LOAD_SECONDS)


def kill_vllm(of: int) -> None:
    """Kill the server, which its own workers do not outlive."""
    servers = [
        one
        for one in psutil.Process(of).children(recursive=True)
        if COMMAND[0] in one.cmdline() and "serve" in one.cmdline()
    ]
    assert servers
    servers[-1].kill()


def test_it_serves_what_was_judged(tmp_path: Path, model: Path, conversions: Path) -> None:
    engine = OpenAIEngine(command=(*COMMAND, str(CONTEXT)))
    judged = judge(model)
    try:
        endpoint = process.start(
            tmp_path, desired(model, judged, conversions, engine=engine, **LIMITS)
        )
        found = endpoint.route.comparison
        assert found is not None and found.fits and found.documents == len(judged)
        answer = Client(endpoint, tmp_path).complete(max_tokens=0, echo=True, logprobs=0)
        assert answer.status_code == 200
    finally:
        process.stop(tmp_path)


def test_model_changes_lose_no_request(tmp_path: Path, model: Path) -> None:
    """With a minute for each change: `SOAK_CHANGES=10` makes ten of them."""
    tiny_base_model(tmp_path / "other", heads=2, seed=1)
    engine = OpenAIEngine(command=(*COMMAND, str(CONTEXT)))
    check_model_changes(tmp_path / "endpoint", (model, tmp_path / "other"), engine=engine, **LIMITS)


def row(name: str, scratch: Path, tokenizer: Path) -> str:
    """A line of the table: whether an endpoint with vLLM as its engine serves a tiny random model,
    and how likely it says a text's tokens are."""
    folder, state = scratch / name, scratch / f"{name}.state"
    architectures.write_model(name, folder, tokenizer)
    engine = OpenAIEngine(command=(*COMMAND, str(CONTEXT // 2)))
    try:
        endpoint = process.start(
            state, desired(folder, [], scratch / "conversions", engine=engine, **LIMITS)
        )
        asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
        answer = Client(endpoint, state).complete(architectures.PROMPT, **asked)
    except UserError:
        return f"| {name} | does not start | |"
    finally:
        process.stop(state)
    assert answer.status_code == 200, answer.text
    _, *found = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    plain = architectures.SETTINGS.model_copy(update={"engine": "transformers"})
    expected = architectures.log_probabilities(folder, plain, scratch / "conversions")
    return f"| {name} | runs | {architectures.told(found, expected)} |"


def test_page_says_which_architectures_vllm_runs(tmp_path: Path) -> None:
    assert architectures.table(HEAD, row, tmp_path) in architectures.PAGE.read_text()


if __name__ == "__main__":
    os.environ |= ON_A_PROCESSOR
    sys.exit(architectures.write_table(HEAD, row))
