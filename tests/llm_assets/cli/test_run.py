"""What `run` shows on a terminal."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from llm_assets.cli.pipeline.run import Progress
from llm_assets.config import PipelineSettings


def test_what_others_print_stays_off_the_terminal_while_a_line_is_alive_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = PipelineSettings.model_validate(
        {
            "name": "manual",
            "raw_corpus": {"sources": [{"type": "files", "path": str(tmp_path)}]},
            "base_model": {"folder": str(tmp_path)},
        }
    )
    terminal = io.StringIO()
    with Progress(Console(file=terminal, force_terminal=True), ["checkpoint"], settings):
        print("a log of Dagster's")
        print("a progress bar", file=sys.stderr)
    out, errors = capfd.readouterr()
    assert out == "a log of Dagster's\n" and errors == "a progress bar\n"
    assert "starting" in terminal.getvalue()
    assert "Dagster" not in terminal.getvalue() and "bar" not in terminal.getvalue()
