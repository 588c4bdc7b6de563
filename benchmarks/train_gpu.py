"""Training speed on one GPU: this project's model and loss against the Hugging Face Trainer.

    python -m benchmarks.train_gpu [--size 135m 360m 1b]

Needs torch, transformers, accelerate and this repository alone; weights and tokens are random. Both
sides train in bfloat16 over float32 master weights with fused AdamW, compiled, each in a process of
its own, alternately; on a processor that has no bfloat16, in float32. Where torchtune is installed,
the step of its own recipe is measured too, in bfloat16 throughout as that recipe is. Ours is
measured twice: on rows packed with documents of about 512 tokens, between which it does not let
attention pass, and on whole rows. The others attend to whole rows, which their kernels do fastest.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Check, alternate, at_least, record
from benchmarks.sizes import SIZES, Size
from benchmarks.torchtune_loop import train_with_torchtune
from benchmarks.training_runs import random_rows
from recipes.data.batch import Batch, batch_of
from recipes.device import device_of, local_device, mixed_precision
from recipes.model.decoder import Decoder, summed_cross_entropy
from recipes.training.telemetry import training_flops

DOCUMENT_TOKENS = 512
WARM_UP_STEPS, STEPS = (8, 24) if torch.cuda.is_available() else (2, 6)
ROUNDS = 2
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Measured:
    """One process's result."""

    tokens_per_second: float
    memory_gb: float
    mfu: float | None
    last_loss: float


def device() -> torch.device:
    """The GPU, or the processor for a look at the program itself."""
    return local_device()


def random_batch(size: Size, document_tokens: int | None, generator: np.random.Generator) -> Batch:
    """Random tokens in packed documents."""
    rows = random_rows(size.vocabulary, size.rows, size.length, document_tokens, generator)
    return batch_of(rows).to(device())


def measure_ours(size: Size, document_tokens: int | None = DOCUMENT_TOKENS) -> Measured:
    """Train with this project's decoder, attention and loss."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    torch.set_float32_matmul_precision("high")
    decoder = Decoder(size.shape)
    decoder.initialize()
    decoder.to(device())
    if device().type == "cuda":
        for layer in decoder.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=LEARNING_RATE, fused=True)
    seconds, loss = [], torch.zeros(())
    for _ in range(WARM_UP_STEPS + STEPS):
        batch = random_batch(size, document_tokens, generator)
        _synchronize()
        began = time.perf_counter()
        with mixed_precision(device_of(device()).precision(), device()):
            hidden = decoder(batch.tokens, batch.positions, batch.segments)
            loss = summed_cross_entropy(hidden, decoder.head_weight, batch.targets)
            loss = loss / batch.target_count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _synchronize()
        seconds.append(time.perf_counter() - began)
    return _measured(size, decoder, seconds, float(loss.detach()))


def measure_peer(size: Size) -> Measured:
    """Train transformers' Llama with the Hugging Face Trainer."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class StepTimes(TrainerCallback):
        seconds: list[float] = []  # noqa: RUF012 - one run a process

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            _synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _synchronize()
            self.seconds.append(time.perf_counter() - self.began)

    torch.manual_seed(0)
    shape = size.shape
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_value_heads,
            max_position_embeddings=size.length,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    steps = WARM_UP_STEPS + STEPS
    rows = torch.randint(0, size.vocabulary, (steps * size.rows, size.length))
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            per_device_train_batch_size=size.rows,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            bf16=device_of(device()).precision() == "bfloat16",
            torch_compile=device().type == "cuda",
            logging_steps=steps,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            use_cpu=device().type == "cpu",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[StepTimes()],
    )
    result = trainer.train()
    return _measured(size, model, StepTimes.seconds, result.training_loss)


def measure_torchtune(size: Size) -> Measured:
    """Train torchtune's model with the step of its recipe."""
    torch.manual_seed(0)
    steps = WARM_UP_STEPS + STEPS
    rows = torch.randint(0, size.vocabulary, (steps, size.rows, size.length), device=device())
    return _measured(size, *train_with_torchtune(size.shape, rows, LEARNING_RATE, _synchronize))


def _measured(
    size: Size, model: torch.nn.Module, seconds: list[float], last_loss: float
) -> Measured:
    if not math.isfinite(last_loss):
        raise RuntimeError(f"the loss is {last_loss}: what was timed trains nothing")
    rate = size.rows * size.length / median(seconds[WARM_UP_STEPS:])
    memory, peak = 0.0, device_of(device()).peak_flops()
    if device().type == "cuda":
        memory = torch.cuda.max_memory_allocated() / 1e9
    parameters = sum(p.numel() for p in model.parameters())
    # By the parameters alone: the sides attend to different shares of a row.
    flops = training_flops(parameters, parameters, attention_width=0, tokens=1, pairs=0)["6n"]
    return Measured(rate, memory, flops * rate / peak if peak else None, last_loss)


SIDES = {
    "ours": measure_ours,
    "ours_whole_rows": lambda size: measure_ours(size, None),
    "peer": measure_peer,
    "torchtune": measure_torchtune,
}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _in_a_process(side: str, name: str, seconds: float | None = None) -> Measured:
    command = [sys.executable, "-m", "benchmarks.train_gpu", "--side", side, "--size", name]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)} had not ended after {seconds:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measure_rounds(
    name: str, rounds: int = ROUNDS, seconds: float | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Each side's results for a size, measured alternately; ours on whole rows last.

    Args:
        seconds: that all may take; raises RuntimeError where they do not suffice.
    """
    ends = None if seconds is None else time.monotonic() + seconds
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": [], "ours_whole_rows": []}

    def rate(side: str) -> float:
        measured = _in_a_process(side, name, ends and ends - time.monotonic())
        print(f"  {name} {side}: {measured}", flush=True)
        runs[side].append(asdict(measured))
        return measured.tokens_per_second

    alternate(lambda: rate("ours"), lambda: rate("peer"), rounds)
    for _ in range(rounds):
        rate("ours_whole_rows")
    return runs


def compare(name: str) -> None:
    """Measure one size on both sides, print and record the result."""
    runs = measure_rounds(name)
    ours, peer, whole = ([run["tokens_per_second"] for run in side] for side in runs.values())
    checks = torchtune_check(name, median(ours)) | {
        "ratio to the Hugging Face Trainer": at_least(median(ours) / median(peer), 1.5, "x"),
        "the same on whole rows": Check(median(whole) / median(peer), "reported", True),
        "tokens per second": at_least(median(ours), SIZES[name].aim, "tokens/s"),
    }
    mfu = runs["ours"][-1]["mfu"]
    if mfu is not None and name == "1b":
        checks["model FLOP/s utilization by 6N"] = at_least(mfu, 0.45)
    record(
        f"train_gpu_{name}",
        ours=ours,
        peer=peer,
        unit="tokens/s",
        peer_name="Hugging Face Trainer, compiled",
        better="higher",
        packages=["torch", "transformers"],
        checks=checks,
        machine=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )


def torchtune_check(name: str, ours: float) -> dict[str, Check]:
    """The ratio to torchtune's recipe, or nothing where it is not installed or does not run."""
    if importlib.util.find_spec("torchtune") is None:
        print("  torchtune is not installed: its recipe is left out")
        return {}
    try:
        measured = _in_a_process("torchtune", name)
    except RuntimeError as error:
        print(f"  torchtune's recipe does not run here: {str(error).splitlines()[-1]}")
        return {}
    print(f"  {name} torchtune: {measured}", flush=True)
    ratio = ours / measured.tokens_per_second
    return {"ratio to torchtune's recipe, all in bfloat16": Check(ratio, "reported", True)}


def main() -> None:
    """Compare all sizes; with `--side`, measure one side and print it as JSON."""
    parser = argparse.ArgumentParser(description="Training speed on one GPU.")
    parser.add_argument("--size", nargs="*", choices=list(SIZES), default=["135m", "360m", "1b"])
    parser.add_argument("--side", choices=list(SIDES))
    arguments = parser.parse_args()
    for name in arguments.size:
        if arguments.side:
            print(json.dumps(asdict(SIDES[arguments.side](SIZES[name]))))
        elif torch.cuda.is_available() or name == "tiny":
            compare(name)
        else:
            sys.exit("There is no GPU here. `--size tiny` runs anywhere, to look at the program.")


if __name__ == "__main__":
    main()
