"""What this machine trains in, as far as it is known without torch."""

from pathlib import Path

import pytest

from llm_assets.runners.training import known_precision
from recipes.device import device_of, local_device
from tests.needs import ISA_LIMIT


@pytest.mark.parametrize(
    ("flags", "device", "limit", "known"),
    [
        ("fpu avx2", None, "", "float32"),
        ("fpu avx2", None, "AVX2", "float32"),
        ("fpu avx2 avx512_bf16", None, "", "bfloat16"),
        ("fpu avx2 amx_tile amx_int8", None, "", "bfloat16"),
        ("fpu avx2 avx512_bf16", None, "AVX2", None),
        ("fpu avx2", "nvidia0", "", None),
        ("fpu avx2 avx512_bf16", "kfd", "", None),
        ("fpu avx2", "dxg", "", None),
    ],
)
def test_torch_is_asked_where_more_than_the_processor_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    device: str | None,
    limit: str,
    known: str | None,
) -> None:
    monkeypatch.setenv(ISA_LIMIT, limit)
    for folder in ("proc", "dev"):
        (tmp_path / folder).mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags\t\t: {flags}\n")
    if device:
        (tmp_path / "dev" / device).touch()
    assert known_precision(tmp_path) == known


def test_torch_is_asked_where_the_processor_is_not_known(tmp_path: Path) -> None:
    assert known_precision(tmp_path) is None


def test_what_is_known_of_this_machine_is_what_torch_says() -> None:
    assert known_precision() in (None, device_of(local_device()).precision())
