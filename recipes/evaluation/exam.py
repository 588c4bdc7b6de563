"""An exam of facts under four conditions, and what they say about training.

The rivals are {base, candidate} x {closed book, with the passage that retrieval finds}; with the
right passage in the prompt the base shows what it could know at most. Retrieval beats training on
raw text in Ovadia and others (arXiv 2312.05934), so it is asked each time whether it suffices.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.shards.format import ShardStats
from recipes.evaluation.documents import TokenizedDocument, tokenized
from recipes.evaluation.harness import TaskScores, write_task
from recipes.evaluation.statistics import Interval, interval

LIBRARIES = frozenset({"lm-eval"})
"""Those that decide the scores, besides the settings' own."""
QUESTIONS_NAME = "questions.jsonl"
CLOSED_BOOK, RETRIEVAL, PASSAGE, PLACEBO = EXAM_TASKS = (
    "exam_closed_book",
    "exam_retrieval",
    "exam_passage",
    "exam_placebo",
)
METRIC = "acc"
READING = 0.6
"""Share of questions that a base has to answer with the right passage before it; one that answers
fewer is too small to read, and says nothing about training or retrieval."""
FEWEST_FACTS = 10
"""With fewer, one answer by chance changes the share by more than ten points."""


def read_questions(exam: Path) -> list[dict[str, Any]]:
    """The questions of an `exam` artifact."""
    # Not `splitlines`: a fact may hold one of Unicode's other line ends.
    lines = (exam / QUESTIONS_NAME).read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def write_exam_tasks(questions: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Write a task of lm-eval for each condition that the questions have; returns their names."""
    facts = [question for question in questions if not question["placebo"]]
    conditions = {
        CLOSED_BOOK: [(question, "") for question in facts],
        RETRIEVAL: [(question, f"{question['retrieved']['text']}\n\n") for question in facts],
        PASSAGE: [(question, f"{question['passage']['text']}\n\n") for question in facts],
        PLACEBO: [(question, "") for question in questions if question["placebo"]],
    }
    tasks = {task: of_task for task, of_task in conditions.items() if of_task}
    for task, of_task in tasks.items():
        rows = [
            {
                "document": question["id"],
                # Forms of one fact are answered alike, so they count as one observation.
                "cluster": f"{question['subject']}: {question['relation']}",
                "context": context + question["question"],
                "choices": question["choices"],
                "answer": question["answer"],
            }
            for question, context in of_task
        ]
        write_task(task, rows, folder)
    return list(tasks)


def prompts_of(
    questions: Sequence[dict[str, Any]], tokenizer: Any, stats: ShardStats, count: int
) -> list[TokenizedDocument]:
    """The first questions, of other subjects and relations as far as there are, for the models to
    answer in their own words.

    Each is tokenized as text of the shards, its end token being where the answer begins.
    """
    candidates = [question for question in questions if not question["placebo"]]
    selection: list[dict[str, Any]] = []
    while candidates and len(selection) < count:
        subjects, relations = (Counter(q[of] for q in selection) for of in ("subject", "relation"))
        # Another relation each time shows more than the same one about all subjects.
        rarest = min(candidates, key=lambda q: (subjects[q["subject"]], relations[q["relation"]]))
        selection.append(rarest)
        candidates.remove(rarest)
    prompts = [tokenized(q["id"], q["question"], tokenizer, stats) for q in selection]
    return [replace(q, is_target=np.arange(len(q.tokens)) == len(q.tokens) - 1) for q in prompts]


def judge_exam(tasks: Mapping[str, Sequence[TaskScores]]) -> dict[str, Any] | None:
    """What training buys; None where no exam was taken.

    Args:
        tasks: role to its scores; base and candidate are compared.

    Returns:
        `facts`, `closed_book` and `beyond_retrieval` (each the candidate's share of right answers
        minus the base's as `value`, `low`, `high`, paired by fact), `retrieval_suffices` (no gain
        beyond it was shown, the base can read, and there are facts enough), `sentence` for people.
    """
    shares = {
        role: {s.task: s for s in of_role if s.task in EXAM_TASKS and s.metric == METRIC}
        for role, of_role in tasks.items()
    }
    base, candidate = shares.get("base", {}), shares.get("candidate", {})
    if CLOSED_BOOK not in base or CLOSED_BOOK not in candidate:
        return None

    def gain(task: str) -> Interval:
        differences = candidate[task].values - base[task].values
        clusters = np.array(base[task].clusters)
        return interval(differences, np.ones(len(differences)), clusters)

    learnt, beyond, reading = map(gain, (CLOSED_BOOK, RETRIEVAL, PASSAGE))
    facts = len(set(base[CLOSED_BOOK].clusters))
    reads = float(base[PASSAGE].values.mean()) >= READING
    suffices = facts >= FEWEST_FACTS and reads and not beyond.low > 0
    return {
        "facts": facts,
        "closed_book": learnt.figures(),
        "beyond_retrieval": beyond.figures(),
        "retrieval_suffices": suffices,
        "sentence": _sentence(facts, learnt, beyond, reading, reads),
    }


def _sentence(
    facts: int, learnt: Interval, beyond: Interval, reading: Interval, reads: bool
) -> str:
    if facts < FEWEST_FACTS:
        return f"An exam about {facts} facts decides nothing; ask about at least {FEWEST_FACTS}."
    closed = (
        f"Closed book, training buys {_points(learnt)}."
        if learnt.low > 0
        else f"Closed book, no gain from training was shown: {_points(learnt)}."
    )
    if reading.high < 0:
        closed += f" With the right passage in its prompt, it lost: {_points(reading)}."
    if not reads:
        return f"{closed} The base model cannot read the passages, so retrieval is no rival to it."
    if beyond.low > 0:
        return f"{closed} Beyond retrieval, it buys {_points(beyond)}."
    return (
        f"{closed} No gain over retrieval was shown in {facts} facts: {_points(beyond)}. So, as "
        "far as this exam can tell, retrieval suffices for this text."
    )


def _points(share: Interval) -> str:
    value, low, high = (f"{100 * figure:+.0f}" for figure in (share.value, share.low, share.high))
    return f"{value} points (95% interval {low} to {high})"
