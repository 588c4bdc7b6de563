"""Every recipe through the whole graph, as a user runs it, to an answer of the endpoint."""

import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Project, make_project
from tests.tiny_tasks import TASKS

REQUESTS: dict[str, dict[str, Any]] = {
    "fine_tuning": {"messages": [{"role": "user", "content": "What of a pump?"}]},
    "sequence_to_sequence": {"instances": ["3. The valve opens every week."]},
    "classification": {"instances": ["motor is broken, report 9."]},
    "preferences": {"messages": [{"role": "user", "content": "7: what of a pump?"}]},
    "distillation": {"prompt": "The valve", "max_tokens": 4},
    "lora": {"messages": [{"role": "user", "content": "What of a pump?"}]},
    "qlora": {"prompt": "The valve", "max_tokens": 4},
    "gpt2_from_scratch": {"prompt": "The valve", "max_tokens": 4},
    "masked_language_modeling": {"instances": ["The valve<mask> every week."]},
}
GRAPH_SECONDS = 900
ZERO = {"workers": 2, "deepspeed": {"stage": 3}}
TORCHTUNE_CONFIG = Path(__file__).parents[1] / "recipes" / "torchtune_1b.yaml"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("recipe", "placement"),
    [*((recipe, {}) for recipe in TASKS), ("sequence_to_sequence", ZERO), ("fine_tuning", ZERO)],
)
def test_the_graph_runs_to_an_endpoint_that_answers(
    recipe: str, placement: dict[str, Any], tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project", tmp_path / "unused", documents=1)
    settings = TASKS[recipe].settings(project.folder)
    settings["checkpoint"] |= {"placement": placement} if placement else {}
    if settings["checkpoint"]["recipe"] == "torchtune":
        # In the place of a test project's own, which is part of torchtune's configuration.
        settings["checkpoint"]["optimizer"] = {}
    project.configure(**settings)
    answer = answer_of_the_whole_graph(project, REQUESTS[recipe])
    if recipe == "classification":
        assert answer["predictions"][0]["label"] == "electrician"
        assert sum(answer["predictions"][0]["scores"].values()) == pytest.approx(1, abs=0.01)
    elif recipe == "masked_language_modeling":
        found = answer["predictions"][0]
        assert found["label"] in found["scores"] and sum(found["scores"].values()) <= 1.01
    elif recipe == "sequence_to_sequence":
        assert isinstance(answer["predictions"][0], str)
    elif "prompt" in REQUESTS[recipe]:
        assert isinstance(answer["choices"][0]["text"], str)
    else:
        assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.soak
def test_a_torchtune_configuration_trains_what_is_served(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """A team's file for Llama 3.2 1B, at a rate by which a model this small learns.

    Compiling it would take longer than all else here.
    """
    project = make_project(tmp_path / "project", tiny_model_folder)
    project.configure(
        checkpoint={
            "recipe": "torchtune",
            "run": "full_finetune_distributed",
            "config": str(TORCHTUNE_CONFIG),
            "overrides": {"optimizer.lr": 1e-2, "compile": False},
            "budget": {"steps": 12},
            "optimizer": {},
        }
    )
    answer = answer_of_the_whole_graph(project, {"prompt": "The valve", "max_tokens": 4})
    assert isinstance(answer["choices"][0]["text"], str)
    trained = project.record.current("checkpoint", needed_by="test")
    assert trained.stats["validation"]["end"] < 0.8 * trained.stats["validation"]["start"]


def answer_of_the_whole_graph(project: Project, body: dict[str, Any]) -> Any:
    """Materialize everything, see that the gate lets the model pass, and ask the endpoint."""
    try:
        ended = subprocess.run(
            ["dagster", "asset", "materialize", "--select", "*endpoint"],
            cwd=project.folder,
            env=project.environment(),
            capture_output=True,
            text=True,
            timeout=GRAPH_SECONDS,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        judged = project.record.current("model_version", needed_by="test")
        assert judged.stats["promoted"], judged.stats["reasons"]
        return ask(project, body)
    finally:
        project.run("llm-assets", "stop")


def ask(project: Project, body: dict[str, Any]) -> Any:
    status = project.run("llm-assets", "status").stdout
    url = next(word.strip(",") for word in status.split() if word.startswith("http://"))
    routes = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
    route = next((routes[key] for key in routes if key in body), "/predict")
    answer = httpx.post(f"{url}{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()
