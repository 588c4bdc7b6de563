"""What an exam's scores say about training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts.model import read_tokenizer
from artifacts.shards.format import ShardStats
from recipes.evaluation.exam import (
    CLOSED_BOOK,
    EXAM_TASKS,
    METRIC,
    PASSAGE,
    PLACEBO,
    QUESTIONS_NAME,
    RETRIEVAL,
    judge_exam,
    prompts_of,
    write_exam_tasks,
)
from recipes.evaluation.harness import TaskScores
from recipes.evaluation.measure import evaluate
from tests.recipes.evaluation.conftest import MakeSpec


def scores(
    shares: dict[str, float], seed: int, facts: int = 48, forms: int = 2
) -> list[TaskScores]:
    """Answers by chance, right so often; the forms of a fact are one observation."""
    draw = np.random.default_rng(seed)
    names = [f"{fact}/{form}" for fact in range(facts) for form in range(forms)]
    clusters = [name.partition("/")[0] for name in names]
    return [
        TaskScores(
            task,
            METRIC,
            names,
            clusters,
            (draw.random(len(names)) < share).astype(float),
            [None] * len(names),
        )
        for task, share in shares.items()
    ]


def judge(base: dict[str, float], candidate: dict[str, float], seed: int, **of: int) -> Any:
    both = {
        "base": scores(base, 2 * seed, **of),
        "candidate": scores(candidate, 2 * seed + 1, **of),
    }
    return judge_exam(both)


@pytest.mark.parametrize("seed", range(20))
def test_retrieval_suffices_where_it_answers_what_training_answers(seed: int) -> None:
    base = {CLOSED_BOOK: 0.25, RETRIEVAL: 0.93, PASSAGE: 0.97, PLACEBO: 0.25}
    judged = judge(base, base | {CLOSED_BOOK: 0.7}, seed)
    assert judged["retrieval_suffices"]
    assert "No gain over retrieval was shown in 48 facts: " in judged["sentence"]
    assert "retrieval suffices for this text" in judged["sentence"]
    assert judged["closed_book"]["low"] > 0


@pytest.mark.parametrize("seed", range(20))
def test_training_buys_where_retrieval_finds_little(seed: int) -> None:
    base = {CLOSED_BOOK: 0.25, RETRIEVAL: 0.4, PASSAGE: 0.97, PLACEBO: 0.25}
    judged = judge(base, base | {CLOSED_BOOK: 0.8, RETRIEVAL: 0.85}, seed)
    assert not judged["retrieval_suffices"] and "Beyond retrieval, it buys +" in judged["sentence"]


def test_a_base_that_cannot_read_is_no_proof_for_retrieval() -> None:
    base = {CLOSED_BOOK: 0.25, RETRIEVAL: 0.3, PASSAGE: 0.3}
    judged = judge(base, base, 0)
    assert not judged["retrieval_suffices"] and "cannot read the passages" in judged["sentence"]


@pytest.mark.parametrize(("passage", "is_told"), [(0.97, False), (0.5, True)])
def test_a_model_that_reads_worse_than_its_base_is_told(passage: float, is_told: bool) -> None:
    base = {CLOSED_BOOK: 0.25, RETRIEVAL: 0.6, PASSAGE: 0.97}
    judged = judge(base, base | {CLOSED_BOOK: 0.7, PASSAGE: passage}, 0)
    assert ("With the right passage in its prompt, it lost: -" in judged["sentence"]) == is_told


def test_few_facts_decide_nothing() -> None:
    shares = {CLOSED_BOOK: 0.2, RETRIEVAL: 0.9, PASSAGE: 0.9}
    few = judge(shares, shares, 0, facts=5)
    assert "about 5 facts decides nothing" in few["sentence"] and not few["retrieval_suffices"]


def test_one_fact_that_differs_is_no_proof_of_anything() -> None:
    base, candidate = (scores(dict.fromkeys(EXAM_TASKS, 1.0), 0) for _ in range(2))
    for scored in base:
        scored.values[:2] = 0, 1
    for scored in candidate:
        scored.values[:2] = 1, 0
    judged = judge_exam({"base": base, "candidate": candidate})
    assert judged and judged["closed_book"]["value"] == 0
    assert judged["retrieval_suffices"]
    for scored in base:
        scored.values[2:4] = 0, 0
    judged = judge_exam({"base": base, "candidate": candidate})
    assert judged and "no gain from training was shown" in judged["sentence"]
    assert "nan" not in judged["sentence"] and "inf" not in judged["sentence"]


def test_without_an_exam_or_a_candidate_that_was_measured_there_is_no_judgement() -> None:
    assert judge_exam({"base": [], "candidate": []}) is None
    assert judge_exam({"base": scores({CLOSED_BOOK: 0.2, PASSAGE: 0.9}, 0)}) is None


QUESTION = {
    "id": "lamp: town, form 1",
    "subject": "lamp",
    "relation": "town",
    "question": "Where from? The lamp:",
    "choices": [" Riga", " Lyon"],
    "answer": 0,
    "placebo": False,
    "passage": {"document": "a", "text": "The lamp is made in Riga."},
    "retrieved": {"document": "b", "text": "A lamp shines."},
}


def test_each_condition_is_a_task_of_its_own(tmp_path: Path) -> None:
    placebo = QUESTION | {"placebo": True, "passage": None}
    assert tuple(write_exam_tasks([QUESTION, placebo], tmp_path)) == EXAM_TASKS
    assert write_exam_tasks([QUESTION], tmp_path / "less") == list(EXAM_TASKS[:3])
    assert "made in Riga.\\n\\nWhere from?" in (tmp_path / f"{PASSAGE}.jsonl").read_text()
    assert "A lamp shines.\\n\\nWhere from?" in (tmp_path / f"{RETRIEVAL}.jsonl").read_text()


def test_models_answer_the_whole_question_in_their_own_words(
    tmp_path: Path, make_evaluation: MakeSpec, base_model: Path, shards: ShardStats
) -> None:
    asked = "Where does the lamp come from that stands in each room of this house? It is of"
    question = QUESTION | {"question": asked}
    (tmp_path / QUESTIONS_NAME).write_text(json.dumps(question) + "\n")
    spec = make_evaluation(exam=tmp_path)
    evaluate(spec, lambda _: None)
    samples = json.loads((Path(spec.output) / "samples.json").read_text())
    assert samples["base"][0]["prompt"] == asked, "and not its first 8 tokens alone"

    tokenizer = read_tokenizer(base_model)
    started = shards.model_copy(update={"start_token_id": 1})
    (prompt,) = prompts_of([question], tokenizer, started, count=1)
    assert prompt.input_tokens[0] == 1 and tokenizer.decode(prompt.input_tokens[1:]) == asked

    about = [
        ("lamp", "town"),
        ("lamp", "price"),
        ("fan", "town"),
        ("fan", "price"),
        ("oven", "town"),
    ]
    several = [
        QUESTION | {"id": f"{subject} {relation}", "subject": subject, "relation": relation}
        for subject, relation in about
    ]
    found = prompts_of(several, tokenizer, shards, count=4)
    assert [one.id for one in found] == ["lamp town", "fan price", "oven town", "lamp price"]
