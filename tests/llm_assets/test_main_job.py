"""The whole loop as a user runs it: real Spark, real training, a real endpoint, tiny text."""

import io
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import AssetKey, DagsterInstance
from rich.console import Console

from artifacts.examples import Form
from llm_assets.assets.corpus import shards_view
from llm_assets.assets.evaluation import samples_view
from llm_assets.assets.figures import loss_line
from llm_assets.board.ask import find_examples
from llm_assets.cli.pipeline.summary import (
    corpus_lines,
    evaluation_lines,
    exam_lines,
    print_request,
    print_samples,
    training_lines,
)
from llm_assets.registry.base import LocalRegistry
from llm_assets.tracing.dropped import tell_held_back
from llm_assets.tracing.explain import form_shown, read_samples
from recipes.evaluation.settings import ANSWER_BITS_PER_BYTE, BITS_PER_BYTE
from recipes.spec import METRICS_NAME, read_metrics
from tests.conftest import ROOT, Project
from tests.listening import outside_loopback
from tests.llm_assets.in_process import ask, type_in
from tests.llm_assets.test_private_folders import open_to_others
from tests.needs import needs
from tests.waiting import WAIT_SECONDS

ASSETS = [
    "raw_corpus",
    "clean_corpus",
    "tokenized_shards",
    "base_model",
    "checkpoint",
    "eval_metrics",
    "model_version",
    "endpoint",
]
SLOW = {
    *("torch", "transformers", "gcsfs", "google.cloud.bigquery", "google.cloud.storage"),
    "google.cloud.aiplatform_v1",
}
"""What loads slowly, and is not needed to define anything."""


def screen(project: Project) -> str:
    return (project.folder / "screen.txt").read_text()


def test_one_screen_says_what_came_out(made: Project) -> None:
    text = " ".join(screen(made).split())
    for asset in ASSETS:
        assert f"✓ {asset}" in text
    for label in ("documents read 240", "tokens", "training loss", "held-out text", "general text"):
        assert label in text
    assert "promoted." in text and "serves version 1" in text
    assert re.search(r"raw_corpus \d+ s, .*checkpoint \d+ s.* Done in", text)
    assert "a text, continued in the models' own words" in text


def test_the_loss_on_the_screen_is_of_validation_text_and_no_single_batchs(made: Project) -> None:
    checkpoint, shards = (made.current(kind) for kind in ("checkpoint", "tokenized_shards"))
    told, validation = dict(training_lines(checkpoint, shards)), checkpoint.stats["validation"]
    figures = f"{validation['start']:.4f} -> {validation['end']:.4f} bits per byte"
    assert told["training"].startswith("12 steps, ") and told["training"].endswith(figures)
    assert f"validation text {figures}" in " ".join(screen(made).split())


def test_the_curve_of_a_loss_is_a_running_mean() -> None:
    losses = [4.0, 2.0, 5.0, 1.0, *[3.0] * 10, 1.0, 2.0]
    told = loss_line([{"loss": loss} for loss in losses])
    assert told.startswith("3.000 ") and told.endswith(" 1.500, averaged over 2 steps")
    assert loss_line([{"loss": 2.0}, {"loss": None}]) == "2.000 ▁  nan"


def test_the_share_that_was_read_does_not_count_the_tokens_that_were_trained_on(
    tmp_path: Path,
) -> None:
    (tmp_path / METRICS_NAME).write_text('{"step": 1, "loss": 2.0}\n')
    # Two passes of masked language modeling, which trains on 15% of the tokens.
    trained = {"steps": 12, "tokens_per_second": 9.0, "tokens_seen": 30, "samples_seen": 30}
    trained |= {"samples_replayed": 10, "validation": {"start": 3.0, "end": 2.0}}
    trained |= {"validation_unit": "bits per target", "coverage": 1.0}
    checkpoint: Any = SimpleNamespace(stats=trained, url=str(tmp_path))
    shards: Any = SimpleNamespace(stats={"tokens": {"train": 100}, "rows": {"train": 10}})
    told = dict(training_lines(checkpoint, shards))
    assert told["coverage"].startswith("2.0 passes over the")
    assert "bits per target (fewer are better; a target is a token of an answer" in told["training"]
    # New rows may be read twice, and rows that were left before never.
    checkpoint.stats["coverage"] = 0.75
    told = dict(training_lines(checkpoint, shards))
    assert told["coverage"].startswith("75.0% of the training text read so far, as many")


def test_what_changed_and_what_is_held_back_or_left_out_is_on_the_screen(
    made: Project, tmp_path: Path
) -> None:
    raw, clean, shards = (made.current(kind) for kind in ASSETS[:3])
    told = dict(corpus_lines(raw, clean, shards))
    assert "left out" not in told and "again" not in told["tokens"]
    shards.stats["removed_as_overlapping_held_out"] = {"train": 18, "validation": 2}
    shards.stats.update(labels=["pump", "fan"], label_counts=[9, 2])
    contradicting = "contradicting_label: a_b (kept: pump)"
    clean.stats["dropped"][contradicting] = 1
    raw.stats["documents"] += 1
    listed = {"id": ["T2", "T1"], "reason": ["too_short", contradicting]}
    pq.write_table(pa.table(listed), tmp_path / "dropped-00000.parquet")
    with_list: Any = SimpleNamespace(url=str(tmp_path), stats=clean.stats)
    lines = corpus_lines(raw, with_list, shards)
    told = dict(lines)
    assert told["classes"].endswith("2, the rarest first: fan: 2, pump: 9 texts to train on")
    assert told["removed"].endswith("contradicting label: a_b (kept: pump) 1")
    assert any("most documents is kept; others: T1; the reason" in text for _, text in lines)
    assert told["left out"] == "20 that share text with what is held out"
    # As many documents are in the shards as before, so 20 of them come twice.
    assert "to train on (20 of them again, by `tokenized_shards.mixing`), " in told["tokens"]
    rows = {"id": ["x", "y"], "text_hash": ["x", "y"], "source": ["manual", "old"]}
    pq.write_table(pa.table(rows), tmp_path / "part-00000.parquet")
    clean.stats["held_back"] = {"documents": 3, "versions": 2, "first": "b", "original": "a"}
    before: Any = SimpleNamespace(url=str(tmp_path), stats={"documents": 2})
    told = dict(corpus_lines(raw, clean, shards, before))
    new = clean.stats["documents"]
    assert told["changed"] == f"manual: {new:,} new, 1 gone; old: 1 gone"
    assert told["held back"].startswith("3 new versions of documents that judge, the most (2) of")
    # Of a forgotten document, the board does not even show the id.
    assert "'a'" not in tell_held_back(clean.stats, {"b"}) and "3 new" in tell_held_back(
        clean.stats, {"a"}
    )
    # Before the training, too, which may take hours.
    assert shards_view(shards)["summary"].endswith(" train on, 20 documents left out")


def test_of_a_chat_model_the_screen_shows_what_was_asked_and_the_texts_own_answer(
    tmp_path: Path,
) -> None:
    """By the answer beside it, people see that what sounds right is wrong."""
    turns = [("Which fuse?", "16 A."), ("Sure?", "Yes.")]
    roles = ("user", "assistant")
    example = {
        "messages": [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(roles, turn, strict=True)
        ]
    }
    pq.write_table(
        pa.table({"id": ["T1"], "example": [json.dumps(example)]}), tmp_path / "part-00000.parquet"
    )
    said = {"document": "T1", "prompt": "system user Which fuse? assistant", "completion": "13 A."}
    (tmp_path / "samples.json").write_text(json.dumps({"base": [said], "candidate": [said]}))
    shards = SimpleNamespace(
        stats={"form": "conversations", "chat_template": "{{ messages }}"},
        manifest=SimpleNamespace(inputs={"clean_corpus": "c"}),
    )
    clean = SimpleNamespace(url=str(tmp_path))
    found = {("tokenized_shards", "s"): shards, ("clean_corpus", "c"): clean}
    evaluation: Any = SimpleNamespace(
        path=tmp_path,
        stats={"rounds": {}, "metric": {"is_bits": True}},
        store=SimpleNamespace(find_named=lambda *name: found.get(name)),
        manifest=SimpleNamespace(inputs={"tokenized_shards": "s"}),
    )
    samples = read_samples(evaluation)
    assert find_examples(evaluation, None) == ["Which fuse?"]
    *_, row = samples_view(evaluation)["samples"].value.splitlines()
    assert row == "| Which fuse? | 13 A. | 13 A. | 16 A. |"
    console = Console(width=80, file=io.StringIO())
    address = {"url": "http://h", "predict_url": "http://h/predict"}
    print_request(console, address, samples, True, "conversations")
    print_samples(console, samples, evaluation, None, "conversations")
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert '{"messages": [{"role": "user", "content": "Which fuse?"}]}' in told
    assert "http://h/v1/chat/completions" in told and "predict" not in told
    assert re.search(r"Which fuse\? +13 A\. +13 A\. +16 A\.", told), told
    assert "a chat, answered in the models' own words" in told
    line = Console(width=80, file=io.StringIO())
    samples["candidate"][0]["prompt"] = "Which fuse? " * 1_000
    print_request(line, address, samples, True, "conversations")
    assert isinstance(line.file, io.StringIO) and len(line.file.getvalue()) < 2_000
    # Written plainly, or without the corpus, it is what the model was given.
    for changed in ({"chat_template": ""}, {"form": "pretraining"}, {"form": "preferences"}):
        shards.stats |= changed
        assert find_examples(evaluation, None) == [said["prompt"]]
        shards.stats |= {"form": "conversations", "chat_template": "{{ messages }}"}
    del found["clean_corpus", "c"]
    assert find_examples(evaluation, None) == [said["prompt"]]


@pytest.mark.parametrize(
    ("example", "form", "told"),
    [
        ({"text": "Where is it?", "label": "shipping"}, "labeled", "the class that the models"),
        ({"input": "Where is it?", "target": "shipping"}, "pairs", "what the models write"),
    ],
)
def test_of_a_class_or_a_pair_the_screen_shows_how_to_ask_for_it_and_the_right_one(
    tmp_path: Path, example: dict[str, str], form: Form, told: str
) -> None:
    table = pa.table({"id": ["T1"], "example": [json.dumps(example)]})
    pq.write_table(table, tmp_path / "part-00000.parquet")
    said = {"document": "T1", "prompt": "prefix: Where is it?", "completion": "bug"}
    (tmp_path / "samples.json").write_text(json.dumps({"base": [said], "candidate": [said]}))
    shards = SimpleNamespace(
        stats={"form": form}, manifest=SimpleNamespace(inputs={"clean_corpus": "c"})
    )
    clean = SimpleNamespace(url=str(tmp_path))
    found = {("tokenized_shards", "s"): shards, ("clean_corpus", "c"): clean}
    evaluation: Any = SimpleNamespace(
        path=tmp_path,
        stats={"metric": {"is_bits": False}},
        store=SimpleNamespace(find_named=lambda *name: found.get(name)),
        manifest=SimpleNamespace(inputs={"tokenized_shards": "s"}),
    )
    samples = read_samples(evaluation)
    assert form_shown(evaluation)[0] == form
    console = Console(width=80, file=io.StringIO())
    print_request(console, {"predict_url": "http://h/predict"}, samples, True, form)
    print_samples(console, samples, evaluation, None, form)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert """http://h/predict -H""" in printed and '{"instances": ["Where is it?"]}' in printed
    assert re.search(r"Where is it\? +bug +bug +shipping", printed), printed
    assert told in printed
    # Long, and in a script without spaces: its beginning is shown.
    for said in (samples["base"][0], samples["candidate"][0]):
        said["prompt"] = "\u767c\u7968" * 99
    print_samples(console, samples, evaluation, None, form)
    assert "\u767c\u7968\u767c\u7968" in console.file.getvalue()


def test_a_classifiers_score_is_told_beside_that_of_the_commonest_class_with_its_mistakes() -> None:
    labels = ["billing", "biling", "bug", "recall"]
    confusion = [[6, 0, 0, 0], [2, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    figures = {"base": {"value": 0.6}, "candidate": {"value": 0.7}, "incumbent": {"value": 0.8}}
    stats = {
        "metrics": {"held_out_accuracy": figures, "held_out_macro_f1": figures},
        "metric": {"name": "accuracy", "unit": "accuracy", "higher_is_better": True},
        "rounds": {"measured": 1, "planned": 1, "share": 1.0},
        "documents": {"held_out": 10},
        "details": {"candidate": {"labels": labels, "confusion": confusion}},
    }
    evaluation: Any = SimpleNamespace(stats=stats, manifest=SimpleNamespace(settings={}))
    (_, score), (_, baseline), (_, mistakes), unseen = evaluation_lines(evaluation)
    assert score == "0.6000 -> 0.7000 accuracy; the incumbent 0.8000, on 10 documents"
    assert baseline.startswith("always billing, the commonest: 0.6000; macro F1")
    assert mistakes == "biling as billing: 2, bug as biling: 1"
    # One that arrived lately, of which nothing shows whether it was learned.
    assert unseen[0] == "not judged" and unseen[1].endswith("has the class: recall")


def test_bits_of_answers_are_told_with_what_they_do_not_show_and_general_text_in_others() -> None:
    metrics = {
        f"{task}_bits_per_byte": {role: {"value": 1.0} for role in ("base", "candidate")}
        for task in ("held_out", "general")
    }
    stats = {"metrics": metrics, "metric": ANSWER_BITS_PER_BYTE.model_dump()}
    stats |= {"rounds": {"measured": 1, "planned": 1, "share": 1.0}, "documents": {"held_out": 30}}
    evaluation: Any = SimpleNamespace(stats=stats, manifest=SimpleNamespace(settings={}))
    told = dict(evaluation_lines(evaluation))
    assert "bits per byte of answers (" in told["held-out text"]
    assert "may still write wrong numbers and names" in told[""]
    assert told["general text"] == "1.0000 -> 1.0000 bits per byte (+0.0%)"
    stats["exam"] = {"facts": 30}
    assert "" not in dict(evaluation_lines(evaluation))
    stats |= {"metric": BITS_PER_BYTE.model_dump(), "exam": None}
    assert "" not in dict(evaluation_lines(evaluation))


@pytest.mark.parametrize(("incumbent", "told"), [("one", " (the incumbent 50%)"), ("base", "")])
def test_of_a_run_that_continues_the_exam_line_has_the_incumbents_share(
    incumbent: str, told: str
) -> None:
    shares = {"base": 0.25, "incumbent": 0.5, "candidate": 0.75}
    metrics = {
        f"exam_{condition}_acc": {role: {"value": share} for role, share in shares.items()}
        for condition in ("closed_book", "passage")
    }
    stats = {"metrics": metrics, "models": {"base": "base", "incumbent": incumbent}}
    evaluation: Any = SimpleNamespace(stats=stats | {"exam": {"facts": 30, "sentence": "s"}})
    (_, line), _ = exam_lines(evaluation)
    assert line.endswith(f"closed book 25% -> 75%{told}, passage 25% -> 75%")


def test_scores_of_tasks_are_on_the_screen(made: Project) -> None:
    evaluation = made.current("eval_metrics")
    assert "other scores" not in dict(evaluation_lines(evaluation))
    scores = {"base": {"value": 0.25}, "candidate": {"value": 0.5}}
    evaluation.stats["metrics"] |= {"which_valve_acc": scores, "exam_closed_book_acc": scores}
    assert dict(evaluation_lines(evaluation))["other scores"] == "which_valve_acc 0.2500 -> 0.5000"


def test_the_round_that_decided_is_on_the_screen(made: Project) -> None:
    evaluation = made.current("eval_metrics")
    count = evaluation.stats["documents"]["held_out"]
    assert "bits per byte" in dict(evaluation_lines(evaluation))["held-out text"]
    evaluation.stats["rounds"] |= {"measured": 1, "planned": 3}
    told = dict(evaluation_lines(evaluation))["held-out text"]
    assert told.endswith(f", on {count} documents: round 1 of 3 decided")
    evaluation.stats["rounds"] |= {"measured": 3}
    assert dict(evaluation_lines(evaluation))["held-out text"].endswith(f", on {count} documents")


def test_the_models_bits_per_byte_on_held_out_text_are_lower_than_the_bases(made: Project) -> None:
    metrics = made.current("eval_metrics").stats["metrics"]
    held_out = metrics["held_out_bits_per_byte"]
    assert held_out["candidate"]["value"] < held_out["base"]["value"]


@needs("curl")
def test_the_printed_request_answers_and_its_id_leads_to_the_training_text(made: Project) -> None:
    (line,) = [line for line in screen(made).splitlines() if line.startswith("curl ")]
    answer = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=WAIT_SECONDS)
    head, _, body = answer.stdout.partition("\n\n")
    (prediction,) = json.loads(body)["predictions"]
    (request,) = re.findall(r"^x-request-id: (\S+)$", head, re.MULTILINE)
    assert "by its x-request-id: llm-assets trace --request ID" in screen(made)
    traced = json.loads(type_in(made, "trace", "--request", request, "--json").stdout)
    assert traced["answer"] == prediction


def test_the_orchestrators_log_is_in_a_file_and_not_on_the_terminal(made: Project) -> None:
    (log,) = (made.folder / ".llm_assets" / "logs").glob("run-*.log")
    assert "RUN_SUCCESS" in log.read_text()
    assert "RUN_SUCCESS" not in screen(made)


def test_no_stage_listens_beyond_this_machine(made: Project) -> None:
    listened = set((made.folder / "listened.txt").read_text().split())
    assert listened and outside_loopback(listened) == set()


def test_no_command_of_a_whole_run_leaves_a_file_to_others(made: Project) -> None:
    written = {path.relative_to(made.folder).parts[0] for path in open_to_others(made.folder)}
    assert not {".llm_assets", "store"} & written


def test_a_run_ends_with_cleaning_and_says_so(made: Project) -> None:
    assert re.search(r"Deleted [\d.]+ [kMG]B outside the limits of `retention`", screen(made))
    assert not list((made.folder / "store" / "runs").glob("*/step-*"))


def test_a_second_run_finds_everything_made(made: Project) -> None:
    before = made.record.history()
    lines = made.run_well("llm-assets", "run").splitlines()
    for asset in ASSETS:
        (line,) = [line for line in lines if line.startswith(f"✓ {asset} ")]
        assert "unchanged" in line
    assert made.record.history() == before


def test_a_run_from_the_launchpad_may_override_steps_learning_rate_and_seed(made: Project) -> None:
    before = made.current("checkpoint")
    settings = {"budget": {"steps": 3}, "optimizer": {"learning_rate": 0.002}, "seed": 5}
    config = {"ops": {"checkpoint": {"config": settings}}}
    assert ask(made, "checkpoint", config) == ""
    now = made.current("checkpoint")
    assert now.stats["steps"] == 3
    assert now.manifest.settings["optimizer"]["learning_rate"] == 0.002
    assert now.manifest.settings["seed"] == 5
    made.record.advance(before)


def test_a_port_in_use_is_named_before_any_work_and_the_model_is_not_lost(made: Project) -> None:
    made.run("llm-assets", "stop")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made.configure(endpoint={"port": port})
        ended = made.run("llm-assets", "run")
    assert ended.returncode == 1
    assert str(port) in ended.stderr and "endpoint.port" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr

    made.configure(endpoint={"port": 0})
    assert "✓ endpoint" in made.run_well("llm-assets", "run")


def test_a_rejected_candidate_leaves_the_incumbent_wanted(with_evaluation: Project) -> None:
    project = with_evaluation
    project.configure(model_version={"gate": {"smallest_effect": 5.0}})
    assert ask(project, "*model_version") == ""
    assert not project.current("model_version").stats["promoted"]
    registry = LocalRegistry.of(project.record)
    wanted = registry.find("wanted")
    assert wanted and wanted.is_base

    registry.approve(1, "Ada", "it reads well")
    with DagsterInstance.ephemeral() as instance:
        assert ask(project, "model_version", instance=instance) == ""
        record = instance.fetch_materializations(AssetKey("model_version"), limit=1).records[0]
    made = record.asset_materialization
    told = "version 1 rejected by the verdict, but Ada approved it"
    assert made and made.metadata["summary"].value == told


DEFINE_EACH = f"""
import os, sys, llm_assets.definitions as d
for config in sys.argv[1:]:
    os.environ["LLM_ASSETS_CONFIG"] = config
    print(len(d.defs().resolve_asset_graph().materializable_asset_keys))
print(*{SLOW} & sys.modules.keys())
"""


def test_definitions_here_and_of_the_cloud_load_without_credentials_torch_or_googles_clients(
    project: Project,
) -> None:
    hidden = ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT")
    environment = {k: v for k, v in project.environment().items() if k not in hidden}
    configs = (project.config, ROOT / "config" / "llama_bigquery.yaml")
    command = [sys.executable, "-c", DEFINE_EACH, *map(str, configs)]
    ended = subprocess.run(
        command, cwd=project.folder, env=environment, capture_output=True, text=True
    )
    assert ended.stdout.split() == ["9", "9"], ended.stderr


def test_the_checkpoint_keeps_its_loss_curve(made: Project) -> None:
    checkpoint = made.current("checkpoint")
    assert [record["step"] for record in read_metrics(checkpoint.path)] == list(range(1, 13))
