"""Tasks of lm-eval, a multiple-choice set from held-out text in their form, and summaries.

A question of the set is the beginning of a held-out document; the choices are how it goes on, and
how as many other documents go on at the same place. The model chooses the likeliest. Documents,
the other documents and the right choice's place follow from the order of the documents, which is a
hash of their clusters, so the same shards and settings make the same questions.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.errors import UserError, first_line
from recipes.evaluation.documents import TokenizedDocument, Tokenizer
from recipes.evaluation.settings import MultipleChoiceSettings, SummarySettings, TaskSettings

SEED = 1234


@dataclass(frozen=True)
class TaskScores:
    """One metric of one task, sample by sample."""

    task: str
    metric: str
    samples: list[str]
    """Which question: its `document` where the task's file names one, else its number."""
    clusters: list[str]
    values: np.ndarray
    """Shape (samples,); the metric is their mean."""
    chosen: list[int | None]
    """The choice that a model found likeliest, by its place; None where a task has no choices."""


def run_tasks(lm: Any, tasks: Sequence[TaskSettings], folders: Sequence[Path]) -> list[TaskScores]:
    """Ask a model lm-eval's tasks.

    Args:
        lm: one of lm-eval's models.
        folders: where local task files are.

    Raises:
        UserError: a task is unknown, or its data cannot be read, as when the hub is out of reach.
    """
    from lm_eval import simple_evaluate

    manager = _task_manager(tasks, folders)
    scores = []
    for task in tasks:
        if task.name not in manager.all_tasks:
            raise UserError(
                f"lm-eval knows no task {task.name!r}. Give its file's folder in "
                "`eval_metrics.task_folder`, or another name in `eval_metrics.tasks`."
            )
        try:
            results = simple_evaluate(
                model=lm,
                tasks=[task.name],
                num_fewshot=task.shots,
                limit=task.limit,
                task_manager=manager,
                bootstrap_iters=0,
                log_samples=True,
                random_seed=SEED,
                numpy_random_seed=SEED,
                torch_random_seed=SEED,
                fewshot_random_seed=SEED,
            )
        except (OSError, ConnectionError) as error:
            raise UserError(
                f"The data of task {task.name!r} cannot be read: {first_line(error)}. "
                "Where no hub can be reached, use tasks from local files."
            ) from error
        # A group such as mmlu is one score over the samples of all its parts.
        parts = results["samples"].values()
        scores += _scores(task.name, [sample for samples in parts for sample in samples])
    return scores


def _task_manager(tasks: Sequence[TaskSettings], folders: Sequence[Path]) -> Any:
    """lm-eval's index of tasks: of the local ones alone where they suffice, which saves seconds."""
    from lm_eval.tasks import TaskManager

    paths = [str(folder) for folder in folders]
    local = TaskManager(include_path=paths, include_defaults=False)
    if {task.name for task in tasks} <= set(local.all_tasks):
        return local
    return index_tasks(*paths)


@lru_cache(maxsize=1)
def index_tasks(*folders: str) -> Any:
    """lm-eval's index of its own tasks and those in folders.

    Kept for the next model: to read lm-eval's 14,683 takes eight seconds of a core.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders))


def digest_tasks(tasks: Sequence[TaskSettings], folders: Sequence[Path]) -> dict[str, str]:
    """What decides the questions: lm-eval's version and the local task files' content."""
    if not tasks:
        return {}
    state = hashlib.sha256()
    for folder in folders:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            # Task files of this run name their own folder, which says nothing about the questions.
            content = path.read_text(errors="replace").replace(str(folder.absolute()), "")
            state.update(f"{path.relative_to(folder)}\0{content}\0".encode())
    return {"lm_eval": version("lm_eval"), "files": state.hexdigest()}


def _scores(task: str, samples: list[dict[str, Any]]) -> list[TaskScores]:
    metrics = [m for m in samples[0]["metrics"] if isinstance(samples[0][m], int | float)]
    names = [str(s["doc"].get("document", s["doc_id"])) for s in samples]
    clusters = [str(s["doc"].get("cluster", s["doc_id"])) for s in samples]
    chosen = [_likeliest(sample["filtered_resps"]) for sample in samples]
    return [
        TaskScores(task, one, names, clusters, np.array([float(s[one]) for s in samples]), chosen)
        for one in metrics
    ]


def _likeliest(answers: Sequence[Any]) -> int | None:
    """Of choices, each with its log-likelihood, the place of the likeliest."""
    if not all(isinstance(one, list | tuple) and len(one) == 2 for one in answers):
        return None
    return int(np.argmax([likelihood for likelihood, _ in answers]))


MULTIPLE_CHOICE_TASK = "domain_multiple_choice"

_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
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


def make_questions(
    documents: Sequence[TokenizedDocument], tokenizer: Tokenizer, settings: MultipleChoiceSettings
) -> list[dict[str, object]]:
    """Questions with `document`, `cluster`, `context`, `choices` and `answer` (a place in choices).

    Raises:
        UserError: too few held-out documents are long enough.
    """
    needed = settings.context_tokens + settings.choice_tokens
    usable = [document for document in documents if len(document.tokens) >= needed]
    if len({document.cluster for document in usable}) < settings.choices:
        raise UserError(
            f"Only {len(usable)} held-out documents have the {needed} tokens that a question "
            "needs. Lower `eval_metrics.multiple_choice.context_tokens`, or set "
            "`eval_metrics.multiple_choice.questions` to 0."
        )
    asked = usable[: settings.questions]
    return [_question(number, usable, tokenizer, settings) for number in range(len(asked))]


def write_task(name: str, questions: Sequence[dict[str, object]], folder: Path) -> None:
    """Write questions, each with `context`, `choices` and `answer`, as one of lm-eval's tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.absolute() / f"{name}.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = _TASK.format(name=name, path=json.dumps(str(path)))
    (folder / f"{name}.yaml").write_text(task)


def _question(
    number: int,
    usable: Sequence[TokenizedDocument],
    tokenizer: Tokenizer,
    settings: MultipleChoiceSettings,
) -> dict[str, object]:
    document = usable[number]
    others: list[TokenizedDocument] = []
    clusters = {document.cluster}
    for step in range(1, len(usable)):
        other = usable[(number + step) % len(usable)]
        if other.cluster not in clusters and len(others) < settings.choices - 1:
            others.append(other)
            clusters.add(other.cluster)
    answer = hashlib.sha256(document.id.encode()).digest()[0] % settings.choices
    choices = [_part(other, tokenizer, settings) for other in others]
    choices.insert(answer, _part(document, tokenizer, settings))
    return {
        "document": document.id,
        "cluster": document.cluster,
        "context": _text(document, tokenizer, 0, settings.context_tokens),
        "choices": choices,
        "answer": answer,
    }


def _part(
    document: TokenizedDocument, tokenizer: Tokenizer, settings: MultipleChoiceSettings
) -> str:
    return _text(document, tokenizer, settings.context_tokens, settings.choice_tokens)


def _text(document: TokenizedDocument, tokenizer: Tokenizer, start: int, count: int) -> str:
    tokens = document.tokens[start : start + count].tolist()
    return tokenizer.decode(tokens, skip_special_tokens=True)


ROUGE = ("rouge1", "rouge2", "rougeL")


def score_summaries(model: Any, tokenizer: Any, settings: SummarySettings) -> list[TaskScores]:
    """F-measures of ROUGE-1, -2 and -L, with stemming, one value a document.

    Raises:
        UserError: the file is absent or a line is wrong; the message names the line.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    records = read_summaries(settings)
    found = [
        scorer.score(record["summary"], _write(model, tokenizer, record["document"], settings))
        for record in records
    ]
    names = [str(number) for number in range(len(records))]
    return [
        TaskScores(
            task="summaries",
            metric=rouge,
            samples=names,
            clusters=names,
            values=np.array([score[rouge].fmeasure for score in found]),
            chosen=[None] * len(names),
        )
        for rouge in ROUGE
    ]


def read_summaries(settings: SummarySettings) -> list[dict[str, str]]:
    """The file's lines, up to the limit; raises UserError naming a wrong one."""
    path = Path(settings.path)
    try:
        lines = path.read_text("utf-8").splitlines()[: settings.limit]
    except FileNotFoundError as error:
        raise UserError(f"`eval_metrics.summaries.path` names {path}, which is absent.") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records.append({key: str(record[key]) for key in ("document", "summary")})
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} line {number} is not a JSON object with `document` and `summary`."
            ) from error
    if not records:
        raise UserError(f"{path} holds no summaries.")
    return records


def _write(model: Any, tokenizer: Any, document: str, settings: SummarySettings) -> str:
    import torch

    before, after = settings.prompt.split("{document}")
    text = tokenizer.encode(document, add_special_tokens=False)[: settings.document_tokens]
    prompt = [
        *tokenizer.encode(before, add_special_tokens=False),
        *text,
        *tokenizer.encode(after, add_special_tokens=False),
    ]
    tokens = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=settings.new_tokens,
            do_sample=False,
        )[0, len(prompt) :]
    return str(tokenizer.decode(written, skip_special_tokens=True))
