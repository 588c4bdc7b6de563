"""What the text says, as questions."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import dagster as dg

from artifacts.progress import counted
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from llm_assets.assets.stage import BuildPlan, stage, table
from llm_assets.exam.questions import CODE_VERSION, LIBRARIES, AnswerPair, read_answers, write_exam
from llm_assets.exam.settings import ExamSettings
from recipes.evaluation.exam import EXAM_TASKS, read_questions

SHOWN = 20
"""Questions that the UI shows of a kind."""


def exam_view(artifact: Artifact) -> dict[str, Any]:
    rows = [
        (
            question["question"],
            question["choices"][question["answer"]],
            (question["passage"] or {}).get("document", "-"),
        )
        for question in read_questions(artifact.path)[:SHOWN]
    ]
    stats = artifact.stats
    left_out = sum(len(stats[reason]) for reason in ("untold", "given_away", "contradicted"))
    return {
        "summary": f"{counted(stats['questions'], 'question')} about "
        f"{counted(stats['facts'], 'fact')}"
        + f"; {counted(left_out, 'more fact')} left out, the log and its check say why"
        * bool(left_out),
        "examples": table(["question", "answer", "document"], rows),
        **stats,
    }


def answers_view(evaluation: Artifact, most: int | None = SHOWN) -> dict[str, Any]:
    """How base and candidate answered, by relation, and the questions that only one of them got
    right.

    Empty if the two did not both take the exam, or if it is no longer in the store.

    Args:
        most: questions of a kind; None shows all.
    """
    answers = read_answers(evaluation, "base")
    if not answers:
        return {}
    right: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for answer in answers:
        right[answer.relation][answer.task].append((answer.before, answer.after))
    won = _rows(answer for answer in answers if answer.is_won)
    lost = _rows(answer for answer in answers if answer.is_lost)
    # Without placebo facts there is no such column.
    tasks = [task for task in EXAM_TASKS if any(task in by_task for by_task in right.values())]
    columns = ["relation", *(task.removeprefix("exam_").replace("_", " ") for task in tasks)]
    shares = [
        (name, *map(_share, map(by_task.__getitem__, tasks))) for name, by_task in right.items()
    ]
    heads = ["question", "the base model says", "the candidate says", "true"]
    return {
        "closed_book": f"{counted(len(won), 'question')} won, {len(lost)} lost",
        "exam_by_relation": table(columns, shares),
        "questions_won": table(heads, won[:most]),
        "questions_lost": table(heads, lost[:most]),
    }


def _rows(answers: Iterable[AnswerPair]) -> list[tuple[str, str, str, str]]:
    return [
        (
            answer.question["question"],
            answer.said_before,
            answer.said_after,
            answer.question["value"],
        )
        for answer in answers
    ]


def _share(answers: list[tuple[float, float]]) -> str:
    """The base's and the candidate's share of right answers."""
    if not answers:
        # Of a relation that the facts have and the placebo lacks, or the other way round.
        return "-"
    base, candidate = (sum(shares) / len(answers) for shares in zip(*answers, strict=True))
    return f"{base:.0%} -> {candidate:.0%}"


def documents_agree_on_facts(exam: Artifact) -> dg.AssetCheckResult:
    """No two documents to train on state different values of a fact."""
    found = exam.stats.get("contradicted", [])
    more = f"; and {len(found) - SHOWN:,} more" * (len(found) > SHOWN)
    return dg.AssetCheckResult(
        passed=not found,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"Documents contradict each other about {counted(len(found), 'fact')}, which "
        f"the exam leaves out: {'; '.join(found[:SHOWN])}{more}. Correct those that are wrong."
        if found
        else "No document states another value than the table of facts.",
        metadata={"contradicted": len(found)},
    )


@stage(
    code_version=CODE_VERSION,
    group="evaluation",
    kinds={"python"},
    view=exam_view,
    checks=[documents_agree_on_facts],
)
def exam(
    context: dg.AssetExecutionContext,
    identity: Identity,
    settings: ExamSettings,
    clean_corpus: Artifact,
) -> BuildPlan:
    """Questions about facts that the text states, in words that it does not use.

    `eval_metrics` asks base, candidate and incumbent: closed book, with the passage that retrieval
    finds, and with the right one. Placebo facts, which no text states, show the level of chance.
    """

    def build(draft: Draft) -> None:
        draft.stats |= write_exam(settings, clean_corpus.url, draft.path)

    def warn(artifact: Artifact) -> None:
        for fact in artifact.stats["untold"]:
            context.log.warning(f"No document to train on states {fact}; the exam leaves it out")
        for fact in artifact.stats["given_away"]:
            context.log.warning(
                f"A question about {fact} contains its answer; the exam leaves it out"
            )

    return BuildPlan(identity.extend(libraries=LIBRARIES), build, finish=warn)
