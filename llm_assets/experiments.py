"""Which settings make the better model? The asset `experiments`, a partition for each trial.

First, what is tried: settings with several values each, in all combinations. Then the result of a
trial, and the table of all results. Last, the trial itself, in the step of the asset.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import dagster as dg
import pyarrow.parquet as pq
import yaml
from pydantic import BaseModel, ConfigDict

from artifacts.errors import UserError
from artifacts.progress import format_duration
from artifacts.store.identity import Identity, hash_json
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, layout
from llm_assets.assets.corpus import clean_corpus, raw_corpus, tokenized_shards
from llm_assets.assets.evaluation import Measurement
from llm_assets.assets.exam import exam
from llm_assets.assets.model import base_model, checkpoint
from llm_assets.assets.stage import (
    BuildPlan,
    asset_key,
    own_resources,
    readable,
    stage,
    table,
    user_faults,
)
from llm_assets.assets.study import study
from llm_assets.config import PipelineSettings, changed_settings
from llm_assets.gate.judge import compare
from llm_assets.gate.verdict import Comparison, GateSettings
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.card import training_cost
from llm_assets.registry.resource import RegistryResource
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner
from recipes.evaluation.settings import CODE_VERSION, SCORES_NAME, GenerationSettings, Metric

SECTIONS = ("raw_corpus", "clean_corpus", "study", "tokenized_shards", "base_model", "checkpoint")
"""Sections that decide what a model is; the others say how it is measured and served."""
MOST_TRIALS = 100


@dataclass(frozen=True)
class Trial:
    changes: dict[str, Any]
    """Dotted key of the pipeline file to value."""

    @property
    def name(self) -> str:
        """What is changed, for people; Dagster's partition key."""
        return " ".join(shlex.quote(f"{k}={_shown(v)}") for k, v in self.changes.items())


def _shown(value: Any) -> str:
    """The value as `parse_changes` reads it back."""
    try:
        is_plain = isinstance(value, str) and yaml.safe_load(f"[{value}]") == [value]
    except (yaml.YAMLError, ValueError, RecursionError):
        is_plain = False
    return str(value) if is_plain else json.dumps(value)


def parse_changes(assignments: Sequence[str]) -> dict[str, Any]:
    """`KEY=A,B,C` as typed, to a list of values for each key; values are YAML.

    Raises:
        UserError: one is no such assignment, or its key came before.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, sign, values = assignment.partition("=")
        if not sign or not key:
            raise UserError(
                f"{assignment!r} sets nothing. Write a key of the pipeline file and its values: "
                "checkpoint.optimizer.learning_rate=1e-4,3e-4"
            )
        if key in changes:
            raise UserError(f"{key} is set twice. Give all its values at once: {key}=A,B")
        try:
            changes[key] = yaml.safe_load(f"[{values}]")
            json.dumps(changes[key])
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            # YAML raises ValueError for a date that does not exist; JSON raises TypeError for one
            # that does. Both give up on brackets within brackets without end.
            raise UserError(
                f"{key}: {values[:200]!r} is no list of values such as 1,2,3. A date is a text in "
                f"""quotes: {key}='"2024-01-31"'."""
            ) from error
    return changes


def plan_trials(pipeline_file: Path, changes: Mapping[str, Any]) -> list[Trial]:
    """Every combination of the values, checked as the pipeline file is.

    Raises:
        UserError: nothing is tried, a key is unknown or decides no model, a value is wrong, or
            there are too many combinations.
    """
    if not changes:
        raise UserError(
            "Nothing is tried. Name a key and its values: "
            "--set checkpoint.optimizer.learning_rate=1e-4,3e-4"
        )
    for key, values in changes.items():
        if key.split(".")[0] not in SECTIONS:
            raise UserError(
                f"{key}: an experiment changes what decides a model, under {', '.join(SECTIONS)}."
            )
        if not isinstance(values, list) or not values:
            raise UserError(f"{key}: give a list with at least one value, not {values!r}.")
        # Compared as they are written in the names of partitions, of which no two may be the same.
        texts = [_shown(value) for value in values]
        if len(set(texts)) < len(texts):
            raise UserError(f"{key}: a value appears twice in {', '.join(texts)}.")
    # Before the combinations are built: there may be more than memory holds.
    if (combinations := math.prod(map(len, changes.values()))) > MOST_TRIALS:
        raise UserError(
            f"These are {combinations:,} combinations, but an experiment may have at most "
            f"{MOST_TRIALS}. Try fewer values at once."
        )
    trials = [
        Trial(dict(zip(changes, combination, strict=True)))
        for combination in product(*changes.values())
    ]
    for trial in trials:
        changed_settings(pipeline_file, trial.changes)
    return trials


SPLIT: Literal["validation"] = "validation"
"""Whoever picks the best of several models picks chance along with it. On held-out text that would
use up the gate's promise; validation text is there to choose by."""
CONFIDENCE = 0.95
"""Joint confidence of the intervals of all trials (Bonferroni)."""
COLUMNS = ("settings", "score", "gain", "interval", "verdict", "training", "cost")
Finding = Literal["better", "worse", "not told apart", "too few documents", "failed"]


class TrialResult(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    trial: str
    """What was changed."""
    verdict: Finding
    """Against the reference; `failed` where there is no model or no figure."""
    reason: str = ""
    """Why it failed."""
    reference: str = ""
    """What it was held against: `incumbent`, the version that is wanted, or `base`."""
    metric: str = ""
    """Name of the recipe's metric, on validation text."""
    score: float | None = None
    gain: float | None = None
    """How much better than the reference it was measured, in the metric's unit."""
    gain_low: float | None = None
    gain_high: float | None = None
    """Between these all trials' gains lie at 95%; None for no bound."""
    documents: int = 0
    """Independent validation documents."""
    evaluation: str = ""
    """Fingerprint of what the model was measured on, and how."""
    training_seconds: float | None = None
    """What the training took, whenever it was."""
    cost: float | None = None
    """The same in money, at `automation.cost_per_hour`."""


def read_result(
    settings: PipelineSettings, trial: str, checkpoint: Artifact, measured: Artifact, trials: int
) -> TrialResult:
    """The result of a trial that ran to its end.

    Args:
        checkpoint, measured: its `checkpoint` and `trial_metrics`.
        trials: how many there are; the more, the wider the intervals.
    """
    stats, price = measured.stats, settings.automation.cost_per_hour
    common: dict[str, Any] = {"trial": trial} | training_cost(checkpoint.stats, price)
    if stats["faults"]:
        return TrialResult(verdict="failed", reason=" ".join(stats["faults"].values()), **common)
    metric = Metric.model_validate(stats["metric"])
    reference = "incumbent" if "incumbent" in stats["models"] else "base"
    # For one side of one trial's interval (Bonferroni).
    level = (1 - CONFIDENCE) / 2 / trials
    scores = pq.read_table(measured.path / SCORES_NAME)
    comparison = compare(scores, metric, SPLIT, reference, level)
    score = stats["metrics"][f"{SPLIT}_{metric.name}"]["candidate"]["value"]
    if score is None:
        return TrialResult(verdict="failed", reason="Its scores are not finite numbers.", **common)
    return TrialResult(
        verdict=finding(comparison, settings.model_version.gate),
        reference=reference,
        metric=metric.name,
        score=score,
        gain=comparison.gain,
        gain_low=comparison.surest_gain,
        gain_high=comparison.largest_gain,
        documents=comparison.clusters,
        evaluation=stats["evaluation_fingerprint"],
        **common,
    )


def finding(found: Comparison, gate: GateSettings) -> Finding:
    """What a comparison shows; a gain too small for the gate is no gain here either."""
    low, high = found.surest_gain, found.largest_gain
    # With fewer, the error of the bounds is not what they say.
    if found.clusters < gate.minimum_documents:
        return "too few documents"
    if low is not None and low > 0 and found.gain >= gate.smallest_effect:
        return "better"
    return "worse" if high is not None and high < 0 else "not told apart"


def ranked(results: Iterable[TrialResult]) -> list[TrialResult]:
    """The largest gain first, what failed last."""
    return sorted(
        results, key=lambda result: -(result.gain if result.gain is not None else float("-inf"))
    )


def rows(results: Iterable[TrialResult]) -> list[tuple[str, ...]]:
    """The table's rows in words, in the order of COLUMNS; keys by their last part."""
    return [
        (
            _short(result.trial),
            _number(result.score),
            _number(result.gain, "+"),
            f"{_number(result.gain_low, '+')} to {_number(result.gain_high, '+')}",
            result.verdict + (f": {result.reason}" if result.reason else ""),
            "" if result.training_seconds is None else format_duration(result.training_seconds),
            "" if result.cost is None else f"{result.cost:.2f}",
        )
        for result in ranked(results)
    ]


def caption(results: Iterable[TrialResult]) -> str:
    """What the figures of the table are."""
    measured = [result for result in results if result.gain is not None]
    if not measured:
        return "Nothing could be measured."
    head = measured[0]
    reference_name = "the wanted version" if head.reference == "incumbent" else "the base model"
    metrics = dict.fromkeys(other.metric.replace("_", " ") for other in measured)
    text = (
        f"Score: {' or '.join(metrics)} on {head.documents} independent validation documents; gain "
        f"over {reference_name}, all intervals together at {CONFIDENCE:.0%}. Nothing was promoted."
    )
    if len(metrics) > 1:
        return f"{text} Scores and gains in different metrics cannot be compared."
    if len({other.evaluation for other in measured}) > 1:
        text += (
            " The trials were not all measured on the same text in the same way, so small "
            "differences between them say nothing."
        )
    return text


def _short(trial: str) -> str:
    keys = (change.partition("=") for change in shlex.split(trial))
    return " ".join(f"{key.rpartition('.')[2]}{sign}{value}" for key, sign, value in keys)


def _number(value: float | None, sign: str = "") -> str:
    return "?" if value is None else f"{value:{sign}.4f}"


# A trial is the graph up to the checkpoint, and a measurement, with a record of its own; what
# trials have in common is made once. Neither registry nor endpoint is part of it, so it moves
# neither.
@stage(code_version=CODE_VERSION, group="model", kinds={"pytorch"}, pool="training")
def trial_metrics(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
    identity: Identity,
    checkpoint: Artifact,
    base_model: Artifact,
) -> BuildPlan:
    """The trial's model, its base and the wanted version, measured on validation text."""
    # Only the deciding metric: no samples, no tasks.
    only_metric = {"generation": GenerationSettings(samples=0), "tasks": ()}
    measurement = Measurement(
        pipeline,
        checkpoint,
        base_model,
        shards=pipeline.record.current("tokenized_shards"),
        settings=pipeline.settings.measured.model_copy(update=only_metric),
        incumbent=registry.open(pipeline).find("wanted"),
        split=SPLIT,
    )

    def build(draft: Draft) -> None:
        draft.stats |= training.evaluate(context, measurement.spec(draft))

    return BuildPlan(measurement.identity(identity, {"split": SPLIT}), build)


STAGES_OF_TEXT = (raw_corpus, clean_corpus, exam, study, tokenized_shards)
STAGES = (
    *(raw_corpus, clean_corpus, exam, study, base_model, tokenized_shards, checkpoint),
    trial_metrics,
)
"""What a trial makes; of the exam, only the words that a study must not use are needed."""


class TrialPipeline(PipelineResource):
    """The pipeline with some settings changed, and what it makes on another record."""

    changes: dict[str, Any]
    """Dotted key to value."""
    trial: str

    @cached_property
    def settings_of_file(self) -> PipelineSettings:
        return changed_settings(Path(self.config_path), self.changes)

    @property
    def record(self) -> Pipeline:
        return trial_record(self, self.trial)


def trial_record(pipeline: PipelineResource, trial: str) -> Pipeline:
    name = pipeline.settings.name
    return Pipeline(pipeline.store, name, layout.trial_record(name, hash_json({"trial": trial})))


def _begin_record(pipeline: PipelineResource, trial: Pipeline) -> None:
    """Begin with the pipeline's current artifacts; corpora that the trial made before stay on
    record, because forgetting erases text from them, too."""
    history, trial_assets = pipeline.record.history(), trial.history().assets
    for name in (step.name for step in STAGES_OF_TEXT if step.name in trial_assets):
        trial_entry = trial_assets[name]
        target = history.assets.setdefault(name, trial_entry)
        fingerprints = {entry.fingerprint for entry in (target.current, *target.previous)}
        earlier = (trial_entry.current, *trial_entry.previous)
        target.previous += [entry for entry in earlier if entry.fingerprint not in fingerprints]
    pipeline.store.write_bytes(trial.path, history.model_dump_json(indent=2).encode())


def run_trial(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    trial: Trial,
    resources: Mapping[str, Any],
) -> list[str]:
    """Make what a trial needs, in the step of `experiments`; returns the stages that were built.

    Its record begins with the pipeline's current artifacts, so held-out documents stay held out,
    and what the pipeline has made already is used.

    Args:
        resources: `spark`, `training` and `registry` of the graph.

    Raises:
        UserError: what hinders a stage.
    """
    _begin_record(pipeline, trial_record(pipeline, trial.name))
    trial_pipeline = TrialPipeline(
        config_path=pipeline.config_path, changes=trial.changes, trial=trial.name
    )
    names = []
    for made_by in STAGES:
        is_asked = made_by is not exam or trial_pipeline.settings.study is not None
        if trial_pipeline.settings.leaves_out(made_by.name) or not is_asked:
            continue
        context.log.info(f"{made_by.name} of the trial {trial.name}")
        # It gets no options: the changes are in the trial's settings, and the run's config is that
        # of `experiments`.
        made_by.materialize({**resources, "context": context, "pipeline": trial_pipeline}, {})
        # `PipelineResource.make` adds it to the output of the step.
        if (context.get_output_metadata("result") or {})["made_now"]:
            names.append(made_by.name)
    return names


ASSET = "experiments"
RESULT = "result"
"""Name of the metadata that holds a trial's whole result."""
UI_COLUMNS = ("settings", "gain", "interval", "verdict")
"""Columns of the table that fit the UI; the others are metadata of their own."""


def build_experiments(settings: PipelineSettings) -> dg.AssetsDefinition:
    """The asset of all trials; whoever materializes a partition runs that trial."""

    @dg.asset(
        key=asset_key(settings, ASSET),
        deps=[asset_key(settings, name) for name in ("raw_corpus", "base_model")],
        description="Models trained with other settings, measured on validation text against the "
        "wanted version. None is promoted or served. A partition is a trial, named after the "
        "settings it changes, such as `checkpoint.optimizer.learning_rate=3e-5`: add some and "
        "materialize them, or use `llm-assets experiment`.",
        group_name=ASSET,
        kinds={"pytorch"},
        pool="training",
        partitions_def=partitions(settings),
    )
    @own_resources(settings)
    def experiments(
        context: dg.AssetExecutionContext,
        pipeline: PipelineResource,
        spark: SparkRunner,
        training: TrainingRunner,
        registry: RegistryResource,
    ) -> dg.MaterializeResult:
        resources = {"spark": spark, "training": training, "registry": registry}
        with user_faults(pipeline):
            name = context.partition_key
            names = run_trial(context, pipeline, read_trial(pipeline, name), resources)
            done = _results(context.instance, pipeline, name)
            return dg.MaterializeResult(metadata=_metadata(done[name], done, names))

    return experiments


def partitions(settings: PipelineSettings) -> dg.DynamicPartitionsDefinition:
    """A pipeline's trials, by their names."""
    return dg.DynamicPartitionsDefinition(name=f"{settings.name}_trials")


def read_trial(pipeline: PipelineResource, name: str) -> Trial:
    """The trial that a partition is named by; raises UserError where it cannot be tried."""
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise UserError(f"{name!r}: {error}. Name a partition KEY=VALUE KEY=VALUE.") from error
    trials = plan_trials(Path(pipeline.config_path), parse_changes(words))
    # A trial with two partitions would count twice, and so widen the intervals of all.
    if [trial.name for trial in trials] != [name]:
        raise UserError(
            f"The partition {name!r} is another way to write {trials[0].name!r}, or holds more "
            "than one trial. Delete it, and add one for each trial."
        )
    return trials[0]


def _results(
    instance: dg.DagsterInstance, pipeline: PipelineResource, newest: str
) -> dict[str, TrialResult]:
    """The results of all trials with the newest one's reference and metric: the rows of the table.

    Their intervals hold jointly, whichever partition happens to look best.
    """
    settings = pipeline.settings
    # Only those that are still there: the fewer are compared, the narrower is each one's interval.
    names = instance.get_dynamic_partitions(str(partitions(settings).name))
    if newest not in names:
        raise UserError(
            f"The partition {newest!r} was deleted during its trial, so Dagster accepts no result "
            "for it. What was built is kept: add the partition again and materialize it, and the "
            "result is there at once."
        )
    results, references = {}, {}
    for name in names:
        record = trial_record(pipeline, name)
        checkpoint, evaluation = map(record.find_current, ("checkpoint", "trial_metrics"))
        if checkpoint and evaluation:
            results[name] = read_result(settings, name, checkpoint, evaluation, len(names))
            references[name] = (
                evaluation.manifest.inputs.get("incumbent"),
                evaluation.stats["metric"],
            )
    return {name: results[name] for name in results if references[name] == references[newest]}


def _metadata(
    result: TrialResult, done: Mapping[str, TrialResult], stages: Sequence[str]
) -> dict[str, Any]:
    """Of one result, with the table of all so far."""
    figures = {"score", "gain", "gain_low", "gain_high", "training_seconds", "cost"}
    table_rows = (
        # The UI breaks cells at spaces.
        [row[COLUMNS.index(name)].replace("=", " = ") for name in UI_COLUMNS]
        for row in rows(done.values())
    )
    return {
        "summary": f"{result.trial}: {result.verdict}",
        "verdict": result.verdict,
        "trials": table(UI_COLUMNS, table_rows),
        "measured": caption(done.values()),
        "made": ", ".join(stages) or "nothing; everything existed already",
        **readable(result.model_dump(include=figures, exclude_none=True)),
        RESULT: dg.MetadataValue.json(result.model_dump(mode="json")),
    }
