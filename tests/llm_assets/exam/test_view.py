"""What people see of the answers to an exam."""

import html
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.assets.exam import answers_view, documents_agree_on_facts, exam_view
from recipes.evaluation.exam import CLOSED_BOOK, METRIC, PLACEBO, QUESTIONS_NAME
from recipes.evaluation.settings import TASK_SCORES_NAME


def taken(folder: Path, asked: dict[str, str]) -> Artifact:
    """An evaluation whose base knew nothing and whose candidate knew all.

    Args:
        asked: relation to the condition under which one question of it was asked.
    """
    store = Store(str(folder))

    def write_questions(draft: Draft) -> None:
        for relation in asked:
            question = {"id": relation, "relation": relation, "passage": None, "value": "right"}
            question |= {"question": f"Which {relation}?", "choices": [" wrong", " right"]}
            with (draft.path / QUESTIONS_NAME).open("a") as file:
                file.write(f"{json.dumps(question)}\n")

    def write_scores(draft: Draft) -> None:
        answers = {"metric": METRIC, "score_base": 0.0, "score_candidate": 1.0}
        answers |= {"chosen_base": 0, "chosen_candidate": 1}
        rows = [{"task": task, "sample": relation} | answers for relation, task in asked.items()]
        pq.write_table(pa.Table.from_pylist(rows), draft.path / TASK_SCORES_NAME)
        draft.stats["exam"] = {"facts": len(asked)}

    exam, _ = store.make(Identity(kind="exam", code_version="1", inputs={}), write_questions)
    inputs = {"exam": exam.fingerprint}
    identity = Identity(kind="eval_metrics", code_version="1", inputs=inputs)
    return store.make(identity, write_scores)[0]


def test_a_relation_that_only_facts_or_only_placebos_have_is_shown_by_what_was_asked(
    tmp_path: Path,
) -> None:
    view = answers_view(taken(tmp_path, {"weight": CLOSED_BOOK, "town": PLACEBO}))
    _, _, *rows = html.unescape(view["exam_by_relation"].value).splitlines()
    assert rows == ["| weight | 0% -> 100% | - |", "| town | - | 0% -> 100% |"]
    assert view["closed_book"] == "1 question won, 0 lost"


def test_the_line_of_an_exam_counts_the_facts_that_it_leaves_out(tmp_path: Path) -> None:
    def build(draft: Draft) -> None:
        (draft.path / QUESTIONS_NAME).write_text("")
        draft.stats |= {"questions": 4, "facts": 2, "untold": ["lamp: town"]}
        draft.stats |= {"given_away": [], "contradicted": ["fan: town ('Oslo' in a, 'Cork' in b)"]}

    made, _ = Store(str(tmp_path)).make(Identity(kind="exam", code_version="1", inputs={}), build)
    told = "4 questions about 2 facts; 2 more facts left out, the log and its check say why"
    assert exam_view(made)["summary"] == told
    checked = documents_agree_on_facts(made)
    assert not checked.passed
    assert "leaves out: fan: town ('Oslo' in a, 'Cork' in b). Correct" in str(checked.description)
