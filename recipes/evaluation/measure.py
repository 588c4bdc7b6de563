"""Measures every model of a spec on the same data and writes one result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.model.hugging_face import read_tokenizer
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.store.identity import hash_json
from recipes.evaluation import models
from recipes.evaluation.contamination import find_contamination
from recipes.evaluation.documents import (
    Document,
    digest,
    general_documents,
    held_out_documents,
    in_rounds,
    newest_documents,
)
from recipes.evaluation.examples import Scorer
from recipes.evaluation.harness.multiple_choice import (
    MULTIPLE_CHOICE_TASK,
    make_questions,
    write_task,
)
from recipes.evaluation.harness.tasks import digest_tasks
from recipes.evaluation.metric import ANSWER_BITS_PER_BYTE, BITS_PER_BYTE, GENERAL_TASK, Metric
from recipes.evaluation.model_scores import measure, to_json
from recipes.evaluation.results import (
    FINGERPRINT_KEY,
    HELD_OUT_TASK,
    Data,
    Scores,
    metrics,
    score_table,
    sizes,
    task_table,
)
from recipes.evaluation.settings import (
    CODE_VERSION,
    SAMPLES_NAME,
    SCORES_NAME,
    ModelSource,
    Question,
    Rounds,
    TaskSettings,
)
from recipes.evaluation.spec import EvaluationSpec
from recipes.evaluation.statistics.bounds import is_decided
from recipes.spec import RESULT_NAME

NEWEST = "_newest"
"""Ends the name of the newest slice by itself: what was learnt of the text that arrived last."""
TASKS_NAME = "task_scores.parquet"
MULTIPLE_CHOICE_FOLDER = "multiple_choice"


def evaluate(spec: EvaluationSpec, report: Report, scorer: Scorer | None = None) -> dict[str, Any]:
    """Measure the spec's models and write result, scores and samples into its output folder.

    Args:
        scorer: scores examples one by one; without one, bits of documents are measured.

    Returns:
        The content of `result.json`, which is the artifact's `stats`: `metrics` (name to role to
        value, low, high), `evaluation_fingerprint`, `metric` (the one that decides),
        `documents`, `tokens`, `rounds` (how far it went), `precision`, `vocab_size`, `models`,
        `faults` (role to why that model could not be measured), `contamination` (what of the
        held-out text was trained on, see `find_contamination`).

    Raises:
        UserError: the base cannot be read, or the data is empty. A candidate or incumbent that
            cannot be read is a fault in the result, for the gate to judge.
    """
    data = read_data(spec, scorer)
    planned = 1 + len(data.later)
    data, scores, faults = _measure_until_decided(data, spec, report, scorer)
    rounds = Rounds(measured=planned - len(data.later), planned=planned, share=data.share)
    result = {
        "metrics": metrics(data, scores, spec.settings),
        FINGERPRINT_KEY: data.fingerprint,
        "metric": data.metric.model_dump(),
        "documents": {task: len(documents) for task, documents in data.tasks.items()},
        "tokens": {task: _count_tokens(documents) for task, documents in data.tasks.items()},
        "rounds": rounds.model_dump(),
        "precision": models.precision(),
        "vocab_size": spec.shard_stats.vocab_size,
        "models": {role: source.fingerprint for role, source in _sources(spec)},
        "faults": faults,
        "details": {role: of_role.details for role, of_role in scores.items() if of_role.details},
        "contamination": None if scorer else _contamination(data, spec, report),
    }
    output = Path(spec.output)
    output.mkdir(parents=True, exist_ok=True)
    pq.write_table(score_table(data, scores), output / SCORES_NAME)
    if any(of_role.tasks for of_role in scores.values()):
        pq.write_table(task_table(scores), output / TASKS_NAME)
    _write_json(output / SAMPLES_NAME, {role: s.samples for role, s in scores.items()})
    _write_json(output / RESULT_NAME, result)
    return result


def _measure_until_decided(
    data: Data, spec: EvaluationSpec, report: Report, scorer: Scorer | None
) -> tuple[Data, dict[str, Scores], dict[str, str]]:
    """Round after round until the spec's question is answered: all data measured, scores, faults.

    Where no answer comes, the whole budget is measured; without a question, at once.
    """
    planned = 1 + len(data.later)
    scores, faults = _measure_models(data, spec, report, scorer)
    while data.later and not faults:
        rounds = Rounds(measured=planned - len(data.later), planned=planned, share=data.share)
        if spec.question and _is_answered(spec.question, data, scores, rounds):
            break
        more = data.next_round()
        report(f"The verdict is open: round {rounds.measured + 1} of {planned}")
        added, faults = _measure_models(more, spec, report, scorer)
        if not faults:
            data = data.with_round(more)
            scores = {role: scores[role].with_round(added[role]) for role in scores}
    return data, scores, faults


def _is_answered(question: Question, data: Data, scores: dict[str, Scores], rounds: Rounds) -> bool:
    documents = data.tasks[HELD_OUT_TASK]
    candidate, reference = scores["candidate"], scores.get("incumbent", scores["base"])
    return is_decided(
        candidate.values[HELD_OUT_TASK] - reference.values[HELD_OUT_TASK],
        sizes(documents, data.metric),
        np.array([document.cluster for document in documents]),
        question,
        rounds,
    )


def _measure_models(
    data: Data, spec: EvaluationSpec, report: Report, scorer: Scorer | None
) -> tuple[dict[str, Scores], dict[str, str]]:
    """Scores by role, and why a candidate or incumbent has none."""
    tokens = sum(map(_count_tokens, data.tasks.values()))
    report(f"Measuring {_describe_models(spec)} on {tokens:,} tokens")
    measured: dict[str, Scores] = {}
    scores: dict[str, Scores] = {}
    faults: dict[str, str] = {}
    for role, source in _sources(spec):
        if source.fault:
            faults[role] = source.fault
            continue
        if source.fingerprint not in measured:
            try:
                measured[source.fingerprint] = measure(source, role, data, spec, report, scorer)
            except UserError as error:
                if role == "base":
                    raise
                faults[role] = str(error)
                continue
        scores[role] = measured[source.fingerprint]
    return scores, faults


def _count_tokens(documents: Sequence[Document]) -> int:
    return sum(len(document.tokens) for document in documents)


def read_data(spec: EvaluationSpec, scorer: Scorer | None = None) -> Data:
    """The documents that the settings choose, and the fingerprint of the whole evaluation."""

    settings = spec.settings
    tokenizer = read_tokenizer(Path(spec.base.path))
    shards = (Path(spec.shards), spec.shard_stats, tokenizer, settings, spec.split)
    budget = held_out_documents(*shards)
    metric = _metric(spec, scorer)
    # Figures of examples are no sums over rounds, so they are measured at once.
    rounds = in_rounds(budget, settings) if spec.question and metric == BITS_PER_BYTE else [budget]
    first, *later = rounds
    tasks: dict[str, list[Document]] = {spec.split: first}
    if metric.has_general:
        tasks[GENERAL_TASK] = general_documents(
            tokenizer, spec.shard_stats, settings.general_tokens, settings.seed
        )
    if newest := newest_documents(*shards):
        tasks[f"{spec.split}{NEWEST}"] = newest
    task_folders = [Path(settings.task_folder)] if settings.task_folder else []
    lm_eval_tasks = settings.lm_eval_tasks
    if settings.multiple_choice.questions:
        task_folders.append(_write_multiple_choice(spec, tokenizer))
        lm_eval_tasks.insert(0, TaskSettings(name=MULTIPLE_CHOICE_TASK))
    identity = {
        "code_version": CODE_VERSION,
        "settings": settings.content(),
        "sequence_length": spec.shard_stats.sequence_length,
        "metric": metric.model_dump(),
        "scorer": scorer.identity if scorer else None,
        "data": {task: digest(documents) for task, documents in tasks.items()}
        | digest_tasks(lm_eval_tasks, task_folders),
    }
    return Data(
        tasks=tasks,
        prompts=first[: settings.generation.samples],
        task_folders=task_folders,
        lm_eval_tasks=lm_eval_tasks,
        summaries=settings.summaries,
        metric=metric,
        fingerprint=hash_json(identity),
        share=len(budget)
        / sum(shard.documents for shard in spec.shard_stats.shards if shard.split == spec.split),
        later=tuple(later),
    )


def _metric(spec: EvaluationSpec, scorer: Scorer | None) -> Metric:
    if scorer:
        return scorer.metric
    return ANSWER_BITS_PER_BYTE if spec.shard_stats.form == "conversations" else BITS_PER_BYTE


def _contamination(data: Data, spec: EvaluationSpec, report: Report) -> dict[str, Any] | None:
    length = spec.settings.contamination_tokens
    if not length:
        return None
    found = find_contamination(data.tasks[spec.split], Path(spec.shards), spec.shard_stats, length)
    measured = spec.split.replace("_", "-")
    report(
        f"{found['mean_share']:.1%} of the {measured} runs of {length} tokens stand in the "
        f"training rows; {found['mostly_trained_on']} of {found['documents']} documents do for the "
        "most part"
    )
    return found


def _write_multiple_choice(spec: EvaluationSpec, tokenizer: Any) -> Path:
    """Make the multiple-choice set from the whole split; returns its folder."""
    everything = spec.settings.model_copy(update={"held_out_tokens": None, "document_tokens": None})
    documents = held_out_documents(
        Path(spec.shards), spec.shard_stats, tokenizer, everything, spec.split
    )
    folder = Path(spec.output) / MULTIPLE_CHOICE_FOLDER
    write_task(make_questions(documents, tokenizer, spec.settings.multiple_choice), folder)
    return folder


def _sources(spec: EvaluationSpec) -> list[tuple[str, ModelSource]]:
    sources = [("base", spec.base), ("candidate", spec.candidate), ("incumbent", spec.incumbent)]
    return [(role, source) for role, source in sources if source is not None]


def _describe_models(spec: EvaluationSpec) -> str:
    distinct = {source.fingerprint: role for role, source in reversed(_sources(spec))}
    return " and ".join(reversed(distinct.values()))


def _write_json(path: Path, content: Any) -> None:
    files.write(path, to_json(content))
