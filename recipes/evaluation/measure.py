"""Measures every model of a spec on the same data, and writes one result."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from artifacts.cache import cache_key, cached, read_cached, write_cached
from artifacts.errors import UserError, make_command
from artifacts.libraries import source_hash
from artifacts.model import read_tokenizer
from artifacts.progress import Report
from artifacts.shards.shard_set import ShardSet, list_documents
from artifacts.storage import files
from artifacts.store.identity import hash_json
from recipes.device import device_of, local_device, mixed_precision
from recipes.evaluation.bits import as_served, complete, document_bits, load_causal, precision
from recipes.evaluation.documents import (
    Documents,
    TokenizedDocument,
    check_tokenizer,
    digest,
    general_documents,
    held_out_documents,
    in_rounds,
    newest_documents,
)
from recipes.evaluation.exam import judge_exam, prompts_of, read_questions, write_exam_tasks
from recipes.evaluation.harness import TaskFault, TaskScores, digest_tasks, run_tasks
from recipes.evaluation.results import (
    FINGERPRINT_KEY,
    HELD_OUT_TASK,
    Data,
    ExampleScores,
    Scorer,
    Scores,
    metrics,
    score_table,
    sizes,
    task_table,
)
from recipes.evaluation.settings import (
    ANSWER_BITS_PER_BYTE,
    BITS_PER_BYTE,
    CODE_VERSION,
    GENERAL_TASK,
    QUESTION_FOLDER,
    SAMPLES_NAME,
    SCORES_NAME,
    TASK_SCORES_NAME,
    GateQuestion,
    ModelSource,
    TaskSettings,
)
from recipes.evaluation.spec import EvaluationSpec
from recipes.evaluation.statistics import is_decided
from recipes.spec import RESULT_NAME

BATCH_ROWS = 8
"""Of general text, in a pass."""


def measure(
    source: ModelSource,
    role: str,
    data: Data,
    spec: EvaluationSpec,
    report: Report,
    scorer: Scorer | None = None,
) -> Scores:
    """One model's scores on all of the data; raises UserError where the model cannot be read, or
    its tokenizer is not the data's."""
    key = scores_key(data, source, scorer)
    content = read_cached(spec.cache, key) if spec.cache else None
    if content is not None:
        # Its tokenizer need not be compared: scores are kept only of a model whose tokenizer fits.
        report(f"{role}: measured before on the same data")
        return _read_scores(bytes(content))
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
    results = {
        # General text is measured in bits where the scorer's metric does not apply to it.
        task: scorer.score(folder, documents, spec.shard_stats)
        if scorer.metric.of(task) == scorer.metric
        else ExampleScores({BITS_PER_BYTE.name: _text_bits(folder, documents, spec)})
        for task, documents in data.tasks.items()
    }
    decisive = {task: scorer.metric.of(task) for task in results}
    values = {task: results[task].values[metric.name] for task, metric in decisive.items()}
    other_scores = [
        TaskScores(
            task,
            name,
            [document.id for document in documents],
            [document.cluster for document in documents],
            scores,
            [None] * len(documents),
        )
        for task, documents in data.tasks.items()
        for name, scores in results[task].values.items()
        if name != decisive[task].name
    ]
    for task, of_task in values.items():
        mean = of_task.sum() / sizes(data.tasks[task], decisive[task]).sum()
        report(f"{role}: {decisive[task].unit} {mean:.4f} on {len(of_task)} {task} examples")
    figures = {f"{task}_{name}": v for task in results for name, v in results[task].figures.items()}
    main = results[spec.split]
    return Scores(values, main.samples, other_scores, figures, main.details)


def _text_bits(folder: Path, texts: Documents, spec: EvaluationSpec) -> np.ndarray:
    """Bits of general text under a model that is otherwise scored on examples, in rows as long as
    it was taught."""
    model = load_causal(folder)
    stats = spec.shard_stats
    length = spec.recipe.longest_input(stats.sequence_length) or stats.sequence_length
    with mixed_precision(precision(), local_device()):
        return document_bits(model, texts, length, length * BATCH_ROWS, lambda line: None, "")


def _measured_bits(
    source: ModelSource, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> Scores:
    model = load_causal(Path(source.path))
    bits = {}
    with mixed_precision(precision(), local_device()):
        for task, documents in data.tasks.items():
            bits[task] = _bits(model, source, documents, spec, report, f"{role}, {task}")
            value = bits[task].sum() / sum(document.bytes for document in documents)
            report(f"{role}: {value:.4f} bits per byte on {len(documents)} {task} documents")
    figures = {}
    if spec.shard_stats.form == "conversations":
        predicted = sum(document.predicted for document in data.tasks[spec.split])
        # Infinite for a hopeless model: that is for the gate to judge, and no error.
        with np.errstate(over="ignore"):
            perplexity = float(np.exp2(bits[spec.split].sum() / predicted))
        figures[f"{spec.split}_perplexity"] = perplexity
    return Scores(bits, *_written(model, source, role, data, spec, report), figures)


def _bits(
    model: Any,
    source: ModelSource,
    documents: Documents,
    spec: EvaluationSpec,
    report: Report,
    label: str,
) -> np.ndarray:
    """`document_bits`, found again where the model was measured on these documents before: where
    all general text is measured, it is the same for every candidate."""
    # Each candidate draws them in an order of its own.
    order = sorted(range(len(documents)), key=lambda number: documents[number].id)
    ordered = [documents[number] for number in order]
    length, batch_tokens = spec.shard_stats.sequence_length, spec.settings.batch_tokens
    key = _key("bits", source, documents=digest(ordered), length=length)
    content = cached(
        spec.cache,
        key,
        lambda: to_json(document_bits(model, ordered, length, batch_tokens, report, label)),
    )
    bits = np.empty(len(documents))
    bits[order] = json.loads(bytes(content))
    return bits


def _written(
    model: Any, source: ModelSource, role: str, data: Data, spec: EvaluationSpec, report: Report
) -> tuple[list[dict[str, str]], list[TaskScores]]:
    """Completions, and answers to lm-eval's tasks, both in the precision of the endpoint."""
    settings, tasks = spec.settings, data.lm_eval_tasks
    if not data.prompts and not tasks:
        return [], []
    # The base's for every model, as the data's tokens are those of the base.
    tokenizer, model = read_tokenizer(Path(spec.base.path)), as_served(model)
    samples, scored = [], []
    if data.prompts:
        report(f"{role}: writing {len(data.prompts)} completions")
        samples = complete(model, tokenizer, data.prompts, settings.generation)

    def answer() -> bytes:
        from recipes.evaluation.shared_context import SharedContextLM

        report(f"{role}: answering {', '.join(task.name for task in tasks)}")
        lm = SharedContextLM(model, tokenizer, settings.batch_tokens)
        return to_json([asdict(scores) for scores in run_tasks(lm, tasks, data.task_folders)])

    if tasks:
        # Every candidate is measured on a draw of documents, but all are asked the same questions.
        asked = [task.model_dump(mode="json") for task in tasks]
        key = _key("answers", source, asked=asked, files=digest_tasks(tasks, data.task_folders))
        scored = _read_tasks(json.loads(bytes(cached(spec.cache, key, answer))))
    for score in scored:
        report(f"{role}: {score.task} {score.metric} {score.value:.4f}")
    return samples, scored


def scores_key(data: Data, source: ModelSource, scorer: Scorer | None = None) -> str:
    """The cache's key of all scores of a model."""
    by = scorer and source_hash(type(scorer).__module__)
    return _key("scores", source, evaluation=data.fingerprint, scorer=by)


def _key(entry: str, source: ModelSource, **measured: Any) -> str:
    """The cache's key: what is measured of a model, by what and on which device."""
    return cache_key(
        entry,
        "recipes.evaluate",
        ["lm-eval", "numpy", "tokenizers", "torch", "transformers"],
        model=source.fingerprint,
        precision=precision(),
        device=device_of(local_device()).name,
        **measured,
    )


def _read_scores(content: bytes) -> Scores:
    fields = json.loads(content)
    values = {task: np.array(of_task, float) for task, of_task in fields["values"].items()}
    tasks = _read_tasks(fields["tasks"])
    return Scores(values, fields["samples"], tasks, fields["figures"], fields["details"])


def _read_tasks(items: list[dict[str, Any]]) -> list[TaskScores]:
    return [TaskScores(**item | {"values": np.array(item["values"])}) for item in items]


def to_json(content: Any) -> bytes:
    """JSON in UTF-8; arrays are lists."""
    return json.dumps(content, indent=1, default=np.ndarray.tolist).encode()


NEWEST = "_newest"
"""Suffix of the task that measures the newest slice alone: what was learned of the text that
arrived last."""


def evaluate(spec: EvaluationSpec, report: Report, scorer: Scorer | None = None) -> dict[str, Any]:
    """Measure the spec's models, by bits of documents or by what a scorer says of examples, and
    write result, scores and samples into its output folder.

    Returns:
        The content of `result.json`, which is the artifact's `stats`: `metrics` (name to role to
        value, low, high), `evaluation_fingerprint`, `metric` (the one that decides),
        `documents`, `tokens`, `rounds` (how far it went), `precision`, `vocab_size`, `models`,
        `faults` (role to why that model could not be measured), `exam` (see `judge_exam`).

    Raises UserError where the base cannot be read, or the data is empty. A candidate or incumbent
    that cannot be read is a fault in the result, for the gate to judge.
    """
    data, scores, faults = _measure_until_decided(spec, report, scorer)
    result = {
        "metrics": metrics(data, scores),
        FINGERPRINT_KEY: data.fingerprint,
        "metric": data.metric.model_dump(),
        "documents": {task: len(documents) for task, documents in data.tasks.items()},
        "tokens": {task: _count_tokens(documents) for task, documents in data.tasks.items()},
        "rounds": data.rounds.model_dump(),
        "precision": precision(),
        "vocab_size": spec.shard_stats.vocab_size,
        "models": {role: source.fingerprint for role, source in _sources(spec)},
        "faults": faults,
        "details": {role: of_role.details for role, of_role in scores.items() if of_role.details},
        "exam": judge_exam({role: s.tasks for role, s in scores.items()}),
    }
    output = Path(spec.output)
    output.mkdir(parents=True, exist_ok=True)
    pq.write_table(score_table(data, scores), output / SCORES_NAME)
    if any(of_role.tasks for of_role in scores.values()):
        pq.write_table(task_table(scores), output / TASK_SCORES_NAME)
    # The questions hold text of the corpus, which `forget` would have to find here.
    files.remove(output / QUESTION_FOLDER)
    samples = {role: of_role.samples for role, of_role in scores.items()}
    files.write(output / SAMPLES_NAME, to_json(samples))
    files.write(output / RESULT_NAME, to_json(result))
    return result


def _measure_until_decided(
    spec: EvaluationSpec, report: Report, scorer: Scorer | None
) -> tuple[Data, dict[str, Scores], dict[str, str]]:
    """Measure round after round until the spec's question is answered; returns all data, scores,
    faults.

    Without an answer, the whole budget is measured; without a question, in one round.
    """
    data = read_data(spec, scorer)
    scores, faults = _measure_models(data, spec, report, scorer)
    while data.later and not faults:
        if spec.question and _is_answered(spec.question, data, scores):
            break
        next_data, rounds = data.next_round(), data.rounds
        report(f"The verdict is open: round {rounds.measured + 1} of {rounds.planned}")
        added, faults = _measure_models(next_data, spec, report, scorer)
        if not faults:
            # A round in which a model failed does not count, so all scores are of the same
            # documents.
            data = data.with_round(next_data)
            scores = {role: scores[role].with_round(added[role]) for role in scores}
    return data, scores, faults


def _is_answered(question: GateQuestion, data: Data, scores: dict[str, Scores]) -> bool:
    documents = data.tasks[HELD_OUT_TASK]
    planned = {document.cluster for part in (documents, *data.later) for document in part}
    candidate, reference = scores["candidate"], scores.get("incumbent", scores["base"])
    return is_decided(
        candidate.values[HELD_OUT_TASK] - reference.values[HELD_OUT_TASK],
        sizes(documents, data.metric),
        np.array([document.cluster for document in documents]),
        question,
        data.rounds,
        len(planned),
    )


def _measure_models(
    data: Data, spec: EvaluationSpec, report: Report, scorer: Scorer | None
) -> tuple[dict[str, Scores], dict[str, str]]:
    """Scores by role, and why a candidate or incumbent has none."""
    tokens = sum(map(_count_tokens, data.tasks.values()))
    # Reversed, so that a model with several roles goes by the first of them.
    distinct = {source.fingerprint: role for role, source in reversed(_sources(spec))}
    report(f"Measuring {' and '.join(reversed(distinct.values()))} on {tokens:,} tokens")
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
                # Nothing is compared without the base, and a faulty task fails for every model
                # alike.
                if role == "base" or isinstance(error, TaskFault):
                    raise
                faults[role] = str(error)
                continue
        scores[role] = measured[source.fingerprint]
    return scores, faults


def _count_tokens(documents: Documents) -> int:
    return sum(len(document.tokens) for document in documents)


def read_data(spec: EvaluationSpec, scorer: Scorer | None = None) -> Data:
    """The documents that the settings choose, and the fingerprint of the whole evaluation; raises
    UserError where the split is empty, or all of it was forgotten."""
    settings = spec.settings
    tokenizer = read_tokenizer(Path(spec.base.path))
    shards = ShardSet(spec.shards, spec.shard_stats, spec.split)
    # Forgotten documents are not among them.
    table = list_documents(shards)
    if not len(table):
        raise UserError(
            f"All {spec.split} text in {spec.shards} was forgotten. Give the corpus more text, and "
            f"make the shards again with: {make_command('tokenized_shards')}"
        )
    budget = held_out_documents(shards, table, tokenizer, settings)
    metric = BITS_PER_BYTE
    if scorer:
        metric = scorer.metric
    elif spec.shard_stats.form == "conversations":
        metric = ANSWER_BITS_PER_BYTE
    # Figures of examples are no sums over rounds, so they are measured at once.
    rounds = in_rounds(budget, settings) if spec.question and metric == BITS_PER_BYTE else [budget]
    first, *later = rounds
    tasks: dict[str, list[TokenizedDocument]] = {spec.split: first}
    if metric.has_general:
        tasks[GENERAL_TASK] = general_documents(
            tokenizer, spec.shard_stats, settings.general_tokens, settings.seed
        )
    if newest := newest_documents(shards, table, tokenizer, settings):
        tasks[f"{spec.split}{NEWEST}"] = newest
    task_folders = [Path(settings.task_folder)] if settings.task_folder else []
    lm_eval_tasks = settings.lm_eval_tasks
    # Of the first round, the one that is measured in any case.
    prompts = first[: settings.generation.samples]
    if spec.exam:
        questions = read_questions(Path(spec.exam))
        task_folders.append(folder := Path(spec.output) / QUESTION_FOLDER)
        lm_eval_tasks += [TaskSettings(name=name) for name in write_exam_tasks(questions, folder)]
        prompts = prompts_of(questions, tokenizer, spec.shard_stats, settings.generation.samples)
    identity = {
        "code_version": CODE_VERSION,
        "settings": settings.content(),
        "sequence_length": spec.shard_stats.sequence_length,
        "metric": metric.model_dump(),
        "scorer": scorer.identity if scorer else None,
        "data": {task: digest(documents) for task, documents in tasks.items()}
        | digest_tasks(lm_eval_tasks, task_folders)
        # Only with tasks: earlier scores mixed up the filters of a task and must not be found
        # again; all other evaluations keep their fingerprint.
        | ({"filters": "apart"} if settings.lm_eval_tasks else {}),
    }
    return Data(
        tasks=tasks,
        prompts=prompts,
        task_folders=task_folders,
        lm_eval_tasks=lm_eval_tasks,
        metric=metric,
        fingerprint=hash_json(identity),
        share=len(budget) / len(table),
        later=tuple(later),
        planned=len(rounds),
    )


def _sources(spec: EvaluationSpec) -> list[tuple[str, ModelSource]]:
    sources = [("base", spec.base), ("candidate", spec.candidate), ("incumbent", spec.incumbent)]
    return [(role, source) for role, source in sources if source is not None]
