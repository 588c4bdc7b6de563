"""Measures every model of a spec on the same data and writes one result."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from artifacts.atomic import write_atomically
from artifacts.errors import UserError
from artifacts.identity import hash_json
from recipes.evaluation.bootstrap import studentized_interval
from recipes.evaluation.documents import (
    Document,
    check_vocabulary,
    digest,
    general_documents,
    held_out_documents,
)
from recipes.evaluation.settings import (
    CODE_VERSION,
    EvaluationSettings,
    EvaluationSpec,
    ModelSource,
)

RESULT_NAME = "result.json"
SCORES_NAME = "scores.parquet"
SAMPLES_NAME = "samples.json"
FINGERPRINT_KEY = "evaluation_fingerprint"
"""In the result and in the metadata of the scores, so that they cannot be mixed up."""
ROLES = ("base", "candidate", "incumbent")

Report = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """What all models are measured on."""

    tasks: dict[str, list[Document]]
    """Task name to documents."""
    prompts: list[Document]
    """Held-out documents to continue."""
    fingerprint: str
    """Of data, code and settings, not of the models: figures with one fingerprint compare."""


@dataclass(frozen=True)
class Scores:
    """One model's scores."""

    bits: dict[str, np.ndarray]
    """Task name to bits of each document, shape (documents,)."""
    samples: list[dict[str, str]]


def evaluate(spec: EvaluationSpec, report: Report) -> dict[str, Any]:
    """Measure the spec's models and write result, scores and samples into its output folder.

    Returns:
        The content of `result.json`, which is the artifact's `stats`: `metrics` (name to role to
        value, low, high), `evaluation_fingerprint`, `documents`, `tokens`, `precision`, `models`,
        `faults` (role to why that model could not be measured).

    Raises:
        UserError: the base or the candidate cannot be read, or the data is empty. An incumbent that
            cannot be read is a fault in the result, for the gate to judge.
    """
    from recipes.evaluation import models

    data = read_data(spec)
    tokens = sum(len(d.tokens) for documents in data.tasks.values() for d in documents)
    report(f"Measuring {_describe_models(spec)} on {tokens:,} tokens")
    measured: dict[str, Scores] = {}
    scores: dict[str, Scores] = {}
    faults: dict[str, str] = {}
    for role, source in _sources(spec):
        if source.fingerprint not in measured:
            try:
                measured[source.fingerprint] = measure(source, role, data, spec, report)
            except UserError as error:
                if role != "incumbent":
                    raise
                faults[role] = str(error)
                continue
        scores[role] = measured[source.fingerprint]
    result = {
        "metrics": _metrics(data, scores, spec.settings),
        FINGERPRINT_KEY: data.fingerprint,
        "documents": {task: len(documents) for task, documents in data.tasks.items()},
        "tokens": {task: sum(len(d.tokens) for d in ds) for task, ds in data.tasks.items()},
        "precision": models.precision(),
        "models": {role: source.fingerprint for role, source in _sources(spec)},
        "faults": faults,
    }
    output = Path(spec.output)
    output.mkdir(parents=True, exist_ok=True)
    pq.write_table(_score_table(data, scores), output / SCORES_NAME)
    _write_json(output / SAMPLES_NAME, {role: s.samples for role, s in scores.items()})
    _write_json(output / RESULT_NAME, result)
    return result


def read_data(spec: EvaluationSpec) -> Data:
    """The documents that the settings choose, and the fingerprint of the whole evaluation."""
    from recipes.evaluation import models

    settings = spec.settings
    tokenizer = models.load_tokenizer(Path(spec.base.path))
    held_out = held_out_documents(Path(spec.shards), spec.shard_stats, tokenizer, settings)
    general = general_documents(tokenizer, spec.shard_stats, settings.general_tokens, settings.seed)
    tasks = {"held_out": held_out, "general": general}
    identity = {
        "code_version": CODE_VERSION,
        "settings": settings.content(),
        "sequence_length": spec.shard_stats.sequence_length,
        "data": {task: digest(documents) for task, documents in tasks.items()},
    }
    prompts = held_out[: settings.generation.samples]
    return Data(tasks=tasks, prompts=prompts, fingerprint=hash_json(identity))


def measure(
    source: ModelSource, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> Scores:
    """One model's scores, from the cache where it was measured before on the same data."""
    from recipes.evaluation import models
    from recipes.precision import mixed_precision

    cached = _cache_path(spec.cache, data, source, models.precision())
    if cached and (scores := _read_cache(cached)):
        report(f"{role}: measured before on the same data")
        return scores
    report(f"{role}: loading {source.path}")
    model = models.load_model(Path(source.path))
    bits = {}
    with mixed_precision(models.precision(), models.device()):
        for task, documents in data.tasks.items():
            check_vocabulary(documents, model.config.vocab_size, source.path)
            bits[task] = _score_task(model, role, task, documents, spec, report)
    samples = []
    if data.prompts:
        report(f"{role}: writing {len(data.prompts)} completions")
        tokenizer = models.load_tokenizer(Path(spec.base.path))
        samples = models.complete(model, tokenizer, data.prompts, spec.settings.generation)
    scores = Scores(bits, samples)
    if cached:
        content = {"bits": {k: v.tolist() for k, v in bits.items()}, "samples": samples}
        _write_json(cached, content)
    return scores


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


def _metrics(
    data: Data, scores: dict[str, Scores], settings: EvaluationSettings
) -> dict[str, dict[str, dict[str, float | None]]]:
    return {
        f"{task}_bits_per_byte": {
            role: _bits_per_byte(documents, of_role.bits[task], settings)
            for role, of_role in scores.items()
        }
        for task, documents in data.tasks.items()
    }


def _bits_per_byte(
    documents: Sequence[Document], bits: np.ndarray, settings: EvaluationSettings
) -> dict[str, float | None]:
    """Value and 95 % interval; None stands for what is not finite, which JSON cannot say."""
    interval = studentized_interval(
        bits,
        np.array([document.bytes for document in documents], float),
        np.array([document.cluster for document in documents]),
        resamples=settings.bootstrap_resamples,
        seed=settings.seed,
    )
    figures = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}


def _score_table(data: Data, scores: dict[str, Scores]) -> pa.Table:
    """One row a document: task, document, cluster, bytes, tokens, and bits under each model.

    A model that was not measured has nulls; one that answered NaN has NaN.
    """
    rows = [(task, document) for task, documents in data.tasks.items() for document in documents]
    columns: dict[str, Any] = {
        "task": pa.array([task for task, _ in rows]),
        "document": pa.array([document.id for _, document in rows]),
        "cluster": pa.array([document.cluster for _, document in rows]),
        "bytes": pa.array([document.bytes for _, document in rows]),
        "tokens": pa.array([len(document.tokens) for _, document in rows]),
    }
    for role in ROLES:
        column = pa.nulls(len(rows), pa.float64())
        if role in scores:
            bits = np.concatenate([scores[role].bits[task] for task in data.tasks])
            column = pa.array(bits, from_pandas=False)
        columns[f"bits_{role}"] = column
    return pa.table(columns).replace_schema_metadata({FINGERPRINT_KEY: data.fingerprint})


def _cache_path(
    folder: str | None, data: Data, source: ModelSource, precision: str
) -> Path | None:
    name = f"{source.fingerprint}-{precision}.json"
    return Path(folder) / data.fingerprint / name if folder else None


def _read_cache(path: Path) -> Scores | None:
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    bits = {task: np.array(values, float) for task, values in content["bits"].items()}
    return Scores(bits, content["samples"])


def _write_json(path: Path, content: Any) -> None:
    write_atomically(LocalFileSystem(), str(path), json.dumps(content, indent=1).encode())
