"""What this machine trains in, as far as it is known without torch."""

from pathlib import Path

import pytest
import torch

from llm_assets.runners.training import may_have_bfloat16
from recipes.device import device_of, local_device


@pytest.mark.parametrize(
    ("flags", "device", "may"),
    [
        ("fpu avx2", None, False),
        ("fpu avx2 avx512_bf16", None, True),
        ("fpu avx2 amx_tile amx_int8", None, True),
        ("fpu avx2", "nvidia0", True),
        ("fpu avx2", "kfd", True),
        ("fpu avx2", "dxg", True),
    ],
)
def test_torch_is_asked_where_something_may_multiply_bfloat16(
    tmp_path: Path, flags: str, device: str | None, may: bool
) -> None:
    for folder in ("proc", "dev"):
        (tmp_path / folder).mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags\t\t: {flags}\n")
    if device:
        (tmp_path / "dev" / device).touch()
    assert may_have_bfloat16(tmp_path) is may


def test_torch_is_asked_where_the_processor_is_not_known(tmp_path: Path) -> None:
    assert may_have_bfloat16(tmp_path)


def test_what_this_machine_surely_does_not_have_torch_does_not_use() -> None:
    if not may_have_bfloat16():
        assert not torch.cuda.is_available()
        assert device_of(local_device()).precision() == "float32"
