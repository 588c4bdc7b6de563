"""Where weights serve quantized, the gate judges that form; the engines are real."""

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from artifacts.errors import UserError
from llm_assets.config import PipelineSettings, load_settings
from llm_assets.endpoint.base import check_engine, measure_as_served, quantized
from llm_assets.gate.judge import judge
from llm_assets.gate.verdict import GateSettings, Outcome, Verdict
from recipes.evaluation.measure import evaluate
from recipes.evaluation.settings import EvaluationSettings, GenerationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from tests.conftest import Project
from tests.llm_assets.conftest import SHARDS
from tests.llm_assets.in_process import ask
from tests.tiny import (
    change_weights,
    make_uneven,
    tiny_sequence_to_sequence_model,
    tiny_shards,
    tiny_texts,
    train_tiny_model,
)

GATE = GateSettings(general_tolerance=1_000.0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> EvaluationSpec:
    """An evaluated candidate that is better than the incumbent, and does not bear four bits."""
    folder = tmp_path_factory.mktemp("as_served")
    train_tiny_model(folder / "incumbent", tiny_model_folder, steps=40)
    train_tiny_model(folder / "trained", tiny_model_folder, steps=60)
    change_weights(folder / "trained", folder / "candidate", make_uneven)
    shards = tiny_shards(folder / "shards", tiny_model_folder, tiny_texts(400))
    spec = EvaluationSpec(
        base=ModelSource(path=tiny_model_folder, fingerprint="base"),
        candidate=ModelSource(path=folder / "candidate", fingerprint="candidate"),
        incumbent=ModelSource(path=folder / "incumbent", fingerprint="incumbent"),
        shards=folder / "shards",
        shard_stats=shards,
        output=folder / "evaluation",
        settings=EvaluationSettings(
            document_tokens=64,
            general_tokens=1_000,
            generation=GenerationSettings(samples=0),
        ),
    )
    evaluate(spec, lambda _: None)
    return spec


def quantizing(folder: Path, weights: str) -> PipelineSettings:
    """A pipeline that serves weights in a format of fewer bits."""
    content = {
        "name": "manual",
        "store": str(folder / "store"),
        "raw_corpus": {"sources": [{"type": "files", "name": "m", "path": "m"}]},
        "base_model": {"folder": "m"},
        "endpoint": {"weights": weights, "threads": 1},
    }
    return PipelineSettings.model_validate(content)


def verdict(spec: EvaluationSpec, result: dict[str, Any]) -> Verdict:
    scores = pq.read_table(Path(spec.output) / "scores.parquet")
    return judge(
        scores, result, GATE, candidate="candidate", incumbent="incumbent", look=1, readable=0
    )


def test_weights_are_quantized_on_this_machine_alone(tmp_path: Path) -> None:
    here = quantizing(tmp_path, "int8")
    assert quantized(here) == "int8" and quantized(quantizing(tmp_path, "f32")) is None
    assert quantized(here.model_copy(update={"platform": "google_cloud"})) is None


@pytest.mark.fault(
    "endpoint",
    "weights that no engine quantizes for this family",
    sees="the setting, the reason, and what to set",
    then="nothing is trained",
)
def test_family_whose_weights_no_engine_quantizes_is_refused_with_what_to_set(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    tiny_sequence_to_sequence_model(tmp_path / "t5", tiny_model_folder)
    message = r"(?s)`endpoint\.weights` is int8.*encoder-decoder.*Set bf16"
    with pytest.raises(UserError, match=message):
        check_engine(quantizing(tmp_path, "int8"), tmp_path / "t5", lambda _: None)


@pytest.mark.soak
def test_quantization_that_costs_too_much_is_rejected_with_the_reason(
    spec: EvaluationSpec, tmp_path: Path
) -> None:
    evaluated = json.loads((Path(spec.output) / "result.json").read_text())
    assert verdict(spec, evaluated).promoted
    result = evaluated | measure_as_served(quantizing(tmp_path, "int4"), spec, lambda _: None)
    rejected = verdict(spec, result)
    assert {reason.outcome for reason in rejected.reasons} == {Outcome.QUANTIZATION}
    assert "Served in int4 the candidate needs" in rejected.summary
    lost = rejected.quantization
    assert lost is not None and lost.served > 1.1 * lost.evaluated
    served, exact = (
        next(one for one in rejected.comparisons if one.task == task)
        for task in ("held_out_served", "held_out")
    )
    assert exact.difference < 0 < served.difference and served.documents == exact.documents
    assert result["evaluation_fingerprint"] != evaluated["evaluation_fingerprint"]


@pytest.mark.soak
def test_graph_judges_what_would_serve_and_shows_what_is_lost(
    already_made: Project, project: Project
) -> None:
    project.adopt(already_made, *SHARDS, "checkpoint")
    project.configure(endpoint={"weights": "int8", "threads": 1})
    assert not ask(project, "*model_version")
    evaluation = project.record.current("eval_metrics", needed_by="test")
    scores = pq.read_table(evaluation.path / "scores.parquet")
    served, exact = (
        scores.filter(pc.equal(scores["task"], task)) for task in ("held_out_served", "held_out")
    )
    assert served["document"] == exact["document"] and len(served) >= 30
    for role in ("candidate", "incumbent"):
        found, expected = (pc.sum(rows[f"score_{role}"]).as_py() for rows in (served, exact))
        assert found == pytest.approx(expected, rel=0.01) and found != expected
    reasons = project.record.current("model_version", needed_by="test").stats["reasons"]
    assert "Served in int8 the candidate needs" in reasons[-1]
    assert load_settings(project.config).endpoint.weights == evaluation.stats["served_weights"]
