"""The cloud pipeline's definitions load without credentials, a network or Google's clients."""

import os
import subprocess
import sys

from llm_assets.config import CONFIG_VARIABLE

HEAVY = ("torch", "transformers", "gcsfs", "google.cloud.storage", "google.cloud.aiplatform_v1")


def test_cloud_definitions_load_without_credentials_or_clients() -> None:
    hidden = ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment[CONFIG_VARIABLE] = "config/llama_bigquery.yaml"
    code = (
        "import sys, llm_assets.definitions\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
