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
}
GRAPH_SECONDS = 900
ZERO = {"workers": 2, "deepspeed": {"stage": 3}}


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
    project.configure(**settings)
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
        answer = ask(project, REQUESTS[recipe])
    finally:
        project.run("llm-assets", "stop")
    if recipe == "classification":
        assert answer["predictions"][0]["label"] == "electrician"
        assert sum(answer["predictions"][0]["scores"].values()) == pytest.approx(1, abs=0.01)
    elif recipe == "sequence_to_sequence":
        assert isinstance(answer["predictions"][0], str)
    else:
        assert answer["choices"][0]["message"]["role"] == "assistant"


def ask(project: Project, body: dict[str, Any]) -> Any:
    status = project.run("llm-assets", "status").stdout
    url = next(word.strip(",") for word in status.split() if word.startswith("http://"))
    route = "/v1/chat/completions" if "messages" in body else "/predict"
    answer = httpx.post(f"{url}{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()
