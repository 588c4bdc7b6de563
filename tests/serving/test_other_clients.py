"""A client that people use beside OpenAI's own, unmodified and as a program of its own."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.serving.conftest import Client


def test_llm_asks_whole_and_streamed(client: Client, tmp_path: Path) -> None:
    """Simon Willison's `llm`, told of the endpoint by its own file of OpenAI-compatible models."""
    url = f"{client.url}/v1"
    models = [{"model_id": "ours", "model_name": "default", "api_base": url, "completion": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    program = Path(sys.executable).parent / "llm"
    # The default base model comes in a plugin of `llm`, which wants llama.cpp when it is loaded.
    surroundings = {"LLM_LOAD_PLUGINS": "", "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "no"}

    def ask(*options: str) -> str:
        command = (str(program), "-m", "ours", "-o", "max_tokens", "8", *options, "The valve")
        asked = subprocess.run(
            command,
            env=os.environ | surroundings,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert asked.returncode == 0, asked.stderr
        return asked.stdout.strip()

    expected = client.complete(max_tokens=8).json()["choices"][0]["text"].strip()
    assert ask("--no-stream") == ask() == expected
