"""Continue the pre-training of a causal language model on packed rows.

    python -m recipes.launcher.local --workers 2 -- -m recipes.continued_pretraining --spec s.json

Started again after any end, it goes on from the newest checkpoint.
"""

import contextlib
import os
import sys
from pathlib import Path

from artifacts.leases import local_lease
from artifacts.program.entry import Interrupted, run_program
from artifacts.program.lifetime import Interruption, importing
from artifacts.progress import Report
from recipes.quiet import silence_libraries
from recipes.spec import TrainingSpec


def main() -> int:
    """Run one worker; returns the process's exit code."""
    # From the first moment on a signal means: save, then end.
    interruption = Interruption()
    return run_program(TrainingSpec, lambda spec, report: _train(spec, interruption, report))


def _train(spec: TrainingSpec, interruption: Interruption, report: Report) -> None:
    with importing():
        silence_libraries()
        from recipes.distributed.workers import join_workers, leave_workers
        from recipes.training.trainer import train

    # A second trainer of the same run waits until the first has ended.
    lease: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    # For all workers of the run: the others wait for the first one when they join.
    if os.environ.get("RANK", "0") == "0":
        lease = local_lease(
            Path(spec.run_folder) / "run.lock",
            lambda holder: report(
                f"Waiting: another trainer works on {spec.run_folder} ({holder})"
            ),
        )
    with lease:
        workers = join_workers(spec.training.placement.strategy)
        try:
            result = train(spec, workers, interruption, report)
        except Interrupted as interrupted:
            report(
                f"{interruption.signal_name} received: saved at {interrupted}. Start the same "
                "command again to go on."
            )
            raise
        finally:
            leave_workers()
    validation = result.validation
    report(
        f"Done: {result.steps} steps, {result.tokens_seen:,} tokens; validation "
        f"{validation['start']:.4f} → {validation['end']:.4f} {result.validation_unit}"
    )


if __name__ == "__main__":
    sys.exit(main())
