"""A pipeline file for a folder of text, as `llm-assets init` writes it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from artifacts.errors import UserError
from llm_assets.cli.main import commands
from llm_assets.cli.pipeline.init import LEAST_STEPS, MOST_STEPS, write_pipeline
from llm_assets.config import PipelineSettings, load_settings
from llm_assets.preflight import preflight
from spark_jobs.read.snapshot.snapshot import write_snapshot
from tests.spark_jobs.read.files.test_formats import write_pdf
from tests.tiny import tiny_texts


def settings_for(folder: Path) -> PipelineSettings:
    return load_settings(write_pipeline(folder, None, folder.parent / "made.yaml").path)


@pytest.fixture
def manuals(tmp_path: Path) -> Path:
    """300 Markdown files."""
    folder = tmp_path / "Our Manuals"
    folder.mkdir()
    for number, text in enumerate(tiny_texts(300)):
        (folder / f"{number:03d}.md").write_text(text)
    return folder


def test_300_markdown_files_hold_out_enough_to_be_judged_on(manuals: Path) -> None:
    settings = settings_for(manuals)

    assert settings.name == "our_manuals"
    assert settings.clean_corpus.split.held_out * 300 >= 2 * 30
    assert not any("nothing could be promoted" in note for note in preflight(settings))


def test_a_first_training_of_much_text_ends_after_minutes_and_says_so(tmp_path: Path) -> None:
    steps = {}
    for name, size in (("little", 50_000), ("much", 20_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.md").write_bytes(b"The valve opens. " * (size // 17))
        started = write_pipeline(tmp_path / name, name, tmp_path / f"{name}.yaml")
        steps[name] = load_settings(started.path).checkpoint.budget.steps
        assert f"{steps[name]} steps of training, about" in started.notes[-1]

    assert steps["little"] == LEAST_STEPS
    assert steps["much"] == MOST_STEPS


def test_too_few_held_out_documents_are_told_before_any_work(manuals: Path) -> None:
    settings = settings_for(manuals)
    split = settings.clean_corpus.split.model_copy(update={"held_out": 0.05})
    few = settings.model_copy(
        update={"clean_corpus": settings.clean_corpus.model_copy(update={"split": split})}
    )

    notes = preflight(few)

    assert any("About 15 of 300 documents" in note and "held_out: 0.15" in note for note in notes)
    assert any("steps read about" in note for note in notes)


def test_formats_and_columns_follow_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.html").write_text("<p>The valve opens.</p>")
    (folder / "package.json").write_text('{"version": 1}')
    (folder / "tickets.jsonl").write_text(json.dumps({"id": 1, "body": "It fails."}))
    (folder / "site.js").write_text("alert(1)")
    (folder / "logo.png").write_bytes(b"x")

    started = write_pipeline(folder, "mixed", folder.parent / "made.yaml")
    (source,) = load_settings(started.path).raw_corpus.sources

    assert source.formats == ("html",)  # type: ignore[union-attr]
    assert "1 files of code left out (`formats`)" in started.notes
    assert any("2 json files left out" in note for note in started.notes)
    assert any(".png (logo.png)" in note for note in started.notes)


def test_every_file_of_a_folder_as_people_have_it_is_accounted_for(manuals: Path) -> None:
    for number in range(50):
        page = f"<html><body><p>Page {number}. The valve opens before start-up.</p></body></html>"
        (manuals / f"{number}.html").write_text(page)
    for number in range(3):
        write_pdf(manuals / f"{number}.pdf", f"Sheet {number}: the pump turns slowly")
    write_pdf(manuals / "scanned.pdf", None)
    (manuals / "broken.pdf").write_bytes(b"%PDF-1.4 cut off")
    (manuals / "empty.md").write_text("")
    (manuals / "logo.png").write_bytes(b"x")
    settings = settings_for(manuals)
    assert any("steps read about" in note for note in preflight(settings))

    stats = write_snapshot(settings.raw_corpus, manuals.parent / "raw", lambda line: None)

    assert stats["documents"] == 300 + 50 + 3
    assert stats["dropped"] == {"empty": 1, "no_text_layer": 1, "bad_file": 1}
    assert stats["unread"] == {".png": 1}
    counted = stats["documents"] + sum(stats["dropped"].values()) + sum(stats["unread"].values())
    assert counted == sum(1 for _ in manuals.iterdir())


def test_a_file_that_is_there_is_never_replaced(manuals: Path) -> None:
    settings_for(manuals)
    with pytest.raises(UserError, match=r"made.yaml is there already.*--output"):
        settings_for(manuals)


def test_the_command_says_what_to_do_next(manuals: Path) -> None:
    target = manuals.parent / "pipeline.yaml"

    ended = CliRunner().invoke(commands, ["init", str(manuals), "--output", str(target)])

    assert ended.exit_code == 0, ended.output
    assert f"llm-assets --config {target} run" in ended.output
    assert "300 files" in ended.output


def test_an_empty_name_of_the_pipeline_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_assets.config import config_path

    monkeypatch.setenv("LLM_ASSETS_CONFIG", "")
    with pytest.raises(UserError, match="set, but empty"):
        config_path()
