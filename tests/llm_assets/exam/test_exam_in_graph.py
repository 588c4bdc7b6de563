"""The exam as an asset between the clean corpus and the evaluation."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from llm_assets.board.server import build_app, open_board
from llm_assets.config import load_settings
from llm_assets.registry.base import LocalRegistry
from recipes.evaluation.exam import CLOSED_BOOK, METRIC, read_questions
from tests.conftest import ROOT, Project

SHIPPED = ROOT / "config" / "invented_products"
FORMS = {"forms": str(SHIPPED / "forms.yaml")}


@pytest.mark.soak
def test_both_models_take_the_exam_of_the_pipelines_facts(project: Project) -> None:
    facts = project.folder / "facts.csv"
    facts.write_text((SHIPPED / "facts.csv").read_text())
    source = {"type": "facts", "path": str(facts), "facts_per_document": 2}
    project.configure(
        raw_corpus={"sources": [source | FORMS]},
        exam={"facts": str(facts), "placebo": str(SHIPPED / "placebo.csv")} | FORMS,
        model_version={"gate": {"metric": "exam"}},
        eval_metrics={"generation": {"samples": 3, "new_tokens": 4}},
    )
    materialize = ("dagster", "asset", "materialize", "--select")
    project.run_well(*materialize, "*model_version")

    exam, evaluation, version = map(project.current, ("exam", "eval_metrics", "model_version"))
    assert version.stats["reasons"] == [
        "The exam asks about only 24 facts; 30 are needed to judge. Add facts to the file that "
        "`exam.facts` names."
    ]
    assert exam.stats["questions"] == 48 and exam.stats["untold"] == []
    assert evaluation.manifest.inputs["exam"] == exam.fingerprint
    assert evaluation.stats["exam"]["facts"] == 24
    # Held-out text decides nothing, so a first look at it is enough.
    assert evaluation.manifest.settings["held_out_tokens"] == 10_000
    metrics = evaluation.stats["metrics"]
    for condition in ("closed_book", "retrieval", "passage", "placebo"):
        for role in ("base", "candidate"):
            assert 0 <= metrics[f"exam_{condition}_acc"][role]["value"] <= 1

    scores = pq.read_table(evaluation.path / "task_scores.parquet").to_pylist()
    right = {question["id"]: question["answer"] for question in read_questions(exam.path)}
    closed_book = [one for one in scores if one["task"] == CLOSED_BOOK and one["metric"] == METRIC]
    assert len(closed_book) == 48
    for one in closed_book:
        assert (one["chosen_candidate"] == right[one["sample"]]) == (one["score_candidate"] == 1)

    (place,) = Path(exam.store.root).glob("registry/*/versions/1/page.html")
    page = place.read_text()
    as_of = r"<li>As of \d{4}-\d\d-\d\d \d\d:\d\d UTC; later decisions are not shown on this page"
    assert re.search(as_of, page) and "as of its verdict" not in page
    assert "<h1>Version 1</h1>" in page and "The exam asks about only 24 facts" in page
    for heading in ("exam by relation", "questions won", "samples", "loss curve"):
        assert f"<h3>{heading}</h3>" in page, heading
    assert "<td>guarantee</td>" in page and "data:image/png;base64," in page
    assert not re.search(r"<script|(src|href)=\"(?!data:)", page), "it needs no network"

    board = open_board(
        load_settings(project.config), project.record, LocalRegistry.of(project.record), dict, []
    )
    with TestClient(build_app(board), base_url="http://127.0.0.1:8012") as client:
        shown = client.get("/versions/1").text
        compared = client.get("/versions/compare?a=0&b=1").text
        asked = client.get("/ask").text
    assert "Correct answers, the base model → version 1" in shown and "closed book" in shown
    measured = metrics["held_out_bits_per_byte"]
    for role in ("base", "candidate"):
        assert f"{measured[role]['value']:.4g}" in compared, role
    assert "The exam, by relation" in compared and "<td>guarantee</td>" in compared
    assert "is not running" in asked

    # A fact that is told nowhere any more is not asked for, and the log says so.
    facts.write_text(facts.read_text() + "Jorvel toaster,town,Riga\n")
    project.configure(
        raw_corpus={"sources": [source | FORMS | {"path": str(SHIPPED / "facts.csv")}]}
    )
    said = project.run_well(*materialize, "raw_corpus,clean_corpus,exam")
    assert "No document to train on states Jorvel toaster: town; the exam leaves it out" in said
