"""Where the PyTorch programs run: training and evaluation."""

import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from artifacts.checkpoints import newest_step
from artifacts.errors import UserError, shown
from artifacts.program.entry import ERROR_MESSAGE, INTERRUPTED
from artifacts.program.lifetime import Child, how_it_ended
from artifacts.reasons import LOST_WORKER, free_space, why_killed
from artifacts.store import layout
from artifacts.store.store import Draft, Store
from llm_assets.pipes.service import Restarts
from recipes.data.records import SEEN_NAME, TRAINED_NAME
from recipes.evaluation.spec import EvaluationSpec
from recipes.settings import PlacementSettings, Precision, RecipeSettings, TrainingSettings
from recipes.spec import (
    METRICS_NAME,
    SPEC_NAME,
    TrainingResult,
    TrainingSpec,
    command,
    read_metrics,
    read_result,
)

TERMINATION_SECONDS = 60
LOG_TAIL_LINES = 25


def run_child(
    context: dg.AssetExecutionContext,
    command: Sequence[str],
    log_path: Path,
    restarts: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Run a command to its end; restart it up to `restarts` times without progress in between.

    It is restarted if it exits with 75, or if one of its workers ended without a word, as when
    killed; a program whose input is at fault says so in its closing message, and is not.

    Its standard output and error go to `log_path`; what it reports through Dagster Pipes goes into
    the run. If the run is canceled for whatever reason, the child is asked to stop (SIGTERM),
    given a minute to save its state, and then killed.

    Raises:
        UserError: the child failed, or ended without its closing message. The message has the
            reason that the program gave, or else the end of its log.
    """
    starts = Restarts(restarts, progress)
    while True:
        code, closed, reason = _run_once(context, command, log_path)
        died = code != 0 and (not closed or reason == LOST_WORKER)
        if not (died or code == INTERRUPTED) or not starts.allow():
            break
        outcome = "was interrupted, its state saved" if code == INTERRUPTED else _end(code)
        context.log.warning(f"The program {outcome}; starting it again, {starts}")
    if reason and reason != LOST_WORKER:
        raise UserError(f"{reason}\n(From `{' '.join(command[:6])} ...`; its log: {log_path})")
    if code != 0:
        lines = shown(log_path.read_text(errors="replace")).splitlines()
        raise UserError(
            (f"{reason}\n" if reason else "")
            + f"`{' '.join(command[:6])} ...` {_end(code)}. The end of its log ({log_path}):\n"
            + ("\n".join(lines[-LOG_TAIL_LINES:]) or f"(it is empty; {free_space(str(log_path))})")
        )
    if not closed:
        raise UserError(
            f"`{' '.join(command[:6])} ...` exited without its closing message, so it cannot be "
            f"taken as done. Its log: {log_path}"
        )


def _run_once(
    context: dg.AssetExecutionContext, command: Sequence[str], log_path: Path
) -> tuple[int, bool, str | None]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        # Appended: a program that is started again must not overwrite why it died.
        log_path.open("ab") as log,
        dg.open_pipes_session(
            context=context,
            context_injector=dg.PipesTempFileContextInjector(),
            message_reader=dg.PipesTempFileMessageReader(),
        ) as session,
    ):
        environment = os.environ | session.get_bootstrap_env_vars()
        child = Child(command, environment=environment, output=log)
        try:
            code = child.wait()
        finally:
            # However the run ends, the child must not outlive it.
            child.end(TERMINATION_SECONDS)
    assert code is not None, "it was waited for without a limit"
    reasons = [m[ERROR_MESSAGE] for m in session.get_custom_messages() if ERROR_MESSAGE in m]
    return code, session.message_handler.received_closed_message, next(iter(reasons), None)


def _end(code: int) -> str:
    """How a program ended, in words, and what to do where it was killed."""
    # The exit code of a child that a signal ended is the signal's number, negated.
    if -code != signal.SIGKILL:
        return how_it_ended(code)
    reason = why_killed(
        "For training, lower `checkpoint.placement.device_batch_size` or "
        "`tokenized_shards.sequence_length`, or set `checkpoint.placement.activation_checkpointing`"
        "; for an evaluation, lower `eval_metrics.batch_tokens`."
    )
    return f"was killed (SIGKILL), {reason} A training run goes on from its newest checkpoint"


Train = Callable[[TrainingSpec], TrainingResult]


class TrainingRunner(dg.ConfigurableResource, ABC):
    """Runs the programs of `recipes` somewhere."""

    @abstractmethod
    def train(self, context: dg.AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        """Train to the end, continuing an interrupted run of the same specification."""

    @abstractmethod
    def evaluate(self, context: dg.AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        """Measure the models and return the evaluation's `result.json`."""

    def place(self, settings: RecipeSettings) -> RecipeSettings:
        """The settings with the number of processes that training runs in here.

        Raises:
            UserError: they ask for another device, or another number, than there is.
        """
        self.check_hardware(settings.placement)
        return settings.placed(self.world_size(settings.placement))

    def resolve(self, settings: RecipeSettings) -> RecipeSettings:
        """The settings by `place`, with what `precision: auto` means where training runs.

        The precision decides the weights, so it has to be in the checkpoint's fingerprint.
        """
        settings = self.place(settings)
        if settings.precision != "auto":
            return settings
        strategy = settings.placement.strategy
        precision = (strategy and strategy.precision) or self.precision()
        return settings.model_copy(update={"precision": precision})

    @abstractmethod
    def check_hardware(self, placement: PlacementSettings) -> None:
        """Raise UserError if training cannot run here with this placement."""

    @abstractmethod
    def precision(self) -> Precision:
        """What `checkpoint.precision: auto` means on the processor or GPU where training runs."""

    def world_size(self, placement: PlacementSettings) -> int:
        """The number of training processes; raises UserError where another is asked for."""
        return placement.world_size

    def check_state(self, settings: TrainingSettings, parameters: int) -> None:
        """Raise UserError where machines are too small for a model, before they are paid for."""
        return

    def estimate(self, tokens: int, parameters: int) -> str | None:
        """Time and price of training on so many tokens, in words; None where there is no bill."""
        return None


class LocalTrainingRunner(TrainingRunner):
    """Runs them in child processes on this machine."""

    restarts: int = 3
    """How often a training that was interrupted, or whose worker died, is started again although it
    has saved nothing since its last start."""

    def check_hardware(self, placement: PlacementSettings) -> None:
        placement.python()

    def precision(self) -> Precision:
        if known := known_precision():
            return known
        from recipes.device import device_of, local_device

        return device_of(local_device()).precision()

    def train(self, context: dg.AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        run_folder = Path(spec.run_folder)
        spec_path = run_folder / SPEC_NAME
        spec.write(spec_path)
        placement = spec.training.placement
        program = command(spec_path, placement.world_size, placement.python())
        progress = partial(newest_step, spec.run_folder)
        run_child(context, program, run_folder / "program.log", self.restarts, progress)
        result = read_result(run_folder)
        assert result is not None, "a training that ended well leaves its result"
        return result

    def evaluate(self, context: dg.AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        output = Path(spec.output)
        output.mkdir(parents=True, exist_ok=True)
        spec_path = output / "spec.json"
        spec_path.write_text(spec.model_dump_json(indent=2))
        program = [sys.executable, "-m", "recipes.evaluate", "--spec", str(spec_path)]
        run_child(context, program, output / "program.log")
        return json.loads((output / "result.json").read_text())


def known_precision(machine: Path = Path("/")) -> Precision | None:
    """What `precision: auto` means on this machine (`recipes.device.Device.precision`), if that is
    known without torch, whose import takes a fifth of a run that finds everything made.

    None if there may be a GPU (none works without one of these files), if the processor is
    unknown, and if oneDNN was told to use less than the processor has.
    """
    if any(next((machine / "dev").glob(name), None) for name in ("nvidia*", "dxg", "kfd")):
        return None
    try:
        flags = (machine / "proc/cpuinfo").read_text().split()
    except OSError:
        return None
    if {"avx512_bf16", "amx_tile"}.isdisjoint(flags):
        return "float32"
    limits = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return None if any(map(os.environ.get, limits)) else "bfloat16"


def train_into(store: Store, draft: Draft, spec: TrainingSpec, train: Train) -> None:
    """Train, and keep the figures and the records of its text beside the exported model.

    The specification, which exports into the draft, stays in the run's folder, in case the run is
    repeated without some texts (`llm_assets.forgetting.replay`).
    """
    folder = layout.run(spec.run_id)
    # Before the training: `replay` takes a run that has a spec for one that has begun, and adopts
    # no checkpoint into it.
    store.write_bytes(f"{folder}/{SPEC_NAME}", spec.model_dump_json(indent=2).encode())
    draft.stats |= train(spec).model_dump()
    for name in (METRICS_NAME, SEEN_NAME, TRAINED_NAME):
        (draft.path / name).write_bytes(store.read_bytes(f"{folder}/{name}") or b"")
    draft.stats["training_seconds"] = sum(line["seconds"] for line in read_metrics(draft.path))
