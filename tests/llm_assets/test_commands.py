"""What a person may ask and decide about the versions."""

import json
import re

import httpx

from tests.conftest import Project
from tests.llm_assets.forgetting.conftest import documents_of
from tests.llm_assets.forgetting.test_forget import forget, never_trained
from tests.llm_assets.in_process import type_in
from tests.tiny import tiny_texts


def ask(project: Project, *arguments: str) -> str:
    ended = type_in(project, *arguments)
    assert ended.exit_code == 0, ended
    return ended.stdout


def test_a_version_is_explained_down_to_the_source_text(served: Project) -> None:
    text = ask(served, "explain", "1")
    for asset in ("eval_metrics", "checkpoint", "tokenized_shards", "clean_corpus", "raw_corpus"):
        fingerprint = served.current(asset).fingerprint
        assert f"{asset} {fingerprint}" in text
    assert (
        "promoted by the gate" in text
        and "revision" in text
        and "optimizer.learning_rate: 0.01" in text
    )
    assert "% of the training split, including what the versions that it continues read" in text
    told = json.loads(ask(served, "explain", "1", "--json"))
    assert told["artifacts"]["checkpoint"]["settings"]["optimizer"]["learning_rate"] == 0.01


def test_check_says_how_long_a_training_takes_as_fast_as_the_last_one(served: Project) -> None:
    told = ask(served, "check")
    assert re.search(r"12 steps read about .* of the training text in about \d+ (s|min)", told)
    speed = r"one pass takes about [\d,]+ .* in about .*at the speed of the last training"
    assert re.search(speed, told)


def test_a_piece_of_text_is_traced_to_the_rows_that_hold_it(served: Project) -> None:
    text = tiny_texts(240)[7]
    found = ask(served, "explain", "1", "--text", text)
    (line,) = [line for line in found.splitlines() if "0007.txt" in line]
    assert "trained on" in line and found.startswith("1 document with this text")
    assert "No document" in ask(served, "explain", "1", "--text", "never written")


def test_a_document_tells_its_story(served: Project) -> None:
    told = ask(served, "document", "0007.txt")
    assert "kept" in told and "duplicate cluster" in told and "trained on" in told
    exposure = json.loads(ask(served, "document", "0007.txt", "--json"))["exposure"]
    assert exposure["document"] == "0007.txt" and not exposure["unknown"]
    ended = served.run("llm-assets", "document", "nowhere.txt")
    assert ended.returncode == 1 and "has no document 'nowhere.txt'" in ended.stderr


def test_an_answer_of_the_endpoint_is_traced_by_its_request_id(served: Project) -> None:
    status = ask(served, "status")
    url = next(word.strip(",") for word in status.split() if word.startswith("http://"))
    body = {"prompt": "Section 7. The valve", "max_tokens": 40}
    answered = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    answer = answered.json()["choices"][0]["text"]

    told = json.loads(ask(served, "trace", "--request", answered.headers["x-request-id"], "--json"))

    assert (told["answer"], told["version"], told["missing"]) == (answer, 1, [])
    assert told["verdict"] in ("verbatim", "near", "nothing found")


def test_rollback_serves_the_version_before_and_stays_on_the_next_run(served: Project) -> None:
    before = ask(served, "versions")
    assert "trained on" in before and "no text of this pipeline" in before
    assert "1 (wanted, champion)" in before and "0 (previous)" in before
    assert "Version 0 serves" in ask(served, "rollback", "--name", "Bo", "--reason", "complaints")
    told = ask(served, "versions")
    assert "0 (wanted, champion)" in told and "champion: version 0," in told
    assert "wanted: version 0, by Bo (rolled back: complaints)" in told

    assert "version 0 at" in served.run("llm-assets", "run").stdout

    approved = ask(served, "approve", "1", "--name", "Ada", "--reason", "they were wrong")
    assert "Version 1 serves" in approved
    explained = ask(served, "explain", "1")
    assert "approved by Ada: they were wrong" in explained

    rejected = ask(served, "reject", "1", "--name", "Ada", "--reason", "they were right")
    assert "Version 0 serves" in rejected


def test_other_settings_never_bring_a_rejected_model_back(served: Project) -> None:
    ask(served, "reject", "1", "--name", "Ada", "--reason", "it swears")
    served.configure(eval_metrics={"seed": 5}, model_version={"gate": {"smallest_effect": 0.001}})
    assert "version 0 at" in served.run("llm-assets", "run").stdout
    told = ask(served, "explain", "1")
    assert told.count("by the gate") == 2 and "rejected by Ada: it swears" in told
    assert "2" not in [line.split(":")[0] for line in ask(served, "versions").splitlines()]


def test_a_lost_registry_is_restored_by_the_command_that_the_message_names(
    served: Project,
) -> None:
    state = next((served.folder / "store" / "registry").glob("*/registry.json"))
    state.write_text(state.read_text()[:100])
    ended = served.run("llm-assets", "versions")
    assert ended.returncode == 1 and "llm-assets doctor --repair" in ended.stderr
    assert str(state) in ended.stderr and "Traceback" not in ended.stderr
    assert "restored to its newest" in ask(served, "doctor", "--repair")
    assert "1" in ask(served, "versions")


def test_forgetting_what_no_version_has_read_trains_nothing(served: Project) -> None:
    unread = never_trained(served)["id"]
    rows = documents_of(served).values()
    held_out = next(row["id"] for row in rows if row["split"] == "held_out")
    before = served.current("checkpoint").fingerprint

    told = forget(served, unread, held_out, "--similar", "keep", "--yes")

    assert "No version is known to have been trained on them: nothing is trained again." in told
    assert "It is held out: models are compared without it from now on." in told
    assert served.current("checkpoint").fingerprint == before
