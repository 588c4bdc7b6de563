"""Runs an experiment's trials one after another; what is equal among them is made once.

A trial is the graph up to the checkpoint, and a measurement, with a record of its own. Neither the
registry nor the endpoint is among what it makes, so it moves neither.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster import (
    DagsterExecutionInterruptedError,
    DagsterInstance,
    Definitions,
    EventLogEntry,
    ExecuteInProcessResult,
    in_process_executor,
    load_assets_from_modules,
)
from dagster._core.utils import make_new_run_id

from artifacts.progress import Report
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import layout
from llm_assets.assets import corpus, model
from llm_assets.assets.stage import failure_reason, was_interrupted
from llm_assets.config import PipelineSettings, changed_settings
from llm_assets.experiments.measure import trial_metrics
from llm_assets.experiments.result import TrialResult, read_result
from llm_assets.experiments.trials import Trial
from llm_assets.pipeline import PipelineResource


class TrialPipeline(PipelineResource):
    """The pipeline with some settings changed, and what it makes on another record."""

    changes: dict[str, Any]
    """Dotted key to value."""
    record_path: str
    """In the store."""

    @property
    def settings(self) -> PipelineSettings:
        return changed_settings(Path(self.config_path), self.changes)

    @property
    def record(self) -> Pipeline:
        return Pipeline(self.store, self.settings.name, self.record_path)


@dataclass(frozen=True)
class Experiment:
    """Some trials of one pipeline, and where their work is done."""

    pipeline: PipelineResource
    resources: Mapping[str, Any]
    """`spark`, `training` and `registry` of the graph."""
    trials: Sequence[Trial]

    def run(self, report: Report, on_result: Callable[[TrialResult], None]) -> list[TrialResult]:
        """Run all trials; one that fails is a result like the others.

        Raises:
            DagsterExecutionInterruptedError: somebody ended it; what was made is kept.
        """
        results = []
        for number, trial in enumerate(self.trials, 1):
            report(f"Trial {number} of {len(self.trials)}: {trial.name}")
            result = self._run_trial(trial, report)
            results.append(result)
            on_result(result)
        return results

    def _run_trial(self, trial: Trial, report: Report) -> TrialResult:
        pipeline = self._open(trial)
        definitions = Definitions(
            assets=[*load_assets_from_modules([corpus, model]), trial_metrics],
            resources={**self.resources, "pipeline": pipeline},
            executor=in_process_executor,
        )
        ended = _execute(definitions, report)
        if reason := _reason(ended):
            return TrialResult(trial=trial.name, verdict="failed", reason=reason)
        settings, record = pipeline.settings, pipeline.record
        return read_result(
            trial.name,
            record.current("checkpoint", needed_by="trial_metrics"),
            record.current("trial_metrics", needed_by="experiments"),
            settings.model_version.gate,
            len(self.trials),
            settings.automation.cost_per_hour,
            _made(ended),
        )

    def _open(self, trial: Trial) -> TrialPipeline:
        """The trial's view of the store, which begins with what is current in the pipeline's.

        So held-out documents stay held out, and what the pipeline has made already is found.
        """
        pipeline = self.pipeline
        path = layout.trial_record(pipeline.settings.name, trial.fingerprint)
        history = pipeline.record.history().model_dump_json(indent=2)
        pipeline.store.write_bytes(path, history.encode())
        return TrialPipeline(
            config_path=pipeline.config_path, changes=trial.changes, record_path=path
        )


def _execute(definitions: Definitions, report: Report) -> ExecuteInProcessResult:
    """Materialize all of it; its log lines are reported, and no history is kept of it."""

    def pass_on(entry: EventLogEntry) -> None:
        if entry.dagster_event is None and entry.step_key and entry.user_message:
            report(f"{entry.step_key}: {entry.user_message}")

    run_id = make_new_run_id()
    with DagsterInstance.ephemeral() as instance:
        instance.add_event_listener(run_id, pass_on)
        return definitions.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, run_id=run_id, raise_on_error=False
        )


def _reason(ended: ExecuteInProcessResult) -> str:
    """Why a trial failed; empty where it did not."""
    for event in ended.filter_events(lambda event: event.is_step_failure):
        failure = event.step_failure_data
        if was_interrupted(failure):
            raise DagsterExecutionInterruptedError()
        return f"{event.step_key}: {failure_reason(failure)}"
    return ""


def _made(ended: ExecuteInProcessResult) -> tuple[str, ...]:
    """The stages that were not there already."""
    events = ended.get_asset_materialization_events()
    return tuple(
        event.step_key or "" for event in events if event.materialization.metadata["made_now"].value
    )
