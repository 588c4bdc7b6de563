"""The evaluation program on tiny models and shards."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from artifacts import libraries
from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import Shard, ShardSet, list_documents
from recipes.device import Device
from recipes.evaluation.documents import TokenizedDocument, take
from recipes.evaluation.measure import evaluate, read_data, scores_key
from recipes.evaluation.results import Data
from recipes.evaluation.settings import BITS_PER_BYTE, GateQuestion, GenerationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from tests.example_shards import example_shards
from tests.recipes.evaluation.conftest import SETTINGS, MakeSpec
from tests.tiny import change_weights
from tests.tiny_tasks import TASKS

TASK = TASKS["fine_tuning"]


def silent(_: str) -> None:
    """Takes a report and says nothing."""


def test_bits_are_those_of_the_model_read_one_document_at_a_time(
    make_evaluation: MakeSpec, base_model: Path
) -> None:
    spec = make_evaluation(settings={"document_tokens": None})
    evaluate(spec, silent)
    scores = pq.read_table(Path(spec.output) / "scores.parquet").to_pylist()
    model = AutoModelForCausalLM.from_pretrained(base_model).eval().requires_grad_(False)
    length = spec.shard_stats.sequence_length
    data = read_data(spec)
    documents = [d for documents in data.tasks.values() for d in documents]
    assert any(len(document.tokens) > length for document in documents)
    for document, row in zip(documents, scores, strict=True):
        bits = 0.0
        for start in range(0, len(document.tokens) - 1, length):
            tokens = torch.from_numpy(document.tokens[start : start + length + 1])[None]
            logits = model(tokens[:, :-1]).logits.double().log_softmax(-1)
            bits -= float(logits.gather(-1, tokens[:, 1:, None]).sum()) / math.log(2)
        assert row["document"] == document.id
        # Autocast to bfloat16 moves a score by well under one part in a thousand.
        assert row["score_base"] == pytest.approx(bits, rel=2e-3)


def test_the_weights_are_judged_as_an_endpoint_has_them(
    make_evaluation: MakeSpec, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without bfloat16 too, where the endpoint stores them so and computes in
    float32: no step of training is judged that is too small for what serves."""
    monkeypatch.setattr(Device, "precision", lambda self: "float32")

    def make_finer(weights: dict[str, Any]) -> None:
        weights.update({name: weight * 1.0015 for name, weight in weights.items()})

    def round_weights(weights: dict[str, Any]) -> None:
        weights.update({name: weight.bfloat16().float() for name, weight in weights.items()})

    finer = change_weights(base_model, tmp_path / "finer", make_finer)
    rounded = change_weights(finer, tmp_path / "rounded", round_weights)
    scores = []
    for folder in (finer, rounded):
        source = ModelSource(path=str(folder), fingerprint=folder.name)
        spec = make_evaluation(candidate=source)
        evaluate(spec, silent)
        rows = pq.read_table(Path(spec.output) / "scores.parquet").to_pylist()
        scores.append([row["score_candidate"] for row in rows])
    assert scores[0] == scores[1]


def test_every_role_has_finite_figures_with_their_interval(make_evaluation: MakeSpec) -> None:
    spec = make_evaluation()
    result = evaluate(spec, silent)
    assert json.loads((Path(spec.output) / "result.json").read_text()) == result
    for name in ("held_out_bits_per_byte", "general_bits_per_byte"):
        for role in ("base", "candidate"):
            figure = result["metrics"][name][role]
            assert figure["low"] < figure["value"] < figure["high"]
    samples = json.loads((Path(spec.output) / "samples.json").read_text())
    assert samples["base"][0]["prompt"] == samples["candidate"][0]["prompt"]


def test_one_model_in_two_roles_is_measured_once(make_evaluation: MakeSpec) -> None:
    spec = make_evaluation()
    spec = make_evaluation(incumbent=spec.base)
    lines: list[str] = []
    result = evaluate(spec, lines.append)
    assert sum("loading" in line for line in lines) == 2
    metrics = result["metrics"]["held_out_bits_per_byte"]
    assert metrics["incumbent"] == metrics["base"]


@pytest.mark.parametrize("package", ["torch", "transformers", "tokenizers", "lm-eval"])
def test_scores_measured_with_other_libraries_are_others(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data({}, [], [], [], BITS_PER_BYTE, "evaluation")
    model = ModelSource(path="model", fingerprint="model")
    before = scores_key(data, model)
    assert scores_key(replace(data, fingerprint="other"), model) != before
    assert scores_key(data, ModelSource(path="model", fingerprint="other")) != before
    versions = libraries.version
    monkeypatch.setattr(
        libraries, "version", lambda name: "0" if name == package else versions(name)
    )
    assert scores_key(data, model) != before


def test_fingerprint_names_data_and_settings_but_no_models(
    make_evaluation: MakeSpec, candidate: Path
) -> None:
    spec = make_evaluation()
    same = make_evaluation(candidate=spec.base, settings={"batch_tokens": 64})
    other = make_evaluation(settings={"seed": 1})
    assert read_data(spec).fingerprint == read_data(same).fingerprint
    assert read_data(spec).fingerprint != read_data(other).fingerprint


@pytest.mark.fault(
    "eval_metrics",
    "incumbent cannot be read",
    sees="that it cannot be read",
    then="the gate counts it as a fault: nothing is promoted",
)
def test_incumbent_that_cannot_be_read_is_a_fault_for_the_gate(
    make_evaluation: MakeSpec, tmp_path: Path
) -> None:
    gone = ModelSource(path=tmp_path / "gone", fingerprint="gone")
    result = evaluate(make_evaluation(incumbent=gone), silent)
    assert "no config.json" in result["faults"]["incumbent"]
    assert set(result["metrics"]["held_out_bits_per_byte"]) == {"base", "candidate"}
    result = evaluate(make_evaluation(candidate=gone), silent)
    assert "no config.json" in result["faults"]["candidate"]
    with pytest.raises(UserError, match=r"tokenizer in .*gone cannot be read"):
        evaluate(make_evaluation(base=gone), silent)


@pytest.mark.fault(
    "eval_metrics",
    "incumbent with another tokenizer",
    sees="that nothing can be compared, and `llm-assets approve`",
    then="the gate counts it as a fault: nothing is promoted",
)
def test_incumbent_with_another_tokenizer_is_a_fault_for_the_gate(
    make_evaluation: MakeSpec, candidate: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(candidate, tmp_path / "other")
    content = json.loads((folder / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    other = ModelSource(path=folder, fingerprint="other")
    result = evaluate(make_evaluation(incumbent=other), silent)
    assert "another tokenizer" in result["faults"]["incumbent"]
    assert set(result["metrics"]["held_out_bits_per_byte"]) == {"base", "candidate"}


@pytest.mark.fault(
    "eval_metrics",
    "a model's scores are not numbers",
    sees="that it has no score",
    then="the gate rejects it",
)
def test_model_that_answers_nan_has_no_figure(
    make_evaluation: MakeSpec, tmp_path: Path, base_model: Path
) -> None:
    folder = change_weights(
        base_model,
        tmp_path / "diverged",
        lambda weights: weights["model.norm.weight"].fill_(torch.nan),
    )
    diverged = ModelSource(path=folder, fingerprint="diverged")
    nothing = GenerationSettings(samples=0)
    spec = make_evaluation(candidate=diverged, settings={"generation": nothing})
    result = evaluate(spec, silent)
    assert result["metrics"]["held_out_bits_per_byte"]["candidate"]["value"] is None
    scores = pq.read_table(Path(spec.output) / "scores.parquet")
    assert np.isnan(scores["score_candidate"].to_numpy()).all()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    limits=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)
def test_smaller_limit_takes_a_subset(sizes: list[int], limits: tuple[int, int]) -> None:
    documents = [
        TokenizedDocument(str(n), str(n % 7), size, np.zeros(size, np.int64))
        for n, size in enumerate(sizes)
    ]
    few, many = (take(documents, limit, seed=0) for limit in sorted(limits))
    assert many[: len(few)] == few
    assert sum(d.bytes for d in few) >= min(min(limits), sum(sizes))


def test_near_copies_do_not_count_towards_the_fewest_documents() -> None:
    documents = [
        TokenizedDocument(str(n), str(n // 3), 10, np.zeros(10, np.int64)) for n in range(60)
    ]
    taken = take(documents, limit=10, seed=0, at_least=12)
    assert len({document.cluster for document in taken}) == 12


def test_the_newest_slice_of_held_out_text_is_measured_by_itself(
    make_evaluation: MakeSpec, shards_folder: Path, tmp_path: Path
) -> None:
    alone = evaluate(make_evaluation(), silent)
    assert "held_out_newest_bits_per_byte" not in alone["metrics"]

    folder = tmp_path / "grown"
    shutil.copytree(shards_folder, folder)
    file = folder / "held_out-00001.documents.parquet"
    table = pq.read_table(file)
    slices = pa.array([2] * 3 + [1] * (len(table) - 3), pa.int64())
    pq.write_table(table.set_column(6, "slice", slices), file)
    spec = make_evaluation(settings={"newest_tokens": None}).model_copy(
        update={"shards": str(folder)}
    )
    result = evaluate(spec, silent)

    scores = pq.read_table(Path(spec.output) / "scores.parquet").to_pylist()
    newest = [row for row in scores if row["task"] == "held_out_newest"]
    assert [row["slice"] for row in newest] == [2, 2, 2]
    assert {row["document"] for row in newest} == set(table["id"].to_pylist()[:3])
    bits = sum(row["score_candidate"] for row in newest) / sum(row["size"] for row in newest)
    measured = result["metrics"]["held_out_newest_bits_per_byte"]["candidate"]["value"]
    assert measured == pytest.approx(bits)
    pooled = [row for row in scores if row["task"] == "held_out"]
    assert {row["source"] for row in pooled} == {"manual"}
    assert result["documents"]["held_out"] == alone["documents"]["held_out"] == len(pooled)


def test_measuring_ends_with_the_round_that_decides(
    make_evaluation: MakeSpec, base_model: Path, candidate: Path, tmp_path: Path
) -> None:
    """Two models that score the same need one round; where the question stays open, all is read."""
    budget = {"held_out_tokens": 1_000, "minimum_documents": 2}
    question = GateQuestion(look=1, readable=0, lifetime_error=0.05, smallest_effect=0.005)
    same = ModelSource(path=base_model, fingerprint="copy")
    alike = evaluate(make_evaluation(candidate=same, question=question, settings=budget), silent)
    assert alike["rounds"]["measured"] == 1 < alike["rounds"]["planned"]

    # Some documents could show no gain at all, if the error had to be small.
    fine = question.model_copy(update={"smallest_effect": 0.0, "lifetime_error": 0.5})
    lines: list[str] = []
    models = {
        "base": ModelSource(path=candidate, fingerprint="worse"),
        "candidate": ModelSource(path=base_model, fingerprint="slightly better"),
    }
    fields = {"settings": budget, "cache": tmp_path / "cache", **models}
    spec = make_evaluation(question=fine, output=tmp_path / "open", **fields)
    open_to_the_end = evaluate(spec, lines.append)
    rounds = open_to_the_end["rounds"]
    assert rounds["measured"] == rounds["planned"] == 3
    assert sum("The verdict is open" in line for line in lines) == 2
    everything = evaluate(make_evaluation(settings=budget, **models), silent)
    assert open_to_the_end["documents"] == everything["documents"]
    assert 0 < rounds["share"] <= 1
    assert open_to_the_end["metrics"] == everything["metrics"]
    assert alike["documents"]["held_out"] < everything["documents"]["held_out"]
    lines.clear()
    assert evaluate(spec, lines.append) == open_to_the_end
    assert not any("loading" in line for line in lines), "what was measured before is known"


def test_a_model_whose_perplexity_no_number_holds_has_no_figure(tmp_path: Path) -> None:
    """As one that learned answers at far too high a rate."""
    TASK.model(tmp_path / "base")

    def make_sure_of_what_is_wrong(weights: dict[str, Any]) -> None:
        (last,) = (name for name in weights if name.endswith("model.norm.weight"))
        weights[last] = weights[last] * 1e6

    change_weights(tmp_path / "base", tmp_path / "candidate", make_sure_of_what_is_wrong)
    base, candidate = (
        ModelSource(path=str(tmp_path / name), fingerprint=name) for name in ("base", "candidate")
    )
    spec = EvaluationSpec(
        base=base,
        candidate=candidate,
        shards=str(tmp_path / "shards"),
        shard_stats=example_shards(tmp_path / "shards", tmp_path / "base", TASK),
        output=str(tmp_path / "output"),
        cache=str(tmp_path / "cache"),
        settings=SETTINGS,
    )
    for _ in ("measured", "read again"):
        metrics = evaluate(spec, silent)["metrics"]
        assert metrics["held_out_bits_per_byte"]["candidate"]["value"] > 0
        assert metrics["held_out_perplexity"]["base"]["value"] > 1
        assert metrics["held_out_perplexity"]["candidate"]["value"] is None


def test_a_model_whose_training_diverged_is_a_fault_and_not_measured(
    make_evaluation: MakeSpec, candidate: Path
) -> None:
    source = ModelSource(path=candidate, fingerprint="candidate", fault="Training stopped.")
    lines: list[str] = []
    result = evaluate(make_evaluation(candidate=source), lines.append)
    assert result["faults"] == {"candidate": "Training stopped."}
    assert not any("candidate: loading" in line for line in lines)


def test_text_that_was_forgotten_is_no_part_of_the_held_out_text(
    make_evaluation: MakeSpec, shards_folder: Path, shards: ShardStats
) -> None:
    nothing = {"generation": GenerationSettings(samples=0), "held_out_tokens": None}
    spec = make_evaluation(settings=nothing)
    listed = list_documents(ShardSet(shards_folder, shards, "held_out"))
    texts = sorted(set(listed["text_hash"].to_pylist()))

    def without(erased: list[str]) -> EvaluationSpec:
        stats = shards.model_copy(update={"erased": erased})
        return spec.model_copy(update={"shard_stats": stats})

    data = read_data(without(texts[::2]))
    assert data.share == 1 and len(data.tasks["held_out"]) < len(read_data(spec).tasks["held_out"])
    with pytest.raises(UserError, match=r"All held_out text .* was forgotten.*tokenized_shards"):
        read_data(without(texts))


def test_held_out_documents_are_listed_once(
    make_evaluation: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be millions of them."""
    spec = make_evaluation()
    listed: list[str] = []
    documents = Shard.documents

    def noted(shard: Shard, columns: Sequence[str] | None = None) -> pa.Table:
        listed.append(shard.entry.name)
        return documents(shard, columns)

    monkeypatch.setattr(Shard, "documents", noted)
    assert read_data(spec).tasks["held_out"]
    assert sorted(listed) == sorted(set(listed))
