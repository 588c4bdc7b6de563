"""Asks a program of `recipes` from a command, outside Dagster."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from artifacts.errors import UserError

_LAST_CHARACTERS = 1_000


def ask_program(module: str, spec: BaseModel, purpose: str) -> dict[str, Any]:
    """What a program returns that runs to its end in a child process, which takes its memory along.

    Raises:
        UserError: it failed; the message names the purpose and has the last of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        stated, result = Path(folder, "spec.json"), Path(folder, "result.json")
        stated.write_text(spec.model_dump_json())
        program = [sys.executable, "-m", module, "--spec", str(stated), "--stats", str(result)]
        ended = subprocess.run(program, capture_output=True, text=True)
        if ended.returncode:
            raise UserError(f"{purpose} failed: {ended.stderr.strip()[-_LAST_CHARACTERS:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found
