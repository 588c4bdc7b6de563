"""A project with a registry, in which ticks of a sensor are evaluated without a daemon."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    Definitions,
    RunRequest,
    build_sensor_context,
)

from artifacts.leases import process_started
from artifacts.store.identity import Identity
from llm_assets.automation.jobs import RETRAINING
from llm_assets.automation.launched import PIPELINE_TAG, PROCESS_TAG
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.gate.verdict import Outcome, Reason
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.state import ModelVersion
from serving.settings import EndpointSettings
from serving.state import Phase, StateFolder, Status
from spark_jobs.read.snapshot import fingerprints_of, open_sources
from tests.conftest import Project, make_project
from tests.llm_assets.registry.conftest import base_entry, entry, verdict


@cache
def _defined(config: str, content: str) -> Definitions:
    return build_definitions(load_settings(Path(config)), config)


@dataclass
class Automated:
    """A project whose text was taught to models by hand, and a Dagster instance beside it."""

    project: Project
    instance: DagsterInstance
    cursor: str | None = None

    @property
    def text(self) -> Path:
        return self.project.folder / "text"

    @property
    def registry(self) -> LocalRegistry:
        return LocalRegistry(Path(self.project.record.store.root), "manual")

    def add(self, name: str = "new.txt", times: int = 1) -> None:
        """Put a text that no model has read into the source."""
        text = "Something new to learn, of which no model has read a single word."
        (self.text / name).write_text(text * times)

    def automate(self, **settings: Any) -> None:
        """Change `automation` settings."""
        self.project.configure(automation=settings)

    def tick(self, name: str = "source_text_changed") -> RunRequest | str:
        """One tick of a sensor: the run it asks for, or why it asks for none."""
        defs = self.defs
        keys = ("llm_assets__pipeline", "llm_assets__registry")
        resources = {key: defs.resources[key] for key in keys}
        context = build_sensor_context(
            instance=self.instance, cursor=self.cursor, definitions=defs, resources=resources
        )
        data = defs.resolve_sensor_def(name).evaluate_tick(context)
        self.cursor = data.cursor
        if not data.run_requests:
            return data.skip_message or ""
        (request,) = data.run_requests
        return request

    def expect_run(self, name: str = "source_text_changed") -> RunRequest:
        """One tick of a sensor, which asks for a run."""
        found = self.tick(name)
        assert isinstance(found, RunRequest), found
        return found

    @property
    def defs(self) -> Definitions:
        """What its pipeline file defines."""
        config = self.project.config
        return _defined(str(config), config.read_text())

    def launch(
        self, request: RunRequest | str, status: DagsterRunStatus = DagsterRunStatus.STARTED
    ) -> str:
        """Create the run that a tick asked for; returns its id."""
        assert isinstance(request, RunRequest), request
        return self._create(dict(request.tags), status)

    @property
    def endpoint(self) -> StateFolder:
        """What its endpoint is said to be doing."""
        return StateFolder(endpoint_folder(load_settings(self.project.config)))

    def say_endpoint(self, pid: int, started: str | None, phase: Phase) -> None:
        """What the endpoint of a process, known by its pid and its start, says or has left."""
        status = Status(
            pid=pid,
            process_started=started,
            api_server_pid=pid,
            host="127.0.0.1",
            port=8011,
            settings=EndpointSettings(),
            phase=phase,
        )
        self.endpoint.status.write(status)

    def run_by_hand(self, process: str) -> str:
        """A run as `llm-assets run` starts it in a process of its own."""
        tags = {PIPELINE_TAG: "manual", PROCESS_TAG: process}
        return self._create(tags, DagsterRunStatus.STARTED)

    def run_job(self, job: str) -> str:
        """A run of a job as a schedule or the UI launches it."""
        return self._create({}, DagsterRunStatus.STARTED, job)

    def _create(self, tags: dict[str, str], status: DagsterRunStatus, job: str = RETRAINING) -> str:
        run = self.instance.create_run_for_job(
            self.defs.resolve_job_def(job), tags=tags, status=DagsterRunStatus.NOT_STARTED
        )
        if status is not DagsterRunStatus.NOT_STARTED:
            self._report(DagsterEventType.RUN_START, run)
        if status is DagsterRunStatus.CANCELED:
            self._report(DagsterEventType.RUN_CANCELED, run)
        return run.run_id

    def _report(self, kind: DagsterEventType, run: DagsterRun) -> None:
        self.instance.report_dagster_event(DagsterEvent(kind.value, run.job_name), run.run_id)

    def end(self, run_id: str, succeeded: bool, reason: str | None = None) -> None:
        """A run comes to its end; `reason` is why it failed."""
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        if reason:
            self.instance.report_run_failed(run, reason)
            return
        kind = DagsterEventType.RUN_SUCCESS if succeeded else DagsterEventType.RUN_FAILURE
        self._report(kind, run)

    def teach(
        self,
        model: str,
        outcome: Outcome = Outcome.BETTER,
        coverage: float | None = None,
        **lineage: str,
    ) -> ModelVersion:
        """Register a model that was trained on the text as it is, with the gate's verdict."""
        settings = load_settings(self.project.config).raw_corpus
        store = self.project.record.store
        identity = Identity(
            kind="raw_corpus", code_version="1", inputs=fingerprints_of(open_sources(settings))
        )
        corpus, _ = store.make(identity, lambda draft: draft.stats.update(documents=1))
        state = self.registry.state()
        against = state.incumbent_of(model).weights
        look = state.look_of(model, against)
        found = verdict(model, against, promoted=outcome is Outcome.BETTER, look=look)
        reason = Reason(outcome=outcome, text=f"{model} was measured against {against}.")
        lineage["raw_corpus"] = corpus.fingerprint
        update = {"lineage": lineage, "coverage": coverage}
        version = self.registry.enter(
            entry(model).model_copy(update=update),
            found.model_copy(update={"reasons": [reason]}),
        )
        if found.promoted:
            self.registry.confirm(version.version)
        return version


@pytest.fixture
def automated(tmp_path: Path) -> Iterator[Automated]:
    """A project of five documents that version 1 knows; changes count at once."""
    project = make_project(tmp_path / "project", base_model=tmp_path, documents=5)
    with DagsterInstance.ephemeral() as instance:
        one = Automated(project, instance)
        one.automate(quiet_minutes=0)
        one.registry.register_base(base_entry())
        one.teach("first")
        one.say_endpoint(os.getpid(), process_started(os.getpid()), "serving")
        assert "knows this text" in str(one.tick())
        yield one
