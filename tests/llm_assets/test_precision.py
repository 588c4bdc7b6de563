"""`precision: auto` is resolved before the checkpoint gets its name."""

import os
import subprocess
import sys

from llm_assets.runners.training import LocalTrainingRunner
from recipes.causal.settings import ContinuedPretrainingSettings


def test_what_auto_means_here_is_part_of_the_identity() -> None:
    asked = ContinuedPretrainingSettings()
    resolved = LocalTrainingRunner().resolve(asked)
    assert asked.precision == "auto" and resolved.precision in ("bfloat16", "float32")
    other = "float32" if resolved.precision == "bfloat16" else "bfloat16"
    assert resolved.content()["precision"] == resolved.precision
    given = resolved.model_copy(update={"precision": other})
    assert LocalTrainingRunner().resolve(given).content() == given.content() != resolved.content()


def test_a_processor_that_may_use_avx2_alone_trains_in_float32() -> None:
    """bfloat16 without units for it is emulated: a step took forty times as long."""
    ask = "import torch; from recipes.device import device_of, local_device as l; "
    ask += "print(device_of(l()).precision())"
    capped = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", ask], env=capped, capture_output=True, text=True)
    assert done.stdout.strip() == "float32", done.stderr
