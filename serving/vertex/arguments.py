"""Whether vLLM's own parser takes the command that a container would start it with.

`llm-assets check --smoke` starts the serve image as an endpoint does, with the image's own command
and the arguments of the settings, and with `CHECK_SPEC` in its environment: nothing is served then.
"""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from artifacts.program.entry import run_program
from artifacts.program.smoke import SmokeSpec
from artifacts.progress import Report

ENGINE = "vllm"
PARSE = "\n".join(
    (
        "from vllm.entrypoints.cli.serve import ServeSubcommand",
        "from vllm.utils import FlexibleArgumentParser",
        "command = ServeSubcommand()",
        f"parser = FlexibleArgumentParser(prog={ENGINE!r})",
        "command.subparser_init(parser.add_subparsers())",
        "command.validate(parser.parse_args())",
    )
)
"""What vLLM's command line does before it serves."""
EXAMPLES = {"{model}": "/model", "{port}": "8000", "{name}": "model", "{context}": "1024"}
"""What stands for values that are known once there is a model."""


def check_arguments(command: Sequence[str], spec: str) -> int:
    """Parse an engine's command, without a model; what was found goes to Dagster."""

    def run(spec: SmokeSpec, report: Report) -> dict[str, Any]:
        report(f"parses: {' '.join(command)}")
        return {"python": platform.python_version()} | parse(command)

    return run_program(SmokeSpec, run, ["--spec", spec])


def parse(command: Sequence[str]) -> dict[str, Any]:
    """What starts, vLLM's version, and why its parser refuses; empty where it takes all."""
    engine, *arguments = (EXAMPLES.get(part, part) for part in command)
    if engine != ENGINE:
        return {"engine": engine}
    done = subprocess.run(
        [sys.executable, "-c", PARSE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = done.stderr.strip().splitlines()
    refusal = "" if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[-1]
    return {"engine": engine, ENGINE: importlib.metadata.version(ENGINE), "refusal": refusal}
