"""Measures every model of a spec on the same data and writes one result."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from artifacts.cache import cache_key, read_cached, write_cached
from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.store.identity import hash_json
from recipes.evaluation.contamination import find_contamination
from recipes.evaluation.documents import (
    Document,
    check_vocabulary,
    digest,
    general_documents,
    held_out_documents,
    newest_documents,
)
from recipes.evaluation.examples import Scorer
from recipes.evaluation.metric import ANSWER_BITS_PER_BYTE, BITS_PER_BYTE, Metric
from recipes.evaluation.multiple_choice import MULTIPLE_CHOICE_TASK, make_questions, write_task
from recipes.evaluation.results import (
    FINGERPRINT_KEY,
    Data,
    Scores,
    metrics,
    score_table,
    task_table,
)
from recipes.evaluation.settings import (
    CODE_VERSION,
    EvaluationSpec,
    ModelSource,
    TaskSettings,
)
from recipes.evaluation.summaries import score_summaries
from recipes.evaluation.tasks import TaskScores, digest_tasks, run_tasks

NEWEST_TASK = "held_out_newest"
"""The newest slice of held-out text by itself: what was learnt of the text that arrived last."""
RESULT_NAME = "result.json"
SCORES_NAME = "scores.parquet"
SAMPLES_NAME = "samples.json"
TASKS_NAME = "task_scores.parquet"
MULTIPLE_CHOICE_FOLDER = "multiple_choice"


def evaluate(spec: EvaluationSpec, report: Report, scorer: Scorer | None = None) -> dict[str, Any]:
    """Measure the spec's models and write result, scores and samples into its output folder.

    Args:
        scorer: scores examples one by one; without one, bits of documents are measured.

    Returns:
        The content of `result.json`, which is the artifact's `stats`: `metrics` (name to role to
        value, low, high), `evaluation_fingerprint`, `metric` (the one that decides),
        `documents`, `tokens`, `precision`, `vocab_size`, `models`, `faults` (role to why that model
        could not be measured), `contamination` (what of the held-out text was trained on, see
        `find_contamination`).

    Raises:
        UserError: the base cannot be read, or the data is empty. A candidate or incumbent that
            cannot be read is a fault in the result, for the gate to judge.
    """
    from recipes.evaluation import models

    data = read_data(spec, scorer)
    tokens = sum(len(d.tokens) for documents in data.tasks.values() for d in documents)
    report(f"Measuring {_describe_models(spec)} on {tokens:,} tokens")
    measured: dict[str, Scores] = {}
    scores: dict[str, Scores] = {}
    faults: dict[str, str] = {}
    for role, source in _sources(spec):
        if source.fingerprint not in measured:
            try:
                measured[source.fingerprint] = measure(source, role, data, spec, report, scorer)
            except UserError as error:
                if role == "base":
                    raise
                faults[role] = str(error)
                continue
        scores[role] = measured[source.fingerprint]
    result = {
        "metrics": metrics(data, scores, spec.settings),
        FINGERPRINT_KEY: data.fingerprint,
        "metric": data.metric.model_dump(),
        "documents": {task: len(documents) for task, documents in data.tasks.items()},
        "tokens": {task: sum(len(d.tokens) for d in ds) for task, ds in data.tasks.items()},
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


def read_data(spec: EvaluationSpec, scorer: Scorer | None = None) -> Data:
    """The documents that the settings choose, and the fingerprint of the whole evaluation."""
    from recipes.evaluation import models

    settings = spec.settings
    tokenizer = models.load_tokenizer(Path(spec.base.path))
    held_out = held_out_documents(Path(spec.shards), spec.shard_stats, tokenizer, settings)
    tasks = {"held_out": held_out}
    metric = _metric(spec, scorer)
    if metric.has_general:
        tasks["general"] = general_documents(
            tokenizer, spec.shard_stats, settings.general_tokens, settings.seed
        )
    if newest := newest_documents(Path(spec.shards), spec.shard_stats, tokenizer, settings):
        tasks[NEWEST_TASK] = newest
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
    prompts = held_out[: settings.generation.samples]
    return Data(tasks, prompts, task_folders, lm_eval_tasks, metric, hash_json(identity))


def _metric(spec: EvaluationSpec, scorer: Scorer | None) -> Metric:
    if scorer:
        return scorer.metric
    return ANSWER_BITS_PER_BYTE if spec.shard_stats.form == "conversations" else BITS_PER_BYTE


def _contamination(data: Data, spec: EvaluationSpec, report: Report) -> dict[str, Any] | None:
    length = spec.settings.contamination_tokens
    if not length:
        return None
    found = find_contamination(data.tasks["held_out"], Path(spec.shards), spec.shard_stats, length)
    report(
        f"{found['mean_share']:.1%} of the held-out runs of {length} tokens stand in the training "
        f"rows; {found['mostly_trained_on']} of {found['documents']} documents do for the most part"
    )
    return found


def _write_multiple_choice(spec: EvaluationSpec, tokenizer: Any) -> Path:
    """Make the multiple-choice set from the whole held-out split; returns its folder."""
    everything = spec.settings.model_copy(update={"held_out_tokens": None, "document_tokens": None})
    documents = held_out_documents(Path(spec.shards), spec.shard_stats, tokenizer, everything)
    folder = Path(spec.output) / MULTIPLE_CHOICE_FOLDER
    write_task(make_questions(documents, tokenizer, spec.settings.multiple_choice), folder)
    return folder


def measure(
    source: ModelSource,
    role: str,
    data: Data,
    spec: EvaluationSpec,
    report: Report,
    scorer: Scorer | None = None,
) -> Scores:
    """One model's scores, from the cache where it was measured before on the same data."""
    key = scores_key(data, source)
    known = read_cached(spec.cache, key) if spec.cache else None
    if known is not None:
        report(f"{role}: measured before on the same data")
        return _read_scores(known)
    report(f"{role}: loading {source.path}")
    scores = (
        _scored_examples(scorer, Path(source.path), role, data, spec, report)
        if scorer
        else _measured_bits(source, role, data, spec, report)
    )
    if spec.cache:
        write_cached(spec.cache, key, _to_json(asdict(scores)))
    return scores


def _scored_examples(
    scorer: Scorer, folder: Path, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> Scores:
    found = {
        task: scorer.score(folder, documents, spec.shard_stats)
        for task, documents in data.tasks.items()
    }
    values = {task: of_task.values[scorer.metric.name] for task, of_task in found.items()}
    others = [
        TaskScores(task, name, [d.id for d in documents], [d.cluster for d in documents], scores)
        for task, documents in data.tasks.items()
        for name, scores in found[task].values.items()
        if name != scorer.metric.name
    ]
    for task, of_task in values.items():
        report(
            f"{role}: {scorer.metric.unit} {of_task.mean():.4f} on {len(of_task)} {task} examples"
        )
    figures = {f"{task}_{name}": v for task in found for name, v in found[task].figures.items()}
    main = found["held_out"]
    return Scores(values, main.samples, others, figures, main.details)


def _measured_bits(
    source: ModelSource, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> Scores:
    from recipes.evaluation import models
    from recipes.model.precision import mixed_precision

    model = models.load_model(Path(source.path))
    bits = {}
    with mixed_precision(models.precision(), models.device()):
        for task, documents in data.tasks.items():
            check_vocabulary(documents, model.config.vocab_size, source.path)
            bits[task] = _score_task(model, role, task, documents, spec, report)
    figures = {}
    if spec.shard_stats.form == "conversations":
        predicted = sum(document.predicted for document in data.tasks["held_out"])
        figures["held_out_perplexity"] = 2.0 ** float(bits["held_out"].sum() / predicted)
    return Scores(bits, *_written(model, role, data, spec, report), figures)


def _written(
    model: Any, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> tuple[list[dict[str, str]], list[TaskScores]]:
    """Completions, and answers to lm-eval's tasks, both in the precision of the endpoint."""
    from recipes.evaluation import models

    settings = spec.settings
    if not data.prompts and not data.lm_eval_tasks and not settings.summaries:
        return [], []
    tokenizer, model = models.load_tokenizer(Path(spec.base.path)), models.as_served(model)
    samples, scored = [], []
    if data.prompts:
        report(f"{role}: writing {len(data.prompts)} completions")
        samples = models.complete(model, tokenizer, data.prompts, settings.generation)
    if data.lm_eval_tasks:
        from recipes.evaluation.shared_context import SharedContextLM

        report(f"{role}: answering {', '.join(task.name for task in data.lm_eval_tasks)}")
        lm = SharedContextLM(model, tokenizer, settings.batch_tokens)
        scored = run_tasks(lm, data.lm_eval_tasks, data.task_folders)
    if settings.summaries:
        report(f"{role}: writing the summaries of {settings.summaries.path}")
        scored += score_summaries(model, tokenizer, settings.summaries)
    for one in scored:
        report(f"{role}: {one.task} {one.metric} {one.values.mean():.4f}")
    return samples, scored


def _score_task(
    model: Any,
    role: str,
    task: str,
    documents: Sequence[Document],
    spec: EvaluationSpec,
    report: Report,
) -> np.ndarray:
    from recipes.evaluation.bits import document_bits

    bits = document_bits(
        model,
        documents,
        spec.shard_stats.sequence_length,
        spec.settings.batch_tokens,
        lambda line: report(f"{role}, {task}: {line}"),
    )
    value = bits.sum() / sum(document.bytes for document in documents)
    report(f"{role}: {value:.4f} bits per byte on {len(documents)} {task} documents")
    return bits


def _sources(spec: EvaluationSpec) -> list[tuple[str, ModelSource]]:
    sources = [("base", spec.base), ("candidate", spec.candidate), ("incumbent", spec.incumbent)]
    return [(role, source) for role, source in sources if source is not None]


def _describe_models(spec: EvaluationSpec) -> str:
    distinct = {source.fingerprint: role for role, source in reversed(_sources(spec))}
    return " and ".join(reversed(distinct.values()))


def scores_key(data: Data, source: ModelSource) -> str:
    """The cache's key of a model's scores: what is measured, by what and on which device."""
    import torch

    from recipes.evaluation import models

    device = models.device()
    is_cuda = device.type == "cuda"
    return cache_key(
        "recipes.evaluate",
        ["lm-eval", "numpy", "rouge-score", "tokenizers", "torch", "transformers"],
        evaluation=data.fingerprint,
        model=source.fingerprint,
        precision=models.precision(),
        device=torch.cuda.get_device_name(device) if is_cuda else device.type,
    )


def _read_scores(content: bytes) -> Scores:
    found = json.loads(content)
    values = {task: np.array(of_task, float) for task, of_task in found["values"].items()}
    tasks = [TaskScores(**one | {"values": np.array(one["values"])}) for one in found["tasks"]]
    return Scores(values, found["samples"], tasks, found["figures"], found["details"])


def _to_json(content: Any) -> bytes:
    return json.dumps(content, indent=1, default=np.ndarray.tolist).encode()


def _write_json(path: Path, content: Any) -> None:
    files.write(path, _to_json(content))
