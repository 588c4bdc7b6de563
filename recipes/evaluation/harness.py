"""Tasks of lm-eval: its own, a project's files, and multiple choice written in their form."""

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.errors import UserError, first_line
from artifacts.reasons import reason_of
from recipes.evaluation.settings import TaskSettings, task_files

SEED = 1234


class TaskFault(UserError):
    """A task cannot be run, whichever model is asked: no fault of a model."""


@dataclass(frozen=True)
class TaskScores:
    """One metric of one task, sample by sample."""

    task: str
    metric: str
    samples: list[str]
    """Which question: its `document` where the task's file names one, else its number, in a group
    behind its part's name."""
    clusters: list[str]
    values: np.ndarray
    """Shape (samples,); the metric is their mean."""
    chosen: list[int | None]
    """The choice that a model found likeliest, by its place; None where a task has no choices."""
    figure: float | None = None
    """What lm-eval makes of all samples where the metric is no mean, as a perplexity; of such a
    one, no sample is here."""

    @property
    def value(self) -> float:
        """The metric."""
        return float(self.values.mean()) if self.figure is None else self.figure


def run_tasks(lm: Any, tasks: Sequence[TaskSettings], folders: Sequence[Path]) -> list[TaskScores]:
    """Ask one of lm-eval's models lm-eval's tasks, its own and those of files in folders.

    Raises TaskFault where a task is unknown, or lm-eval cannot run it, as when its file is wrong or
    the hub out of reach; what the machine fails in passes as it is.
    """
    from lm_eval import simple_evaluate

    manager = _task_manager(frozenset(task.name for task in tasks), *map(str, folders))
    scores = []
    for task in tasks:
        with _faults_of(task, manager):
            results = simple_evaluate(
                model=lm,
                tasks=[task.name],
                num_fewshot=task.shots,
                limit=task.limit,
                task_manager=manager,
                # Intervals are those of `recipes.evaluation.statistics`, without resampling.
                bootstrap_iters=0,
                log_samples=True,
                random_seed=SEED,
                numpy_random_seed=SEED,
                torch_random_seed=SEED,
                fewshot_random_seed=SEED,
            )
        scores += _scores(task.name, results)
    return scores


def load_tasks(tasks: Sequence[TaskSettings], folders: Sequence[Path]) -> None:
    """Raise TaskFault where one of the tasks is unknown or cannot be loaded."""
    manager = _task_manager(frozenset(task.name for task in tasks), *map(str, folders))
    for task in tasks:
        with _faults_of(task, manager):
            manager.load(task.name)


@contextmanager
def _faults_of(task: TaskSettings, manager: Any) -> Iterator[None]:
    if task.name not in manager.all_tasks:
        raise TaskFault(
            f"lm-eval knows no task {task.name!r}: no file that it can read has it. Give the "
            "file's folder in `eval_metrics.task_folder`, or another name in `eval_metrics.tasks`."
        )
    try:
        yield
    except Exception as error:
        # Imported here: settings load this module, and nothing before a training needs torch.
        import torch

        # torch raises most of what CUDA's libraries report as RuntimeError itself.
        of_machine = isinstance(error, RuntimeError) and (
            str(error).startswith(("CUDA", "cuDNN", "NCCL")) or reason_of(error) is not None
        )
        if of_machine or isinstance(error, MemoryError | torch.AcceleratorError):
            raise
        # What is wrong with a task surfaces as errors of lm-eval, datasets, jinja or its own code.
        raise TaskFault(
            f"lm-eval cannot run the task {task.name!r} ({type(error).__name__}: "
            f"{first_line(error)}). Correct its file or `shots`, install what it needs, use tasks "
            "from local files where no hub can be reached, or leave the task out of "
            "`eval_metrics.tasks`."
        ) from error


@lru_cache(maxsize=1)
def _task_manager(names: frozenset[str], *folders: str) -> Any:
    """lm-eval's index of tasks: of those in folders alone where they suffice.

    Kept for the next model: to read lm-eval's own 14,683 takes eight seconds of a core.
    """
    from lm_eval.tasks import TaskManager

    local = TaskManager(include_path=list(folders), include_defaults=False)
    return local if names <= {*local.all_tasks} else TaskManager(include_path=list(folders))


def digest_tasks(tasks: Sequence[TaskSettings], folders: Sequence[Path]) -> dict[str, str]:
    """What decides the questions: lm-eval's version and the local task files' content."""
    if not tasks:
        return {}
    state = hashlib.sha256()
    for folder in folders:
        for path in task_files(folder):
            content = path.read_text(errors="replace")
            # Task files of this run name their own folder, which says nothing about the questions.
            place = str(folder.absolute())
            for written in (place, *(json.dumps(p)[1:-1] for p in (place, glob.escape(place)))):
                content = content.replace(written, "")
            state.update(f"{path.relative_to(folder)}\0{content}\0".encode())
    return {"lm_eval": version("lm_eval"), "files": state.hexdigest()}


def _scores(task: str, results: dict[str, Any]) -> list[TaskScores]:
    """A group such as mmlu is one score over the samples of all its parts that have the metric,
    unless it weighs them otherwise."""
    by_filter: dict[str, list[dict[str, Any]]] = {}
    means: dict[tuple[str, str], bool] = {}
    for part, samples in results["samples"].items():
        for sample in samples:
            if len(results["samples"]) > 1:
                # Each part counts its questions from 0.
                sample["doc_id"] = f"{part}: {sample['doc_id']}"
            by_filter.setdefault(sample["filter"], []).append(sample)
            for metric in sample["metrics"]:
                means.setdefault((metric, sample["filter"]), True)
        for (metric, name), so_far in means.items():
            of_part = [s[metric] for s in samples if s["filter"] == name and metric in s["metrics"]]
            if of_part:
                figure = results["results"][part].get(f"{metric},{name}")
                means[metric, name] = so_far and _is_mean(of_part, figure)
    scores = []
    for (metric, name), is_mean in means.items():
        # A task such as gsm8k scores each answer once for each way to read it.
        label = f"{metric}_{name.replace('-', '_')}" if len(by_filter) > 1 else metric
        samples = [sample for sample in by_filter[name] if metric in sample["metrics"]]
        figure = results["results"].get(task, {}).get(f"{metric},{name}")
        has_figure = isinstance(figure, int | float)
        # A group may weigh its parts otherwise than by their samples.
        if not is_mean or (has_figure and not _is_mean([row[metric] for row in samples], figure)):
            if has_figure:
                scores.append(TaskScores(task, label, [], [], np.empty(0), [], float(figure)))
            continue
        documents = [str(s["doc"].get("document", s["doc_id"])) for s in samples]
        clusters = [str(s["doc"].get("cluster", s["doc_id"])) for s in samples]
        choices = [_likeliest(sample["filtered_resps"]) for sample in samples]
        values = np.array([float(sample[metric]) for sample in samples])
        scores.append(TaskScores(task, label, documents, clusters, values, choices))
    return scores


def _is_mean(values: Sequence[Any], figure: Any) -> bool:
    """Whether lm-eval's figure is the mean of the samples' values."""
    if not all(isinstance(value, int | float) for value in [*values, figure]):
        return False
    return bool(np.isclose(np.mean(values), figure, equal_nan=True))


def _likeliest(answers: Sequence[Any]) -> int | None:
    """Of choices, each with its log-likelihood, the place of the likeliest."""
    if not all(isinstance(answer, list | tuple) and len(answer) == 2 for answer in answers):
        return None
    return int(np.argmax([likelihood for likelihood, _ in answers]))


_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  cache_dir: {cache}
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def write_task(name: str, questions: Sequence[dict[str, object]], folder: Path) -> None:
    """Write questions, each with `context`, `choices` and `answer`, as one of lm-eval's tasks.

    The library that reads them keeps copies, in a folder beside them so that both are removed
    together: they may hold text that is forgotten one day.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.absolute() / f"{name}.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    cache = folder.absolute() / ".cache"
    # `datasets` takes the path of a file for a pattern, in which a bracket begins a class.
    pattern = glob.escape(str(path))
    task = _TASK.format(name=name, path=json.dumps(pattern), cache=json.dumps(str(cache)))
    (folder / f"{name}.yaml").write_text(task)
