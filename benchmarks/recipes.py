"""Every recipe of examples on the processor against the script that a user of transformers writes.

Both train the same model of some 20 million parameters on the same examples, of lengths from an
eighth of a row to a whole one, alternately, each in a process of its own with one thread; neither
drops anything out. The median over the steps after the warm-up of tokens per second of processor
time counts, padding excluded: the machine may do other work meanwhile. Where an example is a row
for both, both take the same ones in each step, so that as much is padded; where ours packs rows, a
ratio is uncertain by a tenth over so few steps. A recipe that shows as slower than its peer is one
to look into: `python -m benchmarks.recipes NAME` measures it alone.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Check, alternate, at_least, at_most, machine_name, record
from benchmarks.recipe_tasks import TASKS, RecipeTask, write_examples, write_model
from benchmarks.training_runs import ProgramRun, make_spec, run_program
from recipes.settings import training_settings

OURS, PEER = "recipes.continued_pretraining", "benchmarks.plain_scripts"
PROCESSOR_TIME = "benchmarks.processor_time"
WARM_UP_STEPS, STEPS = 2, 8
ROUNDS = 1


def measure(recipe: str, task: RecipeTask) -> tuple[float, dict[str, Check]]:
    """The ratio of our rate to the plain script's, and what is stated of it."""
    runs: dict[str, list[ProgramRun]] = {OURS: [], PEER: []}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        write_model(folder / "model", task)
        shards = write_examples(folder / "shards", folder / "model", task)
        training = training_settings(
            {
                "recipe": recipe,
                "precision": "bfloat16",
                "budget": {"steps": STEPS, "global_batch_size": task.rows},
                "validation": {"every_steps": STEPS, "rows": 1},
                "placement": {"device_batch_size": task.rows},
                "checkpointing": {"every_steps": STEPS},
            }
            | task.training
        )

        def train(module: str) -> float:
            name = f"{module.rpartition('.')[2]}-{len(runs[module])}"
            spec = make_spec(name, folder, shards, folder / "model", training)
            done = run_program(module, spec, runner=PROCESSOR_TIME)
            runs[module].append(done)
            return statistics.median(
                line["tokens_per_second"] for line in done.history[WARM_UP_STEPS:]
            )

        ours, peer = alternate(lambda: train(OURS), lambda: train(PEER), ROUNDS)
    ratio = statistics.median(ours) / statistics.median(peer)
    peaks = {name: max(run.peak_bytes for run in done) / 1e9 for name, done in runs.items()}
    for name, rates in ((OURS, ours), (PEER, peer)):
        rate = statistics.median(rates)
        print(f"{recipe}, {name}: {rate:,.0f} tokens per second, {peaks[name]:.2f} GB", flush=True)
    return ratio, {
        f"{recipe}, tokens per second": at_least(ratio, 1.0, "x"),
        f"{recipe}, peak memory": at_most(peaks[OURS], round(peaks[PEER], 2), "GB"),
    }


def main() -> None:
    """Measure, print and record the result; with names of recipes, print that of these alone."""
    wanted = sys.argv[1:] or list(TASKS)
    os.environ["OMP_NUM_THREADS"] = "1"
    found = [measure(recipe, TASKS[recipe]) for recipe in wanted]
    checks = {name: check for _, of_recipe in found for name, check in of_recipe.items()}
    if sys.argv[1:]:
        for name, check in checks.items():
            print(f"  {name}: {check.value:.3g} {check.limit}")
        return
    record(
        "recipes",
        ours=[ratio for ratio, _ in found],
        peer=[1.0],
        unit="of the script's rate",
        peer_name="the plain script",
        better="higher",
        packages=["torch", "transformers", "accelerate"],
        checks=checks,
        machine=f"one thread, {machine_name()}",
    )


if __name__ == "__main__":
    main()
