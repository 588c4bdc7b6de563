"""Compile kernels of the mask, attention and loss for a GPU that is not there; say what came of it.

    python kernels_of_a_gpu.py guard.so 9 0 [FOLDER float32]

With a folder it is a small attention's kernel alone, of the type that is named, and its source goes
there: `interpreted_attention.py` runs it. Needs Triton beside torch. Tensors have no content, and
no kernel is started. Attention's backward pass is left out: autograd asks a device for its streams.
"""

# torch asks for the device while its modules are imported.
# ruff: noqa: E402
import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

# In this process, where it is not as torch has it.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
from torch._dynamo.device_interface import CudaInterface
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

GUARD, MAJOR, MINOR = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
PROPERTIES = SimpleNamespace(
    name="a GPU that is not there",
    type="cuda",
    index=0,
    major=MAJOR,
    minor=MINOR,
    multi_processor_count={8: 108, 9: 132}[MAJOR],
    total_memory=80 * 2**30,
    warp_size=32,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin={8: 166_912, 9: 232_448}[MAJOR],
)
FOLDER = Path(sys.argv[4]) if len(sys.argv) > 4 else None
SMALL = 1, 512, (4, 2, 2)
"""Rows, their length, heads of queries, keys and values."""
compiled: dict[str, int] = {}


class Started(Exception):
    """All is compiled: what was to run is started."""


def start(device: Any) -> NoReturn:
    raise Started


ANSWERS: dict[str, Any] = {
    "_exchange_device": lambda index: 0,
    "_lazy_init": lambda: None,
    "_maybe_exchange_device": lambda index: 0,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "get_device_capability": lambda device=None: (MAJOR, MINOR),
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "set_device": start,
    "set_rng_state": lambda state, device=None: None,
    "synchronize": lambda device=None: None,
}
for name, answer in ANSWERS.items():
    setattr(torch.cuda, name, answer)
    for interface in (CudaInterface, CudaInterface.Worker):
        if hasattr(interface, name):
            setattr(interface, name, staticmethod(answer))
torch._C._cuda_getCurrentRawStream = lambda index: 0
torch.version.cuda = "13.0"
ctypes.CDLL(GUARD)
CudaDriver.is_active = staticmethod(lambda: True)
driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * MAJOR + MINOR, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        is_active=lambda: True,
    )
)

from torch._functorch import config as functorch_config
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.model.decoder import (
    SegmentMask,
    attend,
    block_mask,
    segment_mask,
    to_gradient_by_mask,
)


def compile_only(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
    """Take the place of what compiles a kernel and loads it on the device."""
    kernel = async_compile._load_triton_kernel_from_source(name, source)
    kernel.precompile(warm_cache_only=True)
    if FOLDER:
        (FOLDER / f"{name}.py").write_text(source)
    compiled[name] = min(len(result.kernel.asm["cubin"]) for result in kernel.compile_results)
    return kernel


async_compile.AsyncCompile.triton = compile_only
triton_helpers.set_driver_to_gpu = lambda: None
functorch_config.enable_autograd_cache = False
inductor_config.force_disable_caches = True
inductor_config.use_static_cuda_launcher = False
# Both try on the device what could be written otherwise, such as dense attention.
inductor_config.joint_graph_constant_folding = False
joint_graph.lazy_init = post_grad.lazy_init = lambda device=None: None


def attention(
    rows: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """Attention over tensors of (rows, length, heads, 64), without content."""
    place = torch.device("cuda", 0)
    segments = torch.zeros(rows, length, dtype=torch.int32, device=place)
    query, key, value = (
        torch.empty(rows, length, count, 64, device=place, dtype=dtype) for count in heads
    )
    blocks = SegmentMask(None, blocks=block_mask(segments))
    return lambda: attend(query, key, value, blocks)


def main() -> None:
    place, found = torch.device("cuda", 0), {}
    with FakeTensorMode():
        segments = torch.zeros(2, 4096, dtype=torch.int32, device=place)
        targets = torch.zeros(8192, dtype=torch.long, device=place)
        logits = torch.empty(8192, 128_256, device=place, dtype=torch.bfloat16)
        works = {
            "mask": lambda: segment_mask(segments, torch.bfloat16),
            "attention": attention(2, 4096, (32, 8, 8), torch.bfloat16),
            "loss": lambda: torch.compile(to_gradient_by_mask, dynamic=False)(
                logits, targets, True
            ),
        }
        if FOLDER:
            works = {"attention": attention(*SMALL, getattr(torch, sys.argv[5]))}
        for what, work in works.items():
            compiled.clear()
            try:
                work()
            except Started:
                found[what] = dict(compiled)
    print(json.dumps(found))


main()
