"""Every recipe through the whole graph, as a user runs it, to an answer of the endpoint."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.tpu.device import TPU_VARIABLE
from tests.conftest import Project, make_project
from tests.llm_assets.test_interruption import steps_done, training_workers
from tests.tiny_tasks import TASKS, Task
from tests.waiting import wait_until

CHAT = {"messages": [{"role": "user", "content": "What of a pump?"}]}
TEXT = {"prompt": "The valve", "max_tokens": 4}
SUMMARY = {"instances": ["3. The valve opens every week."]}
REQUESTS: dict[str, dict[str, Any]] = {
    "fine_tuning": CHAT,
    "preferences": CHAT,
    "exact_match": CHAT,
    "lora": CHAT,
    "dora": CHAT,
    "zero_fine_tuning": CHAT,
    "sequence_to_sequence": SUMMARY,
    "t5_summaries": SUMMARY,
    "zero_sequence_to_sequence": SUMMARY,
    "qlora": TEXT,
    "instructions": TEXT,
    "torchtune": TEXT,
    "gpt2_from_scratch": TEXT,
    "llama_continued": TEXT,
    **dict.fromkeys(("opt_supervised", "llama_supervised", "llama_gsm8k"), TEXT),
    **dict.fromkeys(("llama_alpaca", "llama_wikipedia"), TEXT),
    "roberta_classified": {"instances": ["motor is broken, report 9."]},
    "roberta_masked": {"instances": ["The valve<mask> every week."]},
    "classification": {"instances": ["motor is broken, report 9."]},
    "masked_language_modeling": {"instances": ["The valve<mask> every week."]},
}
MATERIALIZE = ("dagster", "asset", "materialize", "--select", "*endpoint")
GRAPH_SECONDS = 1800
UNPROMOTED = ("llama_gsm8k",)
"""Adapters give a tiny random model no exact answer; there a person approves."""


@pytest.mark.soak
@pytest.mark.parametrize("name", TASKS)
def test_a_killed_training_fails_its_asset_and_the_next_run_ends_at_an_answer(
    name: str, tmp_path: Path
) -> None:
    go_to_an_answer(TASKS[name], name, tmp_path)


@pytest.mark.soak
def test_a_killed_training_on_a_tpu_goes_on_to_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TPU_VARIABLE, "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    name = "classification"
    on_chips = {"device": "tpu", "device_batch_size": 8}
    task = TASKS[name].changed(placement=on_chips, precision="float32")
    output = go_to_an_answer(task, name, tmp_path)
    assert "2 chips" in output


def go_to_an_answer(task: Task, name: str, folder: Path) -> str:
    """Run the graph of a task, its training killed once; returns what the second run printed."""
    project = make_project(folder / "project", folder / "unused", documents=1)
    settings = task.settings(project.folder)
    if settings["checkpoint"]["recipe"] == "torchtune":
        # In the place of a test project's own, which is part of torchtune's configuration.
        settings["checkpoint"]["optimizer"] = {}
    # Tiny random models forget English by whatever they learn.
    project.configure(**settings, model_version={"gate": {"general_tolerance": 100.0}})
    try:
        kill_training(project)
        printed = project.run_well(*MATERIALIZE, timeout=GRAPH_SECONDS)
        assert "Going on from the checkpoint of step" in printed
        judged = project.current("model_version")
        assert judged.stats["promoted"] != (name in UNPROMOTED), judged.stats["reasons"]
        if name in UNPROMOTED:
            word = ("--name", "Bo", "--reason", "a toy")
            project.run_well("llm-assets", "approve", "1", *word)
            project.run_well(*MATERIALIZE[:-1], "endpoint")
        check_answer(name, ask(project, REQUESTS[name]))
        return printed
    finally:
        project.run("llm-assets", "stop")


def kill_training(project: Project) -> None:
    """Run the graph until its training has saved something, and kill -9 all processes of that."""
    project.configure(training={"restarts": 0})
    running = project.fork(*MATERIALIZE)
    wait_until(lambda: steps_done(project) >= 6 or running.poll() is not None, GRAPH_SECONDS)
    said = project.folder / "output.txt"
    assert running.poll() is None, said.read_text()[-4000:]
    for worker in training_workers(running):
        os.kill(worker.pid, signal.SIGKILL)
    assert running.wait(GRAPH_SECONDS) != 0, said.read_text()[-4000:]
    assert "killed by signal 9" in said.read_text() or "SIGKILL" in said.read_text()
    assert project.record.find_current("checkpoint") is None


def ask(project: Project, body: dict[str, Any]) -> Any:
    status = project.run("llm-assets", "status").stdout
    url = next(word.strip(",") for word in status.split() if word.startswith("http://"))
    routes = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
    route = next((routes[key] for key in routes if key in body), "/predict")
    answer = httpx.post(f"{url}{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_answer(name: str, answer: Any) -> None:
    if name in ("classification", "roberta_classified"):
        assert answer["predictions"][0]["label"] == "electrician"
        assert sum(answer["predictions"][0]["scores"].values()) == pytest.approx(1, abs=0.01)
    elif name in ("masked_language_modeling", "roberta_masked"):
        found = answer["predictions"][0]
        assert found["label"] in found["scores"] and sum(found["scores"].values()) <= 1.01
    elif REQUESTS[name] is SUMMARY:
        assert isinstance(answer["predictions"][0], str)
    elif REQUESTS[name] is TEXT:
        assert isinstance(answer["choices"][0]["text"], str)
    else:
        assert answer["choices"][0]["message"]["role"] == "assistant"
