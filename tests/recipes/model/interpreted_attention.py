"""Run attention's kernel for a GPU on the processor, by Triton's interpreter; print its error.

    python interpreted_attention.py KERNEL float32

The kernel is one that `kernels_of_a_gpu.py` wrote. Documents start inside its tiles. The error is
the largest beside float64, as a share of the largest value; `nan` where any value is.
"""

import os
import sys

# Before triton is imported, which the kernel does.
os.environ["TRITON_INTERPRET"] = "1"

import importlib.util
from pathlib import Path

import torch

from benchmarks.gpu.probe import largest_error, plain_attention
from recipes.model.decoder import block_mask

ROWS, LENGTH, HEADS, GROUPS, SIZE, DOCUMENT = 1, 512, 4, 2, 64, 192
"""All but the last are those of `SMALL` there."""


def main() -> None:
    path, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    source = path.read_text()
    # What compiles it for a device and picks one stands before it.
    start = source.index("@triton_heuristics.template(")
    own = path.with_name(f"interpreted_{path.name}")
    own.write_text(source[:start] + source[source.index("@triton.jit", start) :])
    spec = importlib.util.spec_from_file_location(own.stem, own)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    torch.manual_seed(0)
    query, key, value = (
        torch.randn(ROWS, LENGTH, heads, SIZE).to(dtype) for heads in (HEADS, GROUPS, GROUPS)
    )
    segments = (torch.arange(LENGTH) // DOCUMENT).expand(ROWS, LENGTH).int().contiguous()
    mask = block_mask(segments)
    output = torch.full_like(query, float("nan"))
    log_sums, largest = (torch.zeros(ROWS, HEADS, LENGTH) for _ in range(2))
    blocks = (
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
    )
    tile = int(source.split("BLOCK_M : tl.constexpr = ")[1].split()[0])
    kernel = getattr(module, path.stem)
    kernel[(LENGTH // tile, ROWS, HEADS)](
        query, key, value, log_sums, largest, *blocks, segments, output
    )

    exact = plain_attention(query.double(), key.double(), value.double(), segments)
    print(largest_error(output, exact))


main()
