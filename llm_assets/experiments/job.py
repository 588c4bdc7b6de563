"""Which settings make the better model? The asset `experiments`, a partition for each trial.

First what is tried: settings with several values each, in all combinations. Then what came of a
trial, and the table of all of them. Last the trial itself, in the step of the asset.
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

import pyarrow.parquet as pq
import yaml
from dagster import (
    AssetExecutionContext,
    AssetsDefinition,
    DagsterInstance,
    DynamicPartitionsDefinition,
    MaterializeResult,
    MetadataValue,
    asset,
)
from pydantic import BaseModel, ConfigDict

from artifacts.errors import UserError
from artifacts.progress import format_duration
from artifacts.store.identity import Identity, hash_json
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, layout
from llm_assets.assets.corpus import clean_corpus, raw_corpus, tokenized_shards
from llm_assets.assets.evaluation import evaluation_spec
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
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.gate.judge import compare
from llm_assets.gate.verdict import Comparison, GateSettings
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.card import training_cost
from llm_assets.registry.resource import RegistryResource
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner
from recipes.evaluation.settings import (
    CODE_VERSION,
    SCORES_NAME,
    GenerationSettings,
    Metric,
    ModelSource,
)
from recipes.settings import package_of

SECTIONS = ("raw_corpus", "clean_corpus", "study", "tokenized_shards", "base_model", "checkpoint")
"""Whose settings decide what a model is; the others say how it is measured and where it serves."""
MOST_TRIALS = 100


@dataclass(frozen=True)
class Trial:
    """One combination of values."""

    changes: dict[str, Any]
    """Dotted key of the pipeline file to value."""

    @property
    def name(self) -> str:
        """What is changed, for people; Dagster's partition key."""
        return " ".join(shlex.quote(f"{k}={_shown(v)}") for k, v in self.changes.items())


def _shown(value: Any) -> str:
    """What `parse_changes` reads as the value."""
    try:
        is_plain = isinstance(value, str) and yaml.safe_load(f"[{value}]") == [value]
    except (yaml.YAMLError, ValueError):
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
        except (yaml.YAMLError, ValueError, TypeError) as error:
            # A ValueError is also a date that is none, and a TypeError one that is.
            raise UserError(
                f"{key}: {values!r} is no list of values such as 1,2,3. A date is a text in "
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
        shown = [_shown(value) for value in values]
        if len(set(shown)) < len(shown):
            raise UserError(f"{key}: a value appears twice in {', '.join(shown)}.")
    # Before they are made: there may be more than memory holds.
    if (combinations := math.prod(map(len, changes.values()))) > MOST_TRIALS:
        raise UserError(
            f"These are {combinations:,} combinations, but an experiment may have at most "
            f"{MOST_TRIALS}. Try fewer values at once."
        )
    trials = [
        Trial(dict(zip(changes, chosen, strict=True))) for chosen in product(*changes.values())
    ]
    for trial in trials:
        changed_settings(pipeline_file, trial.changes)
    return trials


SPLIT = "validation"
"""Whoever picks the best of several models picks chance along with it. On held-out text that would
be spent from the gate's promise; validation text is there to choose by."""
CONFIDENCE = 0.95
"""With which the intervals of all trials hold together (Bonferroni)."""
COLUMNS = ("settings", "score", "gain", "interval", "verdict", "training", "cost")
Finding = Literal["better", "worse", "not told apart", "too few documents", "failed"]


class TrialResult(BaseModel):
    """One row of the table."""

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
    told: dict[str, Any] = {"trial": trial} | training_cost(checkpoint.stats, price)
    if stats["faults"]:
        return TrialResult(verdict="failed", reason=" ".join(stats["faults"].values()), **told)
    metric = Metric.model_validate(stats["metric"])
    reference = "incumbent" if "incumbent" in stats["models"] else "base"
    # Of either side of the interval, and of each trial alone.
    level = (1 - CONFIDENCE) / 2 / trials
    scores = pq.read_table(measured.path / SCORES_NAME)
    found = compare(scores, metric, SPLIT, reference, level)
    score = stats["metrics"][f"{SPLIT}_{metric.name}"]["candidate"]["value"]
    if score is None:
        return TrialResult(verdict="failed", reason="Its scores are not finite numbers.", **told)
    return TrialResult(
        verdict=finding(found, settings.model_version.gate),
        reference=reference,
        metric=metric.name,
        score=score,
        gain=found.gain,
        gain_low=found.surest_gain,
        gain_high=found.largest_gain,
        documents=found.clusters,
        evaluation=stats["evaluation_fingerprint"],
        **told,
    )


def finding(found: Comparison, gate: GateSettings) -> Finding:
    """What a comparison says; what would not matter to the gate is no gain here either."""
    low, high = found.surest_gain, found.largest_gain
    if found.clusters < gate.minimum_documents:
        return "too few documents"
    if low is not None and low > 0 and found.gain >= gate.smallest_effect:
        return "better"
    return "worse" if high is not None and high < 0 else "not told apart"


def ranked(results: Iterable[TrialResult]) -> list[TrialResult]:
    """The largest gain first, what failed last."""
    return sorted(results, key=lambda one: -(one.gain if one.gain is not None else float("-inf")))


def rows(results: Iterable[TrialResult]) -> list[tuple[str, ...]]:
    """The table's rows in words, in the order of COLUMNS; keys by their last part."""
    return [
        (
            _short(one.trial),
            _number(one.score),
            _number(one.gain, "+"),
            f"{_number(one.gain_low, '+')} to {_number(one.gain_high, '+')}",
            one.verdict + (f": {one.reason}" if one.reason else ""),
            "" if one.training_seconds is None else format_duration(one.training_seconds),
            "" if one.cost is None else f"{one.cost:.2f}",
        )
        for one in ranked(results)
    ]


def caption(results: Iterable[TrialResult]) -> str:
    """What the figures of the table are."""
    measured = [one for one in results if one.gain is not None]
    if not measured:
        return "Nothing could be measured."
    one = measured[0]
    against = "the wanted version" if one.reference == "incumbent" else "the base model"
    metrics = dict.fromkeys(other.metric.replace("_", " ") for other in measured)
    told = (
        f"Score: {' or '.join(metrics)} on {one.documents} independent validation documents; gain "
        f"over {against}, all intervals together at {CONFIDENCE:.0%}. Nothing was promoted."
    )
    if len(metrics) > 1:
        return f"{told} Scores and gains in different metrics cannot be compared."
    if len({other.evaluation for other in measured}) > 1:
        told += (
            " The trials were not all measured on the same text in the same way, so small "
            "differences between them say nothing."
        )
    return told


def _short(trial: str) -> str:
    keys = (change.partition("=") for change in shlex.split(trial))
    return " ".join(f"{key.rpartition('.')[2]}{sign}{value}" for key, sign, value in keys)


def _number(value: float | None, sign: str = "") -> str:
    return "?" if value is None else f"{value:{sign}.4f}"


# A trial is the graph up to the checkpoint, and a measurement, with a record of its own; what is
# equal among trials is made once. Neither the registry nor the endpoint is among what it makes, so
# it moves neither.
@stage(code_version=CODE_VERSION, group="model", kinds={"pytorch"}, pool="training")
def trial_metrics(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
    identity: Identity,
    checkpoint: Artifact,
    base_model: Artifact,
) -> BuildPlan:
    """The trial's model, its base and the wanted version, measured on validation text."""
    # The metric that decides, and nothing besides.
    alone = {"generation": GenerationSettings(samples=0), "tasks": ()}
    settings = pipeline.settings.measured.model_copy(update=alone)
    shards = pipeline.record.current("tokenized_shards")
    inputs = {"tokenized_shards": shards.fingerprint}
    wanted = registry.open(pipeline).find("wanted")
    incumbent = None
    if wanted is not None:
        inputs["incumbent"] = wanted.model_fingerprint
        incumbent = ModelSource(path=wanted.model_url, fingerprint=wanted.weights)

    def build(draft: Draft) -> None:
        spec = evaluation_spec(pipeline, draft, checkpoint, shards, base_model, incumbent, settings)
        draft.stats |= training.evaluate(context, spec.model_copy(update={"split": SPLIT}))

    scoring = pipeline.settings.checkpoint.scoring()
    identity = identity.extend(
        settings=settings.content() | scoring | {"split": SPLIT},
        inputs=inputs,
        libraries=settings.libraries | package_of(pipeline.settings.checkpoint),
    )
    return BuildPlan(identity, build)


STAGES_OF_TEXT = (raw_corpus, clean_corpus, exam, study, tokenized_shards)
STAGES = (
    *(raw_corpus, clean_corpus, exam, study, base_model, tokenized_shards, checkpoint),
    trial_metrics,
)
"""What a trial makes; the exam, which is not taken, for the words that a study must not use."""


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
    """What a trial has made."""
    name = pipeline.settings.name
    return Pipeline(pipeline.store, name, layout.trial_record(name, hash_json({"trial": trial})))


def _begin_record(pipeline: PipelineResource, trial: Pipeline) -> None:
    """Begin with what is current in the pipeline's; corpora that the trial made before stay on
    record, since what is forgotten is erased from them, too."""
    history, before = pipeline.record.history(), trial.history().assets
    for name in (one.name for one in STAGES_OF_TEXT if one.name in before):
        made = before[name]
        own = history.assets.setdefault(name, made)
        known = {one.fingerprint for one in (own.current, *own.previous)}
        earlier = (made.current, *made.previous)
        own.previous += [one for one in earlier if one.fingerprint not in known]
    pipeline.store.write_bytes(trial.path, history.model_dump_json(indent=2).encode())


def run_trial(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    trial: Trial,
    resources: Mapping[str, Any],
) -> list[str]:
    """Make what a trial is about, in the step of `experiments`; the stages that were not there.

    Its record begins with what is current in the pipeline's, so held-out documents stay held out,
    and what the pipeline has made already is used.

    Args:
        resources: `spark`, `training`, `registry` and `serving` of the graph.

    Raises:
        UserError: what hinders a stage.
    """
    _begin_record(pipeline, trial_record(pipeline, trial.name))
    opened = TrialPipeline(
        config_path=pipeline.config_path, changes=trial.changes, trial=trial.name
    )
    made = []
    for made_by in STAGES:
        is_asked = made_by is not exam or opened.settings.study is not None
        if opened.settings.leaves_out(made_by.name) or not is_asked:
            continue
        context.log.info(f"{made_by.name} of the trial {trial.name}")
        made_by.materialize({**resources, "context": context, "pipeline": opened}, {})
        if (context.get_output_metadata("result") or {})["made_now"]:
            made.append(made_by.name)
    return made


ASSET = "experiments"
RESULT = "result"
"""Name of the metadata that holds a trial's whole result."""
UI_COLUMNS = ("settings", "gain", "interval", "verdict")
"""Those of the table's columns that fit the UI; the others are metadata by themselves."""


def build_experiments(settings: PipelineSettings) -> AssetsDefinition:
    """The asset of all trials; whoever materializes a partition runs that trial."""

    @asset(
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
        context: AssetExecutionContext,
        pipeline: PipelineResource,
        spark: SparkRunner,
        training: TrainingRunner,
        registry: RegistryResource,
        serving: ServingPlatform,
    ) -> MaterializeResult:
        resources = {"spark": spark, "training": training, "registry": registry, "serving": serving}
        with user_faults(pipeline):
            name = context.partition_key
            made = run_trial(context, pipeline, read_trial(pipeline, name), resources)
            done = _results(context.instance, pipeline, name)
            return MaterializeResult(metadata=_metadata(done[name], done, made))

    return experiments


def partitions(settings: PipelineSettings) -> DynamicPartitionsDefinition:
    """A pipeline's trials, by their names."""
    return DynamicPartitionsDefinition(name=f"{settings.name}_trials")


def read_trial(pipeline: PipelineResource, name: str) -> Trial:
    """The trial that a partition is named by; raises UserError where it cannot be tried."""
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise UserError(f"{name!r}: {error}. Name a partition KEY=VALUE KEY=VALUE.") from error
    trials = plan_trials(Path(pipeline.config_path), parse_changes(words))
    if [trial.name for trial in trials] != [name]:
        raise UserError(
            f"The partition {name!r} is another way to write {trials[0].name!r}, or holds more "
            "than one trial. Delete it, and add one for each trial."
        )
    return trials[0]


def _results(
    instance: DagsterInstance, pipeline: PipelineResource, newest: str
) -> dict[str, TrialResult]:
    """The results of all trials measured against what the newest was and in its metric, the table's
    rows.

    Their intervals hold together, whichever of the partitions was the best by chance.
    """
    settings = pipeline.settings
    names = instance.get_dynamic_partitions(str(partitions(settings).name))
    if newest not in names:
        raise UserError(
            f"The partition {newest!r} was deleted during its trial, so Dagster accepts no result "
            "for it. What was built is kept: add the partition again and materialize it, and the "
            "result is there at once."
        )
    found, references = {}, {}
    for name in names:
        record = trial_record(pipeline, name)
        checkpoint, measured = map(record.find_current, ("checkpoint", "trial_metrics"))
        if checkpoint and measured:
            found[name] = read_result(settings, name, checkpoint, measured, len(names))
            references[name] = measured.manifest.inputs.get("incumbent"), measured.stats["metric"]
    return {name: found[name] for name in found if references[name] == references[newest]}


def _metadata(
    result: TrialResult, done: Mapping[str, TrialResult], made: Sequence[str]
) -> dict[str, Any]:
    """Of one result, with the table of all so far."""
    figures = {"score", "gain", "gain_low", "gain_high", "training_seconds", "cost"}
    shown = (
        # The UI breaks cells at spaces.
        [row[COLUMNS.index(name)].replace("=", " = ") for name in UI_COLUMNS]
        for row in rows(done.values())
    )
    return {
        "summary": f"{result.trial}: {result.verdict}",
        "verdict": result.verdict,
        "trials": table(UI_COLUMNS, shown),
        "measured": caption(done.values()),
        "made": ", ".join(made) or "nothing; everything existed already",
        **readable(result.model_dump(include=figures, exclude_none=True)),
        RESULT: MetadataValue.json(result.model_dump(mode="json")),
    }
