"""Continue the pre-training of a causal language model on packed rows.

    torchrun --nproc-per-node 2 -m recipes.continued_pretraining --spec spec.json

Started again after any end, it goes on from the newest checkpoint. Exit codes: 0 done, 75
interrupted with a checkpoint saved (start me again), anything else failed.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from artifacts.errors import UserError
from artifacts.lease import local_lease
from recipes.interruption import Interruption, end_with_parent
from recipes.quiet import silence_libraries
from recipes.spec import INTERRUPTED_EXIT_CODE, TrainingSpec, read_spec


def main() -> int:
    """Run one worker; returns the process's exit code."""
    arguments = _parse_arguments()
    is_first = os.environ.get("RANK", "0") == "0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    # Threads that wait by spinning take the processor from whoever else runs on a laptop, and train
    # many times slower there; asleep they cost about nothing. Read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    interruption = Interruption()
    with _reporting(is_first) as report:
        try:
            spec = read_spec(arguments.spec)
            return _run(spec, is_first, interruption, report)
        except UserError as error:
            if is_first:
                print(f"Training stopped: {error}", file=sys.stderr)
            return 1


def _run(
    spec: TrainingSpec,
    is_first: bool,
    interruption: Interruption,
    report: Callable[[str], None],
) -> int:
    silence_libraries()
    from recipes.parallel import join_workers, leave_workers
    from recipes.trainer import Interrupted, train

    with _only_trainer(spec, is_first, report):
        workers = join_workers()
        try:
            result = train(spec, workers, interruption, report)
        except Interrupted as interrupted:
            report(
                f"{interruption.signal_name} received: saved at {interrupted}. Start the same "
                "command again to go on."
            )
            return INTERRUPTED_EXIT_CODE
        finally:
            leave_workers()
    bits = result.validation_bits_per_byte
    report(
        f"Done: {result.steps} steps, {result.tokens_seen:,} tokens; validation "
        f"{bits['start']:.4f} → {bits['end']:.4f} bits per byte"
    )
    return 0


@contextlib.contextmanager
def _only_trainer(
    spec: TrainingSpec, is_first: bool, report: Callable[[str], None]
) -> Iterator[None]:
    """Keep a second trainer of the same run waiting until the first has ended."""
    if not is_first:
        yield
        return
    run_folder = Path(spec.run_folder)
    with local_lease(
        run_folder / "run.lock",
        lambda holder: report(f"Waiting: another trainer works on {run_folder} ({holder})"),
    ):
        yield


@contextlib.contextmanager
def _reporting(is_first: bool) -> Iterator[Callable[[str], None]]:
    """Lines go to Dagster where it started us, to standard output otherwise."""
    from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, open_dagster_pipes

    if not is_first:
        yield lambda line: None
    elif DAGSTER_PIPES_CONTEXT_ENV_VAR in os.environ:
        with open_dagster_pipes() as context:
            yield context.log.info
    else:
        yield lambda line: print(line, flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continue a model's pre-training.")
    parser.add_argument("--spec", type=Path, required=True, help="the training spec, a JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
