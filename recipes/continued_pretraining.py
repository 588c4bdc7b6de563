"""Continue the pre-training of a causal language model on packed rows.

    python -m recipes.launcher.local --workers 2 -- -m recipes.continued_pretraining --spec s.json

Started again after any end, it goes on from the newest checkpoint.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.leases import local_lease
from artifacts.program.entry import Interrupted, run_program
from artifacts.program.lifetime import Interruption, importing
from artifacts.progress import Report
from recipes.quiet import silence_libraries
from recipes.spec import TrainingSpec

if TYPE_CHECKING:
    from recipes.distributed.workers import Workers


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

    try:
        with ExitStack() as held:
            # One process waits before it takes hardware, of which a TPU is one process's alone.
            is_lone = os.environ.get("WORLD_SIZE", "1") == "1"
            if is_lone:
                held.enter_context(_alone(spec, None, interruption, report))
            workers = join_workers(spec.training.placement.strategy)
            if not is_lone:
                held.enter_context(_alone(spec, workers, interruption, report))
            result = train(spec, workers, interruption, report)
    except Interrupted as interrupted:
        cause = "Another worker was told to end"
        if interruption.requested:
            cause = f"{interruption.signal_name} received"
        report(f"{cause}: {interrupted}. Start the same command again to go on.")
        raise
    finally:
        leave_workers()
    validation = result.validation
    report(
        f"Done: {result.steps} steps, {result.tokens_seen:,} tokens; validation "
        f"{validation['start']:.4f} → {validation['end']:.4f} {result.validation_unit}"
    )


@contextmanager
def _alone(
    spec: TrainingSpec, workers: "Workers | None", interruption: Interruption, report: Report
) -> Iterator[None]:
    """Wait until no other trainer works on the run; the first worker holds the lease for all, or
    one process for itself.

    Raises Interrupted on all workers where one of them is told to end meanwhile.
    """

    # All workers ask each other at every look at the lease: a signal to one ends them all, and none
    # waits for the others so long that its group gives up.
    def is_to_wait(is_taken: bool) -> bool:
        wishes = is_taken, interruption.requested
        is_taken, is_over = workers.agree(*wishes) if workers else wishes
        if is_over:
            raise Interrupted("nothing was trained")
        return is_taken

    folder = spec.run_folder
    lease: AbstractContextManager[object] = nullcontext()
    if workers is None or workers.is_rank_zero:
        lease = local_lease(
            Path(folder) / "run.lock",
            lambda holder: report(f"Waiting: another trainer works on {folder} ({holder})"),
            lambda: is_to_wait(True),
        )
    with lease:
        while is_to_wait(False):
            pass
        yield


if __name__ == "__main__":
    sys.exit(main())
