"""What `run` shows on a terminal."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from llm_assets.cli.pipeline.run import Progress
from llm_assets.config import PipelineSettings


@pytest.fixture
def settings(tmp_path: Path) -> PipelineSettings:
    """Of any pipeline."""
    return PipelineSettings.model_validate(
        {
            "name": "manual",
            "raw_corpus": {"sources": [{"type": "files", "path": str(tmp_path)}]},
            "base_model": {"folder": str(tmp_path)},
        }
    )


def test_what_others_print_stays_off_the_terminal_while_a_line_is_alive_there(
    settings: PipelineSettings, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    with Progress(Console(file=terminal, force_terminal=True), ["checkpoint"], settings):
        print("a log of Dagster's")
        print("a progress bar", file=sys.stderr)
    out, errors = capfd.readouterr()
    assert out == "a log of Dagster's\n" and errors == "a progress bar\n"
    assert "starting" in terminal.getvalue()
    assert "Dagster" not in terminal.getvalue() and "bar" not in terminal.getvalue()


def test_where_all_is_printed_on_the_terminal_the_living_line_is_taken_away_before_another(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    with Progress(Console(file=sys.stdout, force_terminal=True), ["checkpoint"], settings):
        print("a log of Dagster's")
        print("another")
    assert "\x1b[2Kanother\n" in terminal.getvalue()
