"""What is measured of models: scores of examples, metrics with intervals, tables of scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from artifacts.shards.format import ShardStats
from artifacts.store.identity import hash_json
from recipes.evaluation.documents import Documents, TokenizedDocument, digest
from recipes.evaluation.harness import TaskScores
from recipes.evaluation.settings import Metric, Rounds, TaskSettings
from recipes.evaluation.statistics import Interval, interval, mean_interval


@dataclass(frozen=True)
class ExampleScores:
    """One model's scores of some examples."""

    values: dict[str, np.ndarray]
    """Name to a score of each example, shape (examples,); the metric that decides among them."""
    figures: dict[str, float] = field(default_factory=dict)
    """Name to what is no mean over examples, such as a macro-averaged F1."""
    samples: list[dict[str, str]] = field(default_factory=list)
    """A few examples with what the model made of them, for people to look at."""
    details: dict[str, Any] = field(default_factory=dict)
    """More that the asset shows, as JSON."""


SHOWN = 2
"""Samples of a scorer, for people to look at."""


def samples(
    tokenizer: Any,
    documents: Documents,
    prompts: Sequence[np.ndarray],
    completions: Sequence[str],
) -> list[dict[str, str]]:
    """A dict with `document`, `prompt` and `completion` for each of the prompts."""
    return [
        {
            "document": document.id,
            "prompt": tokenizer.decode(prompt, skip_special_tokens=True),
            "completion": completion,
        }
        for document, prompt, completion in zip(documents, prompts, completions, strict=False)
    ]


class Scorer(Protocol):
    """Scores models on held-out examples."""

    @property
    def metric(self) -> Metric:
        """What the gate decides by."""

    @property
    def identity(self) -> Any:
        """What decides the scores beside the examples, as JSON."""
        return {}

    def score(self, folder: Path, examples: Documents, stats: ShardStats) -> ExampleScores:
        """The scores of the model in a folder; raises UserError where it cannot be read."""


FINGERPRINT_KEY = "evaluation_fingerprint"
"""In the result and in the metadata of the scores, so that they cannot be mixed up."""
HELD_OUT_TASK = "held_out"
ROLES = ("base", "candidate", "incumbent")


@dataclass(frozen=True)
class Data:
    """What all models are measured on."""

    tasks: dict[str, list[TokenizedDocument]]
    """Task name to documents."""
    prompts: list[TokenizedDocument]
    """Held-out documents to continue."""
    task_folders: list[Path]
    """Where the files of lm-eval's tasks are."""
    lm_eval_tasks: list[TaskSettings]
    """What the settings name, then the exam's."""
    metric: Metric
    """What the models are compared by."""
    fingerprint: str
    """Of data, code and settings, not of the models: figures with one fingerprint compare."""
    share: float = 1.0
    """Of all held-out documents, those within the budget."""
    later: tuple[list[TokenizedDocument], ...] = ()
    """Held-out documents that are measured only if those before them do not decide, by round."""
    planned: int = 1
    """Rounds that the budget allows."""

    @property
    def rounds(self) -> Rounds:
        """How far the measurement has come."""
        measured = self.planned - len(self.later)
        return Rounds(measured=measured, planned=self.planned, share=self.share)

    def next_round(self) -> "Data":
        """What the next round measures: held-out documents alone."""
        added, *later = self.later
        return replace(
            self,
            tasks={HELD_OUT_TASK: added},
            prompts=[],
            lm_eval_tasks=[],
            fingerprint=hash_json({"before": self.fingerprint, "added": digest(added)}),
            later=tuple(later),
        )

    def with_round(self, added: "Data") -> "Data":
        """This and the next round together."""
        held_out = self.tasks[HELD_OUT_TASK] + added.tasks[HELD_OUT_TASK]
        return replace(
            self,
            tasks=self.tasks | {HELD_OUT_TASK: held_out},
            # It covers this round as well, see `next_round`.
            fingerprint=added.fingerprint,
            later=added.later,
        )


@dataclass(frozen=True)
class Scores:
    """One model's scores."""

    values: dict[str, np.ndarray]
    """Task name to its metric's score of each document, shape (documents,), such as its bits."""
    samples: list[dict[str, str]]
    """Completions."""
    tasks: list[TaskScores]
    """lm-eval's tasks and other figures, sample by sample."""
    figures: dict[str, float] = field(default_factory=dict)
    """Metric name to what is no mean over samples."""
    details: dict[str, Any] = field(default_factory=dict)
    """More that the asset shows."""

    def with_round(self, added: "Scores") -> "Scores":
        """These and those of the next round's documents."""
        held_out = np.concatenate([self.values[HELD_OUT_TASK], added.values[HELD_OUT_TASK]])
        return replace(self, values=self.values | {HELD_OUT_TASK: held_out})


def metrics(data: Data, scores: dict[str, Scores]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Metric name to role to value with its 95% interval."""
    result: dict[str, dict[str, dict[str, float | None]]] = {}
    for role, of_role in scores.items():
        intervals: dict[str, Interval] = {}
        for task, documents in data.tasks.items():
            metric, values = data.metric.of(task), of_role.values[task]
            clusters = np.array([document.cluster for document in documents])
            intervals[f"{task}_{metric.name}"] = (
                interval(values, sizes(documents, metric), clusters)
                if metric.is_bits
                else mean_interval(values, clusters)
            )
        for score in of_role.tasks:
            intervals[f"{score.task}_{score.metric}"] = (
                mean_interval(score.values, np.array(score.clusters))
                if score.figure is None
                else Interval(score.figure)
            )
        intervals |= {name: Interval(value) for name, value in of_role.figures.items()}
        for name, figure in intervals.items():
            result.setdefault(name, {})[role] = figure.figures()
    return result


def sizes(documents: Documents, metric: Metric) -> np.ndarray:
    """What each document counts in the metric: its bytes, or one."""
    return np.array([document.bytes if metric.is_bits else 1 for document in documents], float)


def score_table(data: Data, scores: dict[str, Scores]) -> pa.Table:
    """One row a document: what is known of it, and `score_<role>` under each model; the metric is a
    sum of scores over a sum of sizes.

    A model that was not measured has nulls; one that answered NaN has NaN.
    """
    rows = [(task, document) for task, documents in data.tasks.items() for document in documents]
    counts = [sizes(documents, data.metric.of(task)) for task, documents in data.tasks.items()]
    columns: dict[str, Any] = {
        "task": [task for task, _ in rows],
        "document": [document.id for _, document in rows],
        "cluster": [document.cluster for _, document in rows],
        "source": [document.source for _, document in rows],
        "slice": [document.slice for _, document in rows],
        "size": np.concatenate(counts),
        "tokens": [document.predicted + 1 for _, document in rows],
    }
    for role in ROLES:
        column = pa.nulls(len(rows), pa.float64())
        if role in scores:
            values = np.concatenate([scores[role].values[task] for task in data.tasks])
            # NaN stays NaN, as null stands for a model that was not measured.
            column = pa.array(values, from_pandas=False)
        columns[f"score_{role}"] = column
    return pa.table(columns).replace_schema_metadata({FINGERPRINT_KEY: data.fingerprint})


def task_table(scores: dict[str, Scores]) -> pa.Table:
    """One row a sample of a task: task, metric, sample, cluster, each model's score and choice."""
    index = {
        role: {(s.task, s.metric): s for s in of_role.tasks if s.figure is None}
        for role, of_role in scores.items()
    }
    # Models share the table's rows, so it has only what all of them were asked.
    first, *others = index.values()
    common = [key for key in first if all(key in other for other in others)]
    some = [first[key] for key in common]
    columns: dict[str, Any] = {
        "task": pa.array([s.task for s in some for _ in s.values], pa.string()),
        "metric": pa.array([s.metric for s in some for _ in s.values], pa.string()),
        "sample": pa.array([name for s in some for name in s.samples], pa.string()),
        "cluster": pa.array([name for s in some for name in s.clusters], pa.string()),
    }
    rows = len(columns["task"])
    for role in ROLES:
        column = pa.nulls(rows, pa.float64())
        if role in index and rows:
            column = pa.array(np.concatenate([index[role][key].values for key in common]))
        columns[f"score_{role}"] = column
        choices = (
            [choice for key in common for choice in index[role][key].chosen]
            if role in index
            else None
        )
        columns[f"chosen_{role}"] = pa.array(choices or [None] * rows, pa.int16())
    return pa.table(columns)
