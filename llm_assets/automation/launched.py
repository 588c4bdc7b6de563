"""The runs of a pipeline, as Dagster recorded them, and how automation's own are marked."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunRecord, RunsFilter

from artifacts.leases.holder import is_gone
from llm_assets.config import PipelineSettings

PIPELINE_TAG = "llm_assets/pipeline"
LAUNCHED_BY_TAG = "llm_assets/launched_by"
QUESTION_TAG = "llm_assets/question"
PROCESS_TAG = ".dagster/llm_assets/process"
"""The process of a run that no daemon watches, as a lease's holder is described. The UI leaves tags
out that begin like this one."""
TEXT_SENSOR = "source_text_changed"
ENDPOINT_SENSOR = "endpoint_follows"
BASE_MODEL_SENSOR = "base_model_changed"
QUALITY_SENSOR = "serving_quality"
SCHEDULE = "weekly_retraining"
UNFINISHED = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
ASSET_JOB = "__ASSET_JOB"
"""What Dagster calls a run of assets that were chosen by hand."""
MOST_DAYS_OF_A_MONTH = 32


@dataclass(frozen=True)
class Runs:
    """What was launched for one pipeline."""

    instance: DagsterInstance
    settings: PipelineSettings

    def tags(self, launched_by: str) -> dict[str, str]:
        """The tags of a run that automation launches."""
        return {PIPELINE_TAG: self.settings.name, LAUNCHED_BY_TAG: launched_by}

    def by_automation(self, now: datetime) -> Sequence[RunRecord]:
        """Those of the month that automation launched."""
        every = (TEXT_SENSOR, ENDPOINT_SENSOR, BASE_MODEL_SENSOR, QUALITY_SENSOR, SCHEDULE)
        return self.instance.get_run_records(
            RunsFilter(
                tags={PIPELINE_TAG: self.settings.name, LAUNCHED_BY_TAG: every},
                updated_after=now - timedelta(days=MOST_DAYS_OF_A_MONTH),
            )
        )

    def asking(self, question: str) -> Sequence[RunRecord]:
        """Those that were launched for a question."""
        return self.instance.get_run_records(
            RunsFilter(tags={PIPELINE_TAG: self.settings.name, QUESTION_TAG: question})
        )

    def unfinished(self) -> list[DagsterRun]:
        """Those of this pipeline that wait or run, whoever launched them."""
        runs = self.instance.get_runs(RunsFilter(statuses=UNFINISHED))
        return [run for run in runs if self.is_ours(run) and not _has_died(run)]

    def is_ours(self, run: DagsterRun) -> bool:
        """Whether a run is of this pipeline, as far as its tags and assets tell."""
        if PIPELINE_TAG in run.tags:
            return run.tags[PIPELINE_TAG] == self.settings.name
        if not run.job_name.startswith(ASSET_JOB):
            return False
        prefix = self.settings.key_prefix
        keys = run.asset_selection or ()
        return not keys or any((key.path[0] == prefix) == bool(prefix) for key in keys)


def _has_died(run: DagsterRun) -> bool:
    holder = run.tags.get(PROCESS_TAG)
    return holder is not None and is_gone(holder)
