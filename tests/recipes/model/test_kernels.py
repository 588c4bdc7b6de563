"""What Inductor and Triton make of attention, its mask and the loss for cards that are not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import UV
from tests.recipes.conftest import REPOSITORY

TRITON = ("triton==3.6.0", "numpy==2.3.5")
"""A build of torch for processors names no Triton; this is the one that the page's figures are of.
Its interpreter takes an array of one number for a number, which later versions of NumPy refuse."""
NO_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> none;
static c10::impl::DeviceGuardImplRegistrar entered(c10::DeviceType::CUDA, &none);
"""
"""What a build of torch for processors lacks to reckon with tensors of a GPU that have no
content."""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    (folder / "guard.cpp").write_text(NO_GUARD)
    place = Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-o", "guard.so", "guard.cpp"]
    command += [f"-I{place}/include", f"-L{place}/lib", "-lc10"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "guard.so"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    install = f"{UV} pip install --quiet --no-deps --target {folder} {' '.join(TRITON)}"
    subprocess.run(["bash", "-c", install], cwd=REPOSITORY, check=True)
    return folder


def last_line(program: str, folder: Path, triton: Path, *arguments: object) -> str:
    """What a program beside this one printed last; its own files go into a folder."""
    ended = subprocess.run(
        [sys.executable, Path(__file__).parent / f"{program}.py", *map(str, arguments)],
        env={
            "PYTHONPATH": f"{REPOSITORY}:{triton}",
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder),
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()[-1]


@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_of_the_forward_pass_and_the_loss_are_compiled_for_an_a100_and_an_h100(
    capability: tuple[int, int], guard: Path, triton: Path, tmp_path: Path
) -> None:
    """To machine code, by ptxas; nothing is started."""
    found = json.loads(last_line("kernels_of_a_gpu", tmp_path, triton, guard, *capability))
    sizes = {name: sum(kernels.values()) for name, kernels in found.items()}
    assert sizes.keys() == {"mask", "attention", "loss"} and all(sizes.values()), found
    assert any("flex_attention" in name for name in found["attention"])
    assert len(found["loss"]) == 2, "more is a pass over the logits more"


@pytest.mark.soak
@pytest.mark.usefixtures("package_registries")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3)])
def test_the_kernel_of_attention_computes_what_it_should_where_documents_start_inside_its_tiles(
    dtype: str, tolerance: float, guard: Path, triton: Path, tmp_path: Path
) -> None:
    """The kernel for an H100, run by Triton's interpreter, which does not multiply bfloat16;
    float16 has the same tiles."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    last_line("kernels_of_a_gpu", tmp_path, triton, guard, 9, 0, kernels, dtype)
    (kernel,) = kernels.iterdir()
    assert float(last_line("interpreted_attention", tmp_path, triton, kernel, dtype)) <= tolerance
