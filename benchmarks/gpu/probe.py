"""What the device gives at most, and whether each kernel computes what it should."""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.sizes import SIZES
from recipes.data.batch import IGNORED
from recipes.device import device_of, local_device
from recipes.model.decoder import (
    Decoder,
    allowed_positions,
    attend,
    segment_mask,
    summed_cross_entropy,
)

REPEATS = 10
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest error of a kernel's output or gradient, as a share of the largest value in float64."""


def measure() -> dict[str, Any]:
    """Ceilings, then kernels; raises AssertionError where one is beyond its tolerance."""
    place = local_device()
    found: dict[str, Any] = {"ceilings": ceilings(place), "readings": device_of(place).readings()}
    print(found, flush=True)
    found["errors"] = {}
    for dtype in TOLERANCES:
        for name, errors in kernel_errors(place, dtype).items():
            found["errors"][f"{name}, {dtype}".replace("torch.", "")] = errors
            print(f"{name}, {dtype}: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
            worst = max(errors.values())
            assert worst <= TOLERANCES[dtype], f"{name} is {worst:.1e} beside float64"
    found["graph_breaks"] = graph_breaks(place)
    print(f"graph breaks of a layer: {found['graph_breaks']}", flush=True)
    assert found["graph_breaks"] == 0, "each is a stop of the GPU"
    return found


def ceilings(place: torch.device) -> dict[str, float]:
    """TFLOP/s of a matrix product in bfloat16 and float32, GB/s of copies."""
    size = 8192 if place.type == "cuda" else 128
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(size, size, device=place, dtype=dtype) for _ in range(2))
        seconds = _seconds(lambda left=left, right=right: left @ right)
        found[f"matmul_tflops_{dtype}".replace("torch.", "")] = 2 * size**3 / seconds / 1e12
    block = torch.empty(2**28 if place.type == "cuda" else 2**20, device=place)
    target = torch.empty_like(block)
    # Read and written.
    found["copy_gb_per_second"] = 2 * block.nbytes / _seconds(lambda: target.copy_(block)) / 1e9
    host = torch.empty(block.shape, pin_memory=place.type == "cuda")
    found["to_host_gb_per_second"] = block.nbytes / _seconds(lambda: host.copy_(block)) / 1e9
    # A checkpoint lasts until its bytes are on the disk.
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        file.write(host.numpy())
        file.flush()
        os.fsync(file.fileno())
        found["to_disk_gb_per_second"] = host.nbytes / (time.perf_counter() - began) / 1e9
    return found


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """What `attend` is to compute, by its definition; shapes are its own."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    weights = scores.masked_fill(~allowed_positions(segments), float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


def kernel_errors(place: torch.device, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """By kernel: the error of its output and of each gradient beside float64 on the processor."""
    torch.manual_seed(0)
    # A processor may compute in bfloat16 a hundred times more slowly than in float32.
    length, size, words = (512, 64, 1024) if place.type == "cuda" else (128, 16, 256)
    rows, heads, groups, width = 2, 8, 2, 4 * size
    segments = (torch.arange(length) // (3 * length // 8)).expand(rows, length).contiguous()
    shapes = [(rows, length, count, size) for count in (heads, groups, groups)]
    queries = [torch.randn(shape) for shape in shapes]
    states, matrix = torch.randn(rows, length, width), torch.randn(words, width) * 0.05
    targets = torch.randint(0, words, (rows, length))
    targets[:, ::7] = IGNORED

    def ours_attends(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, segment_mask(segments.to(place), dtype))

    def ours_loses(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return summed_cross_entropy(hidden, head, targets.to(place)) / targets.numel()

    def plain_loses(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits = (hidden @ head.T).flatten(0, 1)
        told = torch.nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return told / targets.numel()

    return {
        "attention": _errors(
            ours_attends, partial(plain_attention, segments=segments), queries, place, dtype
        ),
        "loss": _errors(ours_loses, plain_loses, [states, matrix], place, dtype),
    }


def graph_breaks(place: torch.device) -> int:
    """Of a decoder's layer under torch.compile; 0, or its speed is lost."""
    shape = SIZES["tiny"].shape
    decoder = Decoder(shape).to(place)
    decoder.initialize()
    tokens = torch.randint(0, shape.vocab_size, (2, 128), device=place)
    positions = torch.arange(128, device=place).expand_as(tokens)
    explained = torch._dynamo.explain(decoder)(tokens, positions, torch.zeros_like(tokens))
    return int(explained.graph_break_count)


def _errors(
    ours: Callable[..., torch.Tensor],
    plain: Callable[..., torch.Tensor],
    given: list[torch.Tensor],
    place: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Both take the same values, rounded to the type that ours computes in."""
    rounded = [tensor.to(dtype) for tensor in given]
    mine = [tensor.to(place).detach().requires_grad_() for tensor in rounded]
    exact = [tensor.double().requires_grad_() for tensor in rounded]
    output, reference = ours(*mine), plain(*exact)
    direction = torch.randn(reference.shape)
    (output.float() * direction.to(place)).sum().backward()
    (reference * direction.double()).sum().backward()
    errors = {"output": largest_error(output, reference)}
    for number, (one, other) in enumerate(zip(mine, exact, strict=True)):
        assert one.grad is not None and other.grad is not None
        errors[f"gradient {number}"] = largest_error(one.grad, other.grad)
    return errors


def largest_error(one: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, as a share of the largest exact value; nan where any value is."""
    difference = (one.detach().double().cpu() - exact.detach()).abs().max()
    return float(difference / exact.detach().abs().max())


def _seconds(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    _synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        work()
    _synchronize()
    return (time.perf_counter() - began) / REPEATS


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
