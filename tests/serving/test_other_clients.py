"""Clients that people use beside OpenAI's own, unmodified and as programs of their own."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from serving import endpoint as process
from tests.serving.conftest import Client, start

GUIDELLM = "guidellm==0.8.1"
REQUESTS = 6


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


@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
def test_guidellm_completes_all_its_requests(chat_model_folder: Path, tmp_path: Path) -> None:
    """The field's load generator, in an environment of its own: it wants a newer click."""
    served = start(tmp_path / "endpoint", chat_model_folder)
    folder = tmp_path / "environment"
    venv.create(folder, system_site_packages=True, with_pip=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "ours.pth").write_text("\n".join(ours))
    subprocess.run((folder / "bin/pip", "install", "-q", GUIDELLM), check=True)
    report = tmp_path / "report.json"
    subprocess.run(
        (
            *(folder / "bin/guidellm", "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={served.url},model=default"),
            *("--tokenizer", f"kind=huggingface_auto,model={chat_model_folder}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
            *("--profile", "kind=synchronous"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--output", f"kind=json,path={report}"),
        ),
        check=True,
    )
    process.stop(tmp_path / "endpoint")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
