"""The serve image's command before a stand-in of vLLM's parser that knows few of its arguments."""

import os

import pytest

from serving.vertex.container import parse_command
from tests.stand_ins.serve_image import VLLM_COMMAND, vllm_image


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the image's Dockerfile starts, where vLLM can be imported."""
    monkeypatch.syspath_prepend(VLLM_COMMAND)
    monkeypatch.setenv("PYTHONPATH", os.fspath(VLLM_COMMAND))
    entrypoint = list(vllm_image().entrypoint)
    return entrypoint[entrypoint.index("--") + 1 :]


def test_the_images_own_command_is_taken_and_nothing_is_served(command: list[str]) -> None:
    assert parse_command(command) == {"engine": "vllm", "vllm": "0.32.0", "refusal": ""}


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--no-such", "thing"], "unrecognized arguments: --no-such thing"),
        (["--max-model-len", "many"], "argument --max-model-len: invalid"),
        (["--enable-auto-tool-choice"], "requires --tool-call-parser"),
    ],
)
def test_a_refusal_is_the_parsers_last_line(
    command: list[str], arguments: list[str], refusal: str
) -> None:
    told = parse_command([*command, *arguments])["refusal"]
    assert refusal in told and "\n" not in told


def test_another_engine_is_named() -> None:
    assert parse_command(["python", "-m", "served"]) == {"engine": "python"}
    assert parse_command([]) == {"engine": "this project's own"}
