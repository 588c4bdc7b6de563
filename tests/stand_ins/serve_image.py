"""What stands for the serve image: its own program, with an engine of this project's own."""

import json
import re
import sys
from pathlib import Path

from tests.stand_ins.processes import REPOSITORY, LocalImage

VLLM_COMMAND = Path(__file__).parent / "vllm_command"


def serve_image() -> LocalImage:
    """An image whose containers listen on loopback alone."""
    return LocalImage(
        entrypoint=(sys.executable, "-m", "serving.vertex.container"),
        environment={"HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"},
    )


def vllm_image() -> LocalImage:
    """The image with the command that its Dockerfile gives it, before vLLM's parser alone."""
    dockerfile = (REPOSITORY / "images" / "serve" / "Dockerfile").read_text()
    entrypoint = re.search(r"^ENTRYPOINT (\[.*\])", dockerfile, re.MULTILINE | re.DOTALL)
    assert entrypoint, dockerfile
    _, *arguments = json.loads(entrypoint[1].replace("\\\n", ""))
    return LocalImage(
        entrypoint=(sys.executable, *arguments),
        environment={"PYTHONPATH": f"{REPOSITORY}:{VLLM_COMMAND}"},
    )
