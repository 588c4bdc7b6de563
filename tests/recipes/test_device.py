"""What is told of the hardware."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.device import Device, Gpu
from recipes.spec import describe_hardware, read_metrics
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


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla T4", 65),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_the_peak_is_that_of_the_card_and_of_no_card_whose_name_it_begins(
    name: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: name)
    peak = Gpu(torch.device("cuda", 0)).peak_flops()
    assert peak == (teraflops and teraflops * 1e12)


@pytest.mark.parametrize(("major", "precision"), [(7, "float32"), (8, "bfloat16")])
def test_a_card_that_would_only_emulate_bfloat16_trains_in_float32(
    major: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what stands in for a driver; torch itself draws the conclusion."""
    card = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert Gpu(torch.device("cuda", 0)).precision() == precision


def test_a_run_tells_what_nvml_says_of_its_gpu(
    make_spec: SpecMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By values that stand in for a card's, and torch's own functions that read them."""
    pynvml = pytest.importorskip("pynvml")
    said = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByIndex": "card",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": 312_500,
        "nvmlDeviceGetTemperature": 64,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=41_500_000_000),
    }
    for name, value in said.items():
        monkeypatch.setattr(pynvml, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: 0)
    card = Gpu(torch.device("cuda", 0))
    monkeypatch.setattr(Device, "readings", lambda self: card.readings())
    spec = make_spec(steps=1)
    train_here(spec)
    lines = read_metrics(Path(spec.run_folder))
    assert {name: lines[0][name] for name in lines[0] if name.startswith("gpu_")} == {
        "gpu_utilisation_percent": 97,
        "gpu_power_watts": 312.5,
        "gpu_temperature_celsius": 64,
        "gpu_memory_used_gb": 41.5,
    }
    assert describe_hardware(lines) == "GPU 97% busy, 64 °C, 312 W, 41.5 GB in use"


def test_what_share_of_the_peak_is_reached_is_told_by_two_counts(
    make_spec: SpecMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a processor, as if its peak were known."""
    monkeypatch.setattr(Device, "peak_flops", lambda self: 1e15)
    spec = make_spec(steps=1)
    train_here(spec)
    (line,) = read_metrics(Path(spec.run_folder))
    assert 0 < line["mfu_6n"] < line["mfu_masked"] < 1
