"""Loaded models as the engine uses them, in this process."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import GenerationMixin

from serving.engine.program import load_model
from serving.engine.protocol import GenerateRequest
from serving.engine.served_model import ServedModel

TOKENS = 200
STEP_SECONDS = 0.01


@pytest.fixture
def steps() -> Iterator[list[float]]:
    """When any language model of this process made a step; each takes a while, as real ones do."""
    made: list[float] = []

    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, GenerationMixin):
            made.append(time.monotonic())
            time.sleep(STEP_SECONDS)

    hook = register_module_forward_hook(note)
    yield made
    hook.remove()


async def leave_after_first_piece(model: ServedModel) -> None:
    request = GenerateRequest(
        prompt="The valve", max_tokens=TOKENS, max_prompt_tokens=40, temperature=0, top_p=1
    )
    tokens = await asyncio.to_thread(model.encode, request)
    assert isinstance(tokens, list)
    async with aclosing(model.generate(request, tokens)) as chunks:
        async for _ in chunks:
            return


@pytest.mark.parametrize("kind", ["causal", "sequence to sequence"])
def test_model_stops_writing_when_the_caller_goes_away(
    kind: str, tiny_model_folder: Path, sequence_to_sequence_folder: Path, steps: list[float]
) -> None:
    folder = tiny_model_folder if kind == "causal" else sequence_to_sequence_folder
    model = load_model(folder, cache_tokens=1_024)
    asyncio.run(leave_after_first_piece(model))
    left = time.monotonic()
    time.sleep(20 * STEP_SECONDS)
    assert 0 < len(steps) < TOKENS / 2
    assert steps[-1] < left + 10 * STEP_SECONDS
    assert model.fault is None
