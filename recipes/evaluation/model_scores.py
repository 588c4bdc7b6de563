"""The scores of one model, from the cache where it was measured before on the same data."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.cache import cache_key, read_cached, write_cached
from artifacts.model.hugging_face import read_tokenizer
from artifacts.progress import Report
from recipes.device import device_of, local_device, mixed_precision
from recipes.evaluation import models
from recipes.evaluation.bits import document_bits
from recipes.evaluation.documents import Document, check_tokenizer, check_vocabulary
from recipes.evaluation.examples import Scorer
from recipes.evaluation.harness.tasks import TaskScores, run_tasks
from recipes.evaluation.metric import Metric
from recipes.evaluation.results import Data, Scores, sizes
from recipes.evaluation.settings import ModelSource
from recipes.evaluation.spec import EvaluationSpec
from recipes.evaluation.summaries import score_summaries


def measure(
    source: ModelSource,
    role: str,
    data: Data,
    spec: EvaluationSpec,
    report: Report,
    scorer: Scorer | None = None,
) -> Scores:
    """One model's scores on all of the data.

    Raises:
        UserError: the model cannot be read, or its tokenizer is not the data's.
    """
    key = scores_key(data, source)
    known = read_cached(spec.cache, key) if spec.cache else None
    if known is not None:
        report(f"{role}: measured before on the same data")
        return _read_scores(bytes(known))
    report(f"{role}: loading {source.path}")
    check_tokenizer(Path(source.path), spec.shard_stats)
    scores = (
        _scored_examples(scorer, Path(source.path), role, data, spec, report)
        if scorer
        else _measured_bits(source, role, data, spec, report)
    )
    if spec.cache:
        write_cached(spec.cache, key, to_json(asdict(scores)))
    return scores


def _scored_examples(
    scorer: Scorer, folder: Path, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> Scores:
    found = {
        task: scorer.score(folder, documents, spec.shard_stats)
        for task, documents in data.tasks.items()
    }
    decisive = {task: scorer.metric.of(task) for task in found}
    values = {task: found[task].values[metric.name] for task, metric in decisive.items()}
    others = [
        TaskScores(task, name, [d.id for d in documents], [d.cluster for d in documents], scores)
        for task, documents in data.tasks.items()
        for name, scores in found[task].values.items()
        if name != decisive[task].name
    ]
    for task, of_task in values.items():
        report(
            f"{role}: {decisive[task].unit} {_mean(of_task, data.tasks[task], decisive[task]):.4f} "
            f"on {len(of_task)} {task} examples"
        )
    figures = {f"{task}_{name}": v for task in found for name, v in found[task].figures.items()}
    main = found[spec.split]
    return Scores(values, main.samples, others, figures, main.details)


def _mean(scores: np.ndarray, documents: Sequence[Document], metric: Metric) -> float:
    return float(scores.sum() / sizes(documents, metric).sum())


def _measured_bits(
    source: ModelSource, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> Scores:
    model = models.load_model(Path(source.path))
    bits = {}
    with mixed_precision(models.precision(), local_device()):
        for task, documents in data.tasks.items():
            check_vocabulary(documents, model.config.vocab_size, source.path)
            bits[task] = _score_task(model, role, task, documents, spec, report)
    figures = {}
    if spec.shard_stats.form == "conversations":
        predicted = sum(document.predicted for document in data.tasks[spec.split])
        figures[f"{spec.split}_perplexity"] = 2.0 ** float(bits[spec.split].sum() / predicted)
    return Scores(bits, *_written(model, role, data, spec, report), figures)


def _written(
    model: Any, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> tuple[list[dict[str, str]], list[TaskScores]]:
    """Completions, and answers to lm-eval's tasks, both in the precision of the endpoint."""
    settings = spec.settings
    if not data.prompts and not data.lm_eval_tasks and not data.summaries:
        return [], []
    tokenizer, model = read_tokenizer(Path(spec.base.path)), models.as_served(model)
    samples, scored = [], []
    if data.prompts:
        report(f"{role}: writing {len(data.prompts)} completions")
        samples = models.complete(model, tokenizer, data.prompts, settings.generation)
    if data.lm_eval_tasks:
        from recipes.evaluation.harness.shared_context import SharedContextLM

        report(f"{role}: answering {', '.join(task.name for task in data.lm_eval_tasks)}")
        lm = SharedContextLM(model, tokenizer, settings.batch_tokens)
        scored = run_tasks(lm, data.lm_eval_tasks, data.task_folders)
    if data.summaries:
        report(f"{role}: writing the summaries of {data.summaries.path}")
        scored += score_summaries(model, tokenizer, data.summaries)
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


def scores_key(data: Data, source: ModelSource) -> str:
    """The cache's key of a model's scores: what is measured, by what and on which device."""
    return cache_key(
        "recipes.evaluate",
        ["lm-eval", "numpy", "rouge-score", "tokenizers", "torch", "transformers"],
        evaluation=data.fingerprint,
        model=source.fingerprint,
        precision=models.precision(),
        device=device_of(local_device()).name,
    )


def _read_scores(content: bytes) -> Scores:
    found = json.loads(content)
    values = {task: np.array(of_task, float) for task, of_task in found["values"].items()}
    tasks = [TaskScores(**one | {"values": np.array(one["values"])}) for one in found["tasks"]]
    return Scores(values, found["samples"], tasks, found["figures"], found["details"])


def to_json(content: Any) -> bytes:
    return json.dumps(content, indent=1, default=np.ndarray.tolist).encode()
