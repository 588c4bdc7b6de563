"""`llm-assets forget` as a user types it: from the listing to what serves."""

import base64
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.forgetting.forgotten_list import WithdrawnVersion, add_to_list, read_list
from llm_assets.registry.base import LocalRegistry
from llm_assets.tracing.training_text import all_runs, lessons_of
from recipes.spec import read_metrics
from tests.conftest import Project
from tests.llm_assets.forgetting.conftest import documents_of
from tests.llm_assets.in_process import type_in


def forget(project: Project, *arguments: str) -> str:
    """What the command says on success."""
    ended = type_in(project, "forget", *arguments, "--name", "Ada", "--reason", "asked to")
    assert ended.exit_code == 0, ended
    return " ".join(ended.output.split())


def refusal(project: Project, *arguments: str, command: str = "forget") -> str:
    """What the command says where it refuses."""
    ended = type_in(project, command, *arguments, "--reason", "asked to")
    assert ended.exit_code != 0
    return f"{ended.output}{ended.exception}".strip()


def steps_of(project: Project, text: str, version: int | None = None) -> list[int]:
    """Steps of all runs behind registered versions, or of one's own, that a text was trained on."""
    runs = all_runs(project.record.store, LocalRegistry.of(project.record).state())
    chosen = [run for run in runs if version in (None, run.version)]
    return [step for lesson in lessons_of(chosen, [text])[text] for step in lesson.steps]


def never_trained(project: Project) -> dict[str, str]:
    return next(
        row
        for row in documents_of(project).values()
        if row["split"] == "train" and not steps_of(project, row["text_hash"])
    )


def test_what_is_not_there_or_not_named_is_refused(judged: Project, tmp_path: Path) -> None:
    assert "has no document 'manual/nowhere'" in refusal(judged, "manual/nowhere")
    likely = "Did you mean '0007.txt'? Check the id: `llm-assets trace --text WORDS` names"
    assert likely in refusal(judged, "manual/007.txt")
    assert likely in str(type_in(judged, "document", "manual/007.txt").exception)
    assert "Name what to forget" in refusal(judged)
    assert "no document from the source 'elsewhere'" in refusal(judged, "--source", "elsewhere")
    missing, binary = tmp_path / "missing.txt", tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (missing, binary):
        assert f"{path} cannot be read" in refusal(judged, "--file", str(path))


def test_the_listing_says_what_each_document_was_to_the_versions_and_does_nothing(
    judged: Project, tmp_path: Path
) -> None:
    rows = documents_of(judged).values()
    held_out = next(row["id"] for row in rows if row["split"] == "held_out")
    trained = next(row for row in rows if steps_of(judged, row["text_hash"]))
    unread = never_trained(judged)["id"]
    path = tmp_path / "ids.txt"
    path.write_text(f"{held_out}\n{unread}\n\n{trained['id']}\n")

    said = forget(judged, "--file", str(path))

    assert f"{held_out} (manual): held out text, never trained on" in said
    assert "models are compared without it from now on" in said
    assert f"{unread} (manual): never trained on" in said
    step = steps_of(judged, trained["text_hash"])[0]
    assert (
        f"{trained['id']} (manual): trained on by version 1 at step" in said and str(step) in said
    )
    assert said.endswith("Nothing was done. To forget these, run the same command with --yes")
    assert read_list(judged.record.store, "manual").documents == []


def test_while_something_is_made_nothing_is_forgotten(judged: Project) -> None:
    def build(draft: Draft) -> None:
        said = refusal(judged, "manual/0000.txt", "--yes")
        assert "is being built and may contain what is to be forgotten" in said
        raise InterruptedError

    with pytest.raises(InterruptedError):
        judged.record.store.make(Identity(kind="checkpoint", code_version="1"), build)
    assert read_list(judged.record.store, "manual").documents == []


def test_a_withdrawn_version_is_not_approved(judged: Project) -> None:
    store = judged.record.store
    listed = Path(store.root, layout.forgotten("manual"))
    add_to_list(store, "manual", withdrawn=[WithdrawnVersion(version=1, checkpoint="any")])
    try:
        said = refusal(judged, "1", command="approve")
    finally:
        listed.unlink()
        Path(store.root, layout.forgotten_copy("manual")).unlink()
    assert "Version 1 was withdrawn on" in said and "text that was forgotten" in said
    assert "`llm-assets versions` lists the others; `llm-assets run` trains one" in said
    state = LocalRegistry.of(judged.record).state()
    assert not state.decisions_of(state.get(1).weights)


@pytest.mark.soak
def test_a_document_is_forgotten_from_the_store_and_from_what_serves(project: Project) -> None:
    project.configure(
        checkpoint={"checkpointing": {"every_steps": 3, "permanent_every_steps": 3}},
        forgetting={"grace_days": 0},
        # `llm-assets run` cleans by the rules, and they keep no state of a finished training.
        retention={"optimizer_state": True},
    )
    # Documents of the tiny manual are made of the same few sentences; these are like no other.
    for name in range(20):
        text = " ".join(f"{name}-{place} {place}" for place in range(60))
        (project.folder / "text" / f"planted-{name}.txt").write_text(text)
    assert project.run("llm-assets", "run").returncode == 0
    row = next(
        row
        for row in documents_of(project).values()
        if "planted" in row["id"] and steps_of(project, row["text_hash"])[:1] > [6]
    )
    before = project.record.current("checkpoint", "test")

    typed = ("llm-assets", "forget", row["id"], "--yes", "--name", "Ada", "--reason", "asked to")
    ended = project.run(*typed)
    assert ended.returncode == 0, ended
    said = " ".join(ended.stdout.split())

    assert "version 1 is trained again" in said.lower()
    assert "Withdrawn: version 1." in said
    listed = read_list(project.record.store, "manual")
    assert listed.texts == [row["text_hash"]] and listed.withdrawn[0].version == 1
    state = LocalRegistry.of(project.record).state()
    assert state.is_rejected(state.get(1).weights)
    serving = state.find("champion")
    assert serving and serving.version == 2
    assert not steps_of(project, row["text_hash"], version=2)
    run = Path(project.record.store.root, layout.run(serving.model_fingerprint))
    assert read_metrics(run)[0]["step"] in (7, 10), "it went on from a checkpoint"
    assert not holders(project.folder / "store", row["text"])
    project.record.current("clean_corpus", "test").verify()
    assert row["id"] not in documents_of(project)

    check_certificate(project, row["text_hash"], said)
    cleaned = project.run("llm-assets", "clean", "--yes")
    assert "trained on forgotten text" in cleaned.stdout
    assert not before.path.exists()
    assert "forgotten" in project.run("llm-assets", "document", row["id"]).stdout
    assert "has already been withdrawn" in " ".join(project.run(*typed).stdout.split())

    assert project.run("llm-assets", "run").returncode == 0
    assert row["id"] not in documents_of(project)


@pytest.mark.soak
def test_a_version_whose_runs_cannot_be_repeated_is_withdrawn_and_its_text_erased_all_the_same(
    project: Project,
) -> None:
    assert project.run("llm-assets", "run").returncode == 0
    row = next(row for row in documents_of(project).values() if steps_of(project, row["text_hash"]))
    checkpoint = project.record.current("checkpoint", "test").fingerprint
    # As `retention` does it once newer versions are there.
    shutil.rmtree(Path(project.record.store.root, layout.run(checkpoint)))

    ended = project.run(
        *("llm-assets", "forget", row["id"], "--yes", "--similar", "keep"),
        *("--name", "Ada", "--reason", "asked to"),
    )

    said = " ".join(ended.stdout.split())
    assert ended.returncode == 0, ended
    assert "Withdrawn: version 1." in said and "cannot be trained once more" in said
    state = LocalRegistry.of(project.record).state()
    assert state.is_rejected(state.get(1).weights) and state.champion == 0
    assert not holders(project.folder / "store", row["text"])
    (path,) = Path(project.record.store.root, layout.certificates("manual")).glob("*.json")
    verified = project.run("llm-assets", "verify", str(path))
    assert verified.returncode == 0 and "PROBLEM" not in verified.stdout, verified


def check_certificate(project: Project, text: str, said: str) -> None:
    """It holds, the run comes out again to the bit, and what was changed since is a problem."""
    (path,) = Path(project.record.store.root, layout.certificates("manual")).glob("*.json")
    assert f"Signed: {path}" in said
    stated = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))["predicate"]
    assert stated["read_by"][0]["version"] == 1 and stated["replaced"][0]["masked"] == [text]
    assert stated["search"]["texts"] == [text] and stated["search"]["found"] == {}
    public = str(project.folder / ".llm_assets" / "forgetting.pub")

    ended = project.run("llm-assets", "verify", str(path), "--key", public, "--retrain")

    assert ended.returncode == 0 and "comes out again, bit for bit" in ended.stdout, ended
    assert "PROBLEM" not in ended.stdout
    forgotten = Path(project.record.store.root, layout.forgotten("manual"))
    kept = forgotten.read_bytes()
    forgotten.write_bytes(kept.replace(text.encode(), b"0" * len(text)))
    changed = project.run("llm-assets", "verify", str(path))
    assert changed.returncode == 1 and "PROBLEM  0 of 1 texts" in changed.stdout
    forgotten.write_bytes(kept)


def holders(store: Path, text: str) -> list[Path]:
    """Files of a store in which a text stands, plain, in Parquet, or as tokens of shards."""
    found = [path for path in store.rglob("*.json*") if text[:60] in path.read_text()]
    for path in store.rglob("*.parquet"):
        table = pq.read_table(path)
        if "text" in table.column_names and text in table["text"].to_pylist():
            found.append(path)
    return found
