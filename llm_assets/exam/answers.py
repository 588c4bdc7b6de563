"""How two models answered the questions of an exam, paired by question."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from artifacts.store.store import Artifact
from recipes.evaluation.exam import CLOSED_BOOK, EXAM_TASKS, METRIC, read_questions
from recipes.evaluation.settings import TASK_SCORES_NAME


@dataclass(frozen=True)
class AnswerPair:
    """A question under one condition, as one model and as another answered it."""

    task: str
    question: dict[str, Any]
    """As `questions.jsonl` has it."""
    before: float
    after: float
    """1 for right, 0 for wrong."""
    said_before: str
    said_after: str

    @property
    def relation(self) -> str:
        """What of the subject was asked for."""
        return str(self.question["relation"])

    @property
    def is_won(self) -> bool:
        """Whether the later model alone was right, with no text at hand."""
        return self.task == CLOSED_BOOK and self.after > self.before

    @property
    def is_lost(self) -> bool:
        """Whether the earlier model alone was right, with no text at hand."""
        return self.task == CLOSED_BOOK and self.after < self.before


def find_exam(evaluation: Artifact) -> Artifact | None:
    """The exam that an evaluation's models took; None where none was, or it is no longer there."""
    return evaluation.store.find_named("exam", evaluation.manifest.inputs.get("exam", ""))


def read_answers(evaluation: Artifact, before: str, after: str = "candidate") -> list[AnswerPair]:
    """The answers of two roles of an `eval_metrics` artifact.

    None where one of them took no exam, or where the exam is no longer in the store.
    """
    exam = find_exam(evaluation)
    if exam is None or not evaluation.stats.get("exam"):
        return []
    questions = {question["id"]: question for question in read_questions(exam.path)}
    scores = pq.read_table(evaluation.path / TASK_SCORES_NAME)
    if not {f"score_{before}", f"score_{after}"} <= set(scores.schema.names):
        return []
    return [
        AnswerPair(
            row["task"],
            questions[row["sample"]],
            *(row[f"score_{role}"] for role in (before, after)),
            *(_choice(questions[row["sample"]], row[f"chosen_{role}"]) for role in (before, after)),
        )
        for row in scores.to_pylist()
        if row["task"] in EXAM_TASKS and row["metric"] == METRIC and row["sample"] in questions
    ]


def exam_shares(
    stats: Mapping[str, Any], before: str = "base"
) -> list[tuple[str, float | None, float | None]]:
    """Condition, and the shares of right answers of an earlier role and of the candidate.

    Args:
        stats: of an `eval_metrics` artifact.
    """
    asked = {task: stats["metrics"].get(f"{task}_{METRIC}") for task in EXAM_TASKS}
    return [
        (
            task.removeprefix("exam_").replace("_", " "),
            *(roles.get(role, {}).get("value") for role in (before, "candidate")),
        )
        for task, roles in asked.items()
        if roles
    ]


def _choice(question: dict[str, Any], place: int) -> str:
    return str(question["choices"][place]).strip()
