"""The UI shows a diverged model as such; the gate is what rejects it."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq

from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.assets.evaluation import (
    Challenge,
    candidate_entry,
    figures_are_finite,
    metrics_view,
    open_challenge,
    samples_view,
)
from llm_assets.assets.verdict import VERDICT_NAME, read_verdict, verdict_view
from llm_assets.cli.pipeline.summary import evaluation_lines
from llm_assets.config import PipelineSettings
from llm_assets.gate.verdict import Comparison, Outcome
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.card import procedure
from recipes.evaluation.settings import BITS_PER_BYTE, SCORES_NAME, Metric
from tests.conftest import Project
from tests.llm_assets.in_process import ask
from tests.llm_assets.registry.conftest import judge, verdict


def shown(metrics: dict[str, Any], metric: Metric = BITS_PER_BYTE, **others: Any) -> dict[str, Any]:
    """What people see of an evaluation's figures."""
    stats = {"metrics": metrics, "metric": metric.model_dump(), "evaluation_fingerprint": "e"}
    return metrics_view(stats | others)


def make_model(store: Store, kind: str, **inputs: str) -> Artifact:
    """An artifact of any kind, which holds a model as well."""

    def write(draft: Draft) -> None:
        (draft.path / "model").mkdir()
        (draft.path / "model" / "model.safetensors").write_text(kind)
        draft.stats |= {"license": "unknown", "coverage": 1.0}

    return store.make(Identity(kind=kind, code_version="1", inputs=inputs), write)[0]


def test_figures_that_are_not_finite_are_said_and_not_plotted() -> None:
    sound = {"value": 1.2, "low": 1.1, "high": 1.3}
    diverged = {"value": None, "low": None, "high": None}
    metrics = {
        name: {"base": sound, "incumbent": sound, "candidate": diverged}
        for name in ("held_out_bits_per_byte", "general_bits_per_byte")
    }
    view = shown(metrics)
    assert view["summary"] == "1.2000 -> not finite bits per byte on held-out text"
    assert "held_out_bits_per_byte" not in view
    assert "not finite" in view["metrics"].value


def test_the_check_of_a_candidate_that_could_not_be_measured_says_why() -> None:
    metrics = {"held_out_bits_per_byte": {"base": {"value": 1.2, "low": 1.1, "high": 1.3}}}
    stats = {"metrics": metrics, "faults": {"candidate": "Training stopped at step 7."}}
    evaluation: Any = SimpleNamespace(stats=stats)
    found = figures_are_finite(evaluation)
    assert not found.passed
    assert found.description == "The candidate was not measured: Training stopped at step 7."


def test_a_version_was_trained_on_its_own_text_whatever_it_was_measured_on(tmp_path: Path) -> None:
    """As one that is made once more, while newer text waits to be trained on."""
    make = partial(make_model, Store(str(tmp_path)))
    raw, newer = (make("raw_corpus", source=text).fingerprint for text in ("text", "newer text"))
    shards, newest = (make("tokenized_shards", raw_corpus=one).fingerprint for one in (raw, newer))
    candidate = make("checkpoint", tokenized_shards=shards)
    measured = {"checkpoint": candidate.fingerprint, "tokenized_shards": newest}
    evaluation = make("eval_metrics", **measured)

    behind = candidate_entry(candidate, evaluation, "unknown").lineage

    assert (behind["tokenized_shards"], behind["raw_corpus"]) == (shards, raw)
    assert behind["eval_metrics"] == evaluation.fingerprint


def test_few_documents_without_bounds_are_shown_by_their_value() -> None:
    unbounded = {"value": 1.2, "low": None, "high": None}
    roles = {"base": unbounded, "candidate": unbounded}
    view = shown({"held_out_bits_per_byte": roles, "general_bits_per_byte": roles})
    assert view["held_out_bits_per_byte"] == 1.2
    assert "| held out bits per byte | 1.2000 | not measured | 1.2000 |" in view["metrics"].value
    assert view["bounds"].value == "none"


def test_a_classifiers_confusions_are_a_picture() -> None:
    figure = {"value": 0.9, "low": 0.8, "high": 1.0}
    metric = Metric(name="accuracy", unit="accuracy", higher_is_better=True)
    metrics = {"held_out_accuracy": {"base": figure, "candidate": figure}}
    details = {"candidate": {"labels": ["plumber", "none"], "confusion": [[9, 1], [0, 10]]}}
    picture = shown(metrics, metric, details=details)["confusion_matrix"].markdown().value
    assert picture.startswith("![") and "data:image/png;base64," in picture


def test_samples_are_shown_as_people_read_them(tmp_path: Path) -> None:
    said = {"base": f"one\n\n{'.' * 99}", "candidate": "two\tthree\n水水水水水水水水水水水水水水水"}
    samples = {role: [{"prompt": "The\nvalve", "completion": it}] for role, it in said.items()}
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    evaluation: Any = SimpleNamespace(
        path=tmp_path,
        store=SimpleNamespace(find_named=lambda *name: None),
        manifest=SimpleNamespace(inputs={}),
    )
    *_, row = samples_view(evaluation)["samples"].value.splitlines()
    assert row == f"| The valve | one {'.' * 40}… | two three {'水' * 15} |"


def test_a_verdict_says_how_many_comparisons_preceded_it_and_how_sure_its_intervals_are(
    tmp_path: Path,
) -> None:
    common: Any = {"reference": "incumbent", "difference": -0.02, "documents": 40, "clusters": 36}
    compared = [
        Comparison(task="held_out", level=0.0025, low=-0.03, high=-0.01, **common),
        Comparison(task="exam_closed_book", level=0.025, low=None, high=None, **common),
    ]
    found = verdict("new", "old", look=3).model_copy(update={"comparisons": compared})
    (tmp_path / VERDICT_NAME).write_text(found.model_dump_json())
    (tmp_path / "samples.json").write_text("{}")
    inputs = SimpleNamespace(inputs={"eval_metrics": "e"})
    artifact: Any = SimpleNamespace(path=tmp_path, manifest=inputs)
    artifact.store = SimpleNamespace(load=lambda *_: artifact, find_named=lambda *_: None)
    view = verdict_view(artifact)
    assert view["earlier_comparisons_without_promotion"] == 2
    *_, held_out, exam = view["comparisons"].value.splitlines()
    ends = "-0.0300 to -0.0100 | 99.5% | 36 independent documents |"
    assert held_out == f"| held out against incumbent | -0.0200 | {ends}"
    ends = "unbounded | 95% | 36 facts |"
    assert exam == f"| exam closed book against incumbent | -0.0200 | {ends}"


def test_a_candidate_that_is_measured_otherwise_is_one_more_comparison_from_the_beginning(
    with_evaluation: Project,
) -> None:
    """Rounds end by the bound that the gate judges by, and asking again measures nothing."""
    project = with_evaluation

    def judged() -> tuple[str, int, int]:
        assert ask(project, "*model_version") == ""
        evaluation = project.current("eval_metrics")
        question = evaluation.manifest.settings["question"]
        found = read_verdict(project.current("model_version"))
        assert found.look == question["look"]
        return evaluation.fingerprint, question["look"], question["readable"]

    first = judged()
    assert first[1:] == (1, 0) and judged() == first
    shutil.rmtree(project.current("eval_metrics").path)
    assert judged() == first, "what is gone is made again as what it was"
    project.configure(eval_metrics={"held_out_tokens": 3_000, "generation": {"samples": 0}})
    second = judged()
    assert second[2] == 1 and judged() == second


class Procedures:
    """Says by which procedure the same candidate is judged under changing settings."""

    def __init__(self, folder: Path) -> None:
        self.models = LocalRegistry(folder, "manual")
        store = Store(str(folder))
        kinds = ("checkpoint", "base_model")
        self.candidate, self.base = (make_model(store, kind) for kind in kinds)

    def settings(self, examples: dict[str, Any] | None = None, **sections: Any) -> PipelineSettings:
        source = {"type": "files", "name": "manual", "path": "text", "examples": examples}
        needed = {"raw_corpus": {"sources": [source]}, "base_model": {"folder": "model"}}
        return PipelineSettings.model_validate({"name": "manual"} | needed | sections)

    def chosen(self, *examples: dict[str, Any], **sections: Any) -> str:
        return self.challenge(self.settings(*examples, **sections)).procedure

    def challenge(self, settings: PipelineSettings) -> Challenge:
        pipeline: Any = SimpleNamespace(settings=settings)
        return open_challenge(pipeline, self.models, self.candidate, self.base, None)


def test_how_the_exam_asks_is_part_of_the_procedure(tmp_path: Path) -> None:
    procedures = Procedures(tmp_path)
    files = {name: tmp_path / name for name in ("facts", "placebo", "forms")}
    exam = {name: str(path) for name, path in files.items()}
    for path in files.values():
        path.write_text("before")

    def chosen() -> str:
        return procedures.chosen(exam=exam, model_version={"gate": {"metric": "exam"}})

    before = chosen()
    for name in ("facts", "placebo"):
        files[name].write_text("after")
    assert chosen() == before, "facts arrive as text does"
    files["forms"].write_text("after")
    assert chosen() != before


def test_what_decides_a_verdict_is_part_of_the_procedure_and_what_is_only_shown_is_not(
    tmp_path: Path,
) -> None:
    chosen = Procedures(tmp_path).chosen
    usual = chosen()
    assert chosen(model_version={"license": "Apache-2.0"}) == usual
    assert chosen(eval_metrics={"generation": {"samples": 0}}) == usual
    assert chosen(model_version={"gate": {"smallest_effect": 0.1}}) != usual
    assert chosen(eval_metrics={"held_out_tokens": 3_000}) != usual

    taught = {"recipe": "fine_tuning"}
    of_answers = {
        chosen({"form": "conversations"}, checkpoint=taught | how)
        for how in ({}, {"exact_match": {}}, {"exact_match": {"after": "####"}})
    }
    assert len(of_answers) == 3, "how answers are compared decides"
    of_targets = {
        chosen({"form": "pairs"}, checkpoint={"recipe": "sequence_to_sequence", "metric": metric})
        for metric in ("rouge1", "rougeL")
    }
    assert of_targets == {usual}, "the checkpoint's own settings say it"


def test_a_procedure_that_named_the_license_is_known_by_the_same_settings(tmp_path: Path) -> None:
    procedures = Procedures(tmp_path)
    settings = procedures.settings(model_version={"license": "MIT"})
    judged_by = {
        "eval_metrics": settings.eval_metrics.content(),
        "gate": settings.model_version.content(),
    }
    named = procedure(procedures.candidate, judged_by)
    procedures.challenge(settings)
    for number, of in enumerate([named, "another", named]):
        judge(procedures.models, f"{number}", promoted=False, procedure=of)
    assert procedures.challenge(settings).readable == 0
    changed = procedures.settings(
        model_version={"license": "MIT", "gate": {"smallest_effect": 0.1}}
    )
    assert procedures.challenge(changed).readable == 3


def test_as_many_documents_are_measured_as_the_gate_needs(with_evaluation: Project) -> None:
    """The budget is reached by fewer, and the first round would decide."""
    project = with_evaluation
    gate = {"general_tolerance": 10.0, "minimum_documents": 45}
    project.configure(
        eval_metrics={"held_out_tokens": 500, "generation": {"samples": 0}},
        model_version={"gate": gate},
    )
    assert ask(project, "*model_version") == ""
    evaluation = project.current("eval_metrics")
    assert evaluation.manifest.settings["minimum_documents"] == 45
    scores = pq.read_table(evaluation.path / SCORES_NAME).to_pylist()
    assert len({row["cluster"] for row in scores if row["task"] == "held_out"}) >= 45
    found = read_verdict(project.current("model_version"))
    assert Outcome.TOO_FEW_DOCUMENTS not in {reason.outcome for reason in found.reasons}
    told = dict(evaluation_lines(evaluation))["held-out text"]
    assert "tokens, more than `eval_metrics.held_out_tokens` (500): at least 45" in told
