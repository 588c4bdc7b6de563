"""What is told of the hardware."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.device import Device
from recipes.spec import read_metrics
from tests.recipes.conftest import REPOSITORY, SpecMaker, train_here

NVML = """
class NVMLError(Exception):
    pass

class NVMLError_DriverNotLoaded(NVMLError):
    pass

def nvmlInit():
    raise NVMLError("Not Supported")
"""
PROGRAM = """
import torch
import pynvml
from recipes.device import Gpu
try:
    torch.cuda.utilization(0)
except pynvml.NVMLError:
    print(sorted(Gpu(torch.device("cuda", 0)).readings()))
"""


@pytest.mark.fault(
    "checkpoint",
    "NVML does not report how busy the GPU is",
    sees="the other figures",
    then="training continues",
)
def test_an_error_of_nvml_leaves_the_other_readings(tmp_path: Path) -> None:
    """By a library that stands in for NVIDIA's, whose errors are of its own kind."""
    (tmp_path / "pynvml.py").write_text(NVML)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "['peak_memory_gb']\n"


def test_what_share_of_the_peak_is_reached_is_told_by_two_counts(
    make_spec: SpecMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a processor, as if its peak were known."""
    monkeypatch.setattr(Device, "peak_flops", lambda self: 1e15)
    spec = make_spec(steps=1)
    train_here(spec)
    (line,) = read_metrics(Path(spec.run_folder))
    assert 0 < line["mfu_6n"] < line["mfu_masked"] < 1
