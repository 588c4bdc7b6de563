"""The training program itself, on random weights and random rows: what a user's run would give."""

import hashlib
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from artifacts.program.entry import INTERRUPTED
from artifacts.shards.format import ShardStats
from benchmarks.gpu.turns import Keep, in_turn
from benchmarks.sizes import SIZES, Size
from benchmarks.training_runs import (
    REPOSITORY,
    environment,
    largest_difference,
    make_spec,
    random_shards,
    refuse_skipped,
)
from recipes.settings import training_settings
from recipes.spec import PROFILE_NAME, command, read_metrics

IS_GPU = torch.cuda.is_available()
STEPS, FEWER_STEPS, WARM_UP_STEPS = (40, 24, 8) if IS_GPU else (8, 8, 2)
RESUMED_STEPS = 40
SHORT_DOCUMENT = 512
KERNELS = 8
"""How many are told of a profile."""
SAME = 1e-3
"""Relative difference of a loss after a resume; kernels of a new process may be timed otherwise."""


class Bench:
    """A model's folder and its shards, made once for several runs."""

    def __init__(self, folder: Path, size: Size, document_tokens: int | None = None) -> None:
        self._folder, self._size = folder, size
        model = folder / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(_config(size)))
        # Rows are random numbers, which no tokenizer made.
        (model / "tokenizer.json").write_text("{}")
        sha256 = hashlib.sha256(b"{}").hexdigest()
        self._shards: ShardStats = random_shards(
            folder / "shards", size.vocabulary, sha256, 16 * size.rows, size.length, document_tokens
        )

    def start(self, name: str, steps: int, save_at: int, **changes: Any) -> subprocess.Popen[str]:
        """Begin a run, or go on with one that was ended."""
        size = self._size
        placement = {"device_batch_size": size.rows, "compile": "auto"}
        settings = training_settings(
            {
                "recipe": "pretraining",
                "precision": changes.get("precision", "bfloat16" if IS_GPU else "float32"),
                "budget": {"steps": steps, "global_batch_size": size.rows},
                "schedule": {"warmup_steps": 0, "decay_fraction": 0},
                "validation": {"every_steps": steps, "rows": 1},
                "placement": placement | changes.get("placement", {}),
                "checkpointing": {"every_steps": save_at} | changes.get("checkpointing", {}),
                # What comes after the last one is measured by nobody.
                "logging": {"profile_steps": [steps]},
            }
        )
        spec = make_spec(name, self._folder, self._shards, self._folder / "model", settings)
        path = self._folder / f"{name}.json"
        spec.write(path)
        with self.log(name).open("a") as log:
            return subprocess.Popen(
                command(path, 1),
                cwd=REPOSITORY,
                # Each recompilation is a line of the log.
                env=environment(TORCH_LOGS="recompiles"),
                stdout=log,
                stderr=log,
                text=True,
            )

    def log(self, name: str) -> Path:
        """What a run printed."""
        return self._folder / f"{name}.log"

    def history(self, name: str) -> list[dict[str, Any]]:
        """A line for each step."""
        return read_metrics(self._folder / "runs" / name)

    def run(
        self, name: str, steps: int, save_at: int, seconds: float | None = None, **changes: Any
    ) -> list[dict[str, Any]]:
        """The history of a run to its end.

        Args:
            seconds: that it may last; where only its export is left by then, all steps are known.

        Raises:
            RuntimeError: it failed or lasted longer; with the end of its log.
        """
        process = self.start(name, steps, save_at, **changes)
        try:
            code = process.wait(seconds)
            how = f"ended with {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = steps - len(self.history(name))
            how = f"had {code} steps left after {seconds:.0f} s"
        if code:
            raise RuntimeError(f"{name} {how}:\n{self.log(name).read_text()[-2500:]}")
        return self.history(name)

    def profile(self, name: str) -> dict[str, Any]:
        """Which kernels, or operators of a processor, took most of the last step."""
        (path,) = (self._folder / "runs" / name / PROFILE_NAME).iterdir()
        took: Counter[str] = Counter()
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("cat") == ("kernel" if IS_GPU else "cpu_op"):
                took[event["name"][:80]] += event["dur"]
        return {
            "milliseconds": sum(took.values()) / 1000,
            "most": {kernel: taken / 1000 for kernel, taken in took.most_common(KERNELS)},
        }

    def forget(self, name: str) -> None:
        """Remove what a run wrote: at 1B a checkpoint takes 15 GB."""
        for kind in ("runs", "exports"):
            shutil.rmtree(self._folder / kind / name, ignore_errors=True)


def measure(
    names: tuple[str, ...], seconds: float, keep: Keep, only: Collection[str] = ()
) -> dict[str, Any]:
    """Tokens per second, utilization and the cost of a checkpoint, whole and short documents."""

    def run(size: Size, document_tokens: int | None, left: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), size, document_tokens)
            history = bench.run("run", STEPS, STEPS // 2, left)
            recompilations = bench.log("run").read_text().count("Recompiling function")
            profile = bench.profile("run")
        return describe(history) | {"recompilations": recompilations, "profile": profile}

    short = {name: min(SHORT_DOCUMENT, SIZES[name].length // 2) for name in names}
    return in_turn(
        {f"{name}, whole documents": partial(run, SIZES[name], None) for name in names}
        | {f"{name}, short documents": partial(run, SIZES[name], short[name]) for name in names},
        seconds,
        keep,
        only,
    )


def describe(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a run's steps from the warm-up to the save in its midst, and its cost.

    A step's seconds run from the end of the one before, so they hold a save for which it stood
    still. The last step, which is profiled, does not count.
    """
    refuse_skipped(history)
    half = len(history) // 2
    steady, saving = history[WARM_UP_STEPS:half], history[half:-1]
    usual = median(line["seconds"] for line in steady)
    # The first save of a run also takes the host's memory for its copies.
    saved = sum(line["seconds"] - usual for line in saving)
    # Some are read every few steps alone.
    figures = ("tokens_per_second", "mfu_6n", "mfu_masked", "data_wait_share", "peak_memory_gb")
    return {
        name: median(found)
        for name in figures
        if (found := [line[name] for line in steady if name in line])
    } | {
        "tokens_per_second_while_saving": median(line["tokens_per_second"] for line in saving),
        "first_step_seconds": history[0]["seconds"],
        "checkpoint_stall_seconds": sum(line["checkpoint_stall_seconds"] for line in history),
        "checkpoint_cost_seconds": saved,
        "checkpoint_cost_share_of_ten_minutes": saved / 600,
        "last_loss": history[-1]["loss"],
    }


def resume() -> dict[str, Any]:
    """A run that is asked to end in its midst and goes on takes the course of an unbroken one."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), SIZES["tiny"])
        unbroken = bench.run("unbroken", RESUMED_STEPS, save_at=RESUMED_STEPS)
        ended = bench.start("ended", RESUMED_STEPS, save_at=RESUMED_STEPS)
        while ended.poll() is None and len(_written(bench, "ended")) < 5:
            time.sleep(0.01)
        ended.send_signal(signal.SIGTERM)
        code = ended.wait()
        assert code == INTERRUPTED, f"ended with {code}:\n{bench.log('ended').read_text()[-2000:]}"
        at = len(bench.history("ended"))
        assert 0 < at < RESUMED_STEPS, "it was to end in its midst"
        again = bench.run("ended", RESUMED_STEPS, save_at=RESUMED_STEPS)
    apart = largest_difference(*([line["loss"] for line in run] for run in (again, unbroken)))
    found = {"ended_after_step": at, "largest_relative_difference_of_a_loss": apart}
    print(found, flush=True)
    assert apart <= SAME, f"losses are {apart:.1e} apart"
    return found


def change_one_at_a_time(
    name: str, seconds: float, keep: Keep, only: Collection[str] = ()
) -> dict[str, Any]:
    """The figures with one setting changed, beside those with none."""
    size = SIZES[name]
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "recomputation": {"placement": {"activation_checkpointing": True}},
        "half the rows in a pass": {"placement": {"device_batch_size": size.rows // 2}},
        "saved while it stands still": {"checkpointing": {"in_background": "never"}},
        "not compiled": {"placement": {"compile": "never"}},
        "float8": {"precision": "float8"},
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), size)

        def run(label: str, change: dict[str, Any], left: float) -> dict[str, Any]:
            name = label.replace(" ", "_")
            told = describe(bench.run(name, FEWER_STEPS, FEWER_STEPS // 2, left, **change))
            told["profile"] = bench.profile(name)
            bench.forget(name)
            return told

        runs = {label: partial(run, label, change) for label, change in changes.items()}
        return in_turn(runs, seconds, keep, only)


def _written(bench: Bench, name: str) -> list[dict[str, Any]]:
    return bench.history(name) if bench.log(name).exists() else []


def _config(size: Size) -> dict[str, Any]:
    shape = size.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.length,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope["rope_theta"],
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
