"""What people do in Dagster's own UI, in a real browser beside its webserver and daemon."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts.screenshots import click
from tests.browser import Browser, browser
from tests.conftest import Project, make_project
from tests.dagster_services import daemon, webserver
from tests.needs import needs
from tests.tiny import story
from tests.waiting import wait_until

LAUNCH = """mutation($assets: [AssetKeyInput!]) { launchPipelineExecution(executionParams: {
  selector: {repositoryLocationName: "llm_assets", repositoryName: "__repository__",
    pipelineName: "__ASSET_JOB", assetSelection: $assets, assetCheckSelection: []},
  runConfigData: "{}", mode: "default"}) {
  ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
RUNS = """{ runsOrError { ... on Runs { results { runId status parentRunId
  tags { key value } stepStats { stepKey status } } } } }"""
BUTTONS = "[...document.querySelectorAll('button')]"
EFFECT_SECONDS = 5.0
STAGES = (
    *("base_model", "raw_corpus", "clean_corpus", "tokenized_shards"),
    *("checkpoint", "eval_metrics", "model_version", "endpoint"),
)
OUTLIVE_RUNS = ("dagster api grpc", "multiprocessing.resource_tracker", "-m serving")
"""Of commands: servers of the code, and the endpoint, which a run starts and does not end."""
OVER = ("SUCCESS", "FAILURE", "CANCELED")


def _number_of(label: str) -> str:
    """Script: the number of the first button that begins with a label, -1 for none."""
    return f"{BUTTONS}.findIndex((one) => one.textContent.startsWith({json.dumps(label)}))"


class Ui:
    """Dagster's UI and daemon of a project, and a browser."""

    def __init__(self, project: Project, address: str, page: Browser, log: Path) -> None:
        self.project, self.address, self.page, self.log = project, address, page, log
        self.before: set[str] = set()
        """Runs that do not count."""

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        body = {"query": query, "variables": variables}
        answer = httpx.post(f"{self.address}/graphql", json=body, timeout=60)
        found: dict[str, Any] = answer.raise_for_status().json()["data"]
        return found

    def runs(self) -> list[dict[str, Any]]:
        """The newest first."""
        runs = self.ask(RUNS)["runsOrError"]["results"]
        return [run for run in runs if run["runId"] not in self.before]

    def wait_for_runs(self, count: int) -> list[dict[str, Any]]:
        """All runs, once there are so many and all of them are over."""

        def are_over() -> bool:
            runs = self.runs()
            return len(runs) == count and all(run["status"] in OVER for run in runs)

        wait_until(
            are_over, poll_seconds=0.5, told=lambda: f"{self.runs()}\n{self.log.read_text()}"
        )
        return self.runs()

    def open(self, path: str, text: str) -> None:
        """A page, once it shows some text."""
        self.page.open(self.address + path)
        self.shows(text)

    def shows(self, text: str) -> None:
        self.page.wait_for(f"document.body.innerText.includes({json.dumps(text)})")

    def choose(self, label: str, item: str) -> None:
        """Click an item of the menu beside a button."""
        self.page.wait_for(f"{_number_of(label)} >= 0")
        self.click_until(f"1 + {_number_of(label)}", f"{_number_of(item)} >= 0")
        click(self.page, "button", item)

    def click_until(self, number: str, condition: str) -> None:
        """Click a button by its number until that has an effect; a page may not listen yet."""
        done = f"Boolean({condition})"

        def has_effect() -> bool:
            self.page.evaluate(f"{BUTTONS}[{number}]?.click()")
            # Not `wait_until`: a click that came too early is no fault, and is made again.
            end = time.monotonic() + EFFECT_SECONDS
            while time.monotonic() < end and not self.page.evaluate(done):
                time.sleep(0.1)
            return bool(self.page.evaluate(done))

        wait_until(has_effect, told=lambda: str(self.page.evaluate("document.body.innerText")))

    def write(self, placeholder: str, text: str) -> None:
        """Type into a field."""
        field = f"document.querySelector('input[placeholder={json.dumps(placeholder)}]')"
        self.page.wait_for(field)
        typed = "Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set"
        self.page.evaluate(
            f"{typed}.call({field}, {json.dumps(text)});"
            f"{field}.dispatchEvent(new Event('input', {{bubbles: true}})); 0"
        )


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Ui]:
    folder = tmp_path_factory.mktemp("ui")
    project = make_project(folder / "project", tiny_model_folder)
    # One after the other: two that make the history's databases at once hinder each other.
    with webserver(project) as address, daemon(project) as log, browser(folder) as page:
        yield Ui(project, address, page, log)
        project.stop()


@pytest.fixture
def ui(opened: Ui) -> Ui:
    """The UI, before the test's own runs."""
    opened.before = set()
    opened.before = {run["runId"] for run in opened.runs()}
    return opened


@pytest.mark.soak
@needs("Chromium")
def test_a_backfill_tries_settings_side_by_side(ui: Ui) -> None:
    trials = [f"checkpoint.optimizer.learning_rate={rate}" for rate in ("0.01", "0.0001")]
    launch_backfill(ui, *trials)
    runs = ui.wait_for_runs(2)
    assert {run["status"] for run in runs} == {"SUCCESS"}
    assert {tag(run, "dagster/partition") for run in runs} == set(trials)
    assert len({tag(run, "dagster/backfill") for run in runs}) == 1
    for trial in trials:
        ui.open(f"/assets/experiments?view=partitions&partition={trial}", "too few documents")


def launch_backfill(ui: Ui, *trials: str) -> None:
    """Add partitions to `experiments` and materialize them."""
    ui.open("/assets/experiments?view=partitions", "Materialize")
    # Where nothing was made yet, Dagster asks whether one is sure.
    button = f"Math.max({_number_of('Materialize')}, {_number_of('Confirm')})"
    ui.click_until(button, f"{_number_of('Add a partition')} >= 0")
    for trial in trials:
        click(ui.page, "button", "Add a partition")
        ui.write("name", trial)
        click(ui.page, "button", "Save")
        ui.page.wait_for("!document.querySelector('input[placeholder=\"name\"]')")
        ui.shows(trial)
    ui.click_until(
        _number_of("Missing"), f"{BUTTONS}[{_number_of('Launch backfill')}]?.disabled === false"
    )
    click(ui.page, "button", "Launch backfill")


def tag(run: dict[str, Any], name: str) -> str:
    (value,) = [one["value"] for one in run["tags"] if one["key"] == name]
    return str(value)


@needs("Chromium")
@pytest.mark.soak
def test_a_run_goes_on_from_the_step_that_failed(ui: Ui) -> None:
    text = ui.project.folder / "text"
    away = text.rename(ui.project.folder / "away")
    ui.ask(LAUNCH, assets=[{"path": [name]} for name in ("base_model", "raw_corpus")])
    (failed,) = ui.wait_for_runs(1)
    steps = {step["stepKey"]: step["status"] for step in failed["stepStats"]}
    assert steps == {"base_model": "SUCCESS", "raw_corpus": "FAILURE"}
    away.rename(text)
    ui.open(f"/runs/{failed['runId']}", "matches no file")
    ui.choose("Re-execute", "From failure")
    again, _ = ui.wait_for_runs(2)
    assert again["parentRunId"] == failed["runId"] and again["status"] == "SUCCESS"
    assert [step["stepKey"] for step in again["stepStats"]] == ["raw_corpus"]


@needs("Chromium")
@pytest.mark.soak
@pytest.mark.parametrize("stage", STAGES[2:6] + STAGES[7:])
def test_a_run_is_terminated_at_any_stage_and_the_next_one_goes_on(ui: Ui, stage: str) -> None:
    """The other stages take less than it takes to press a button."""
    before = processes_of(ui.project)
    # Whatever was made before, each stage has something to do.
    (ui.project.folder / "text" / f"{stage}.md").write_text(story(stage))
    ui.ask(LAUNCH, assets=[{"path": [name]} for name in STAGES])

    def is_at_it() -> bool:
        (run,) = ui.runs()
        assert run["status"] not in OVER, run
        return {"stepKey": stage, "status": "IN_PROGRESS"} in run["stepStats"]

    def has_begun() -> bool:
        return {"stepKey": STAGES[0], "status": "SUCCESS"} in ui.runs()[0]["stepStats"]

    # Some stages end soon: the question whether one is sure is open before they begin.
    wait_until(has_begun, told=ui.log.read_text)
    ui.open(f"/runs/{ui.runs()[0]['runId']}", "Terminate")
    click(ui.page, "button", "Terminate")
    ui.page.wait_for("document.querySelector('.dagster-dialog button')")
    wait_until(is_at_it, told=ui.log.read_text)
    click(ui.page, ".dagster-dialog button", "Terminate")
    (run,) = ui.wait_for_runs(1)
    assert run["status"] == "CANCELED"
    wait_until(
        lambda: processes_of(ui.project).keys() <= before.keys(),
        told=lambda: str(processes_of(ui.project).items() - before.items()),
    )
    ui.ask(LAUNCH, assets=[{"path": [name]} for name in STAGES[: STAGES.index(stage) + 1]])
    again, _ = ui.wait_for_runs(2)
    assert again["status"] == "SUCCESS"


def processes_of(project: Project) -> dict[int, str]:
    """Those that run for its history and end with a run, with their commands."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            is_its = process.environ().get("DAGSTER_HOME") == str(project.folder)
            if is_its and not any(name in command for name in OUTLIVE_RUNS):
                found[process.pid] = command
    return found
