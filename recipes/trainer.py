"""The training run: prepare, resume, step, validate, save, export."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from fsspec.implementations.local import LocalFileSystem

from artifacts.atomic import write_atomically
from artifacts.shards import ShardSet
from recipes.budget import total_steps
from recipes.checkpoint import Checkpointer
from recipes.export import copy_model, export_model
from recipes.hardware import device_readings, peak_flops
from recipes.input_checks import check_inputs
from recipes.interruption import Interruption
from recipes.model_setup import build_model
from recipes.optimizer import build_optimizers
from recipes.order import DataOrder
from recipes.parallel import Workers
from recipes.precision import choose_precision
from recipes.progress import Progress
from recipes.reader import Share, StepInput, TrainingData, load
from recipes.saving import SavingPlan
from recipes.schedule import learning_rate_factor
from recipes.settings import chosen
from recipes.spec import (
    BEST_NAME,
    PROFILE_NAME,
    RESULT_NAME,
    TrainingResult,
    TrainingSpec,
    read_result,
)
from recipes.step import StepOutcome, train_step
from recipes.telemetry import RowAudit, Telemetry
from recipes.validation import Validation


class Interrupted(Exception):
    """The run was asked to end; everything up to the named step is saved."""


def train(
    spec: TrainingSpec, workers: Workers, interruption: Interruption, report: Callable[[str], None]
) -> TrainingResult:
    """Bring a run to its end, from wherever it stands.

    Raises:
        UserError: the inputs do not fit together, or the run folder belongs to other settings.
        Interrupted: a signal came; everything is saved.
    """
    finished = read_result(Path(spec.run_folder))
    if finished and (Path(spec.export_folder) / "config.json").exists():
        report(f"The run {spec.run_id} is complete already: {finished.steps} steps.")
        return finished
    run = Run(spec, workers, interruption, report)
    try:
        return run.finish()
    finally:
        run.close()


class Run:
    """One start of a training run."""

    def __init__(
        self,
        spec: TrainingSpec,
        workers: Workers,
        interruption: Interruption,
        report: Callable[[str], None],
    ) -> None:
        check_inputs(spec, workers)
        workers = replace(workers, tensor_parallel=spec.training.tensor_parallel)
        self._spec, self._training, self._workers = spec, spec.training, workers
        self._interruption, self._report = interruption, report
        self._run_folder = Path(spec.run_folder)
        self._run_folder.mkdir(parents=True, exist_ok=True)
        self._steps = total_steps(spec.training, spec.shards)
        self._precision = choose_precision(spec.training.precision, workers.device)
        report(f"Loading {spec.base_model_folder}")
        self._model = build_model(spec, workers, self._precision)
        self._optimizers = build_optimizers(self._model, self._training)
        self._checkpointer = Checkpointer(
            spec.checkpoints_url or spec.run_folder,
            spec.content(),
            self._training.keep_checkpoints,
            chosen(self._training.save_in_background, workers.device.type == "cuda"),
            workers,
            report,
        )
        self._saving = SavingPlan(self._training)
        self._order = DataOrder.of(spec.training, spec.shards)
        self._shards = ShardSet(spec.shards_folder, spec.shards, *self._order.splits)
        self._validation = Validation(
            ShardSet(spec.shards_folder, spec.shards, "validation"),
            self._training.validation_rows,
            self._training.device_batch_size,
            workers,
        )
        audits = self._training.audit_rows and workers.is_first_of_share
        self._audit = RowAudit(self._run_folder, workers) if audits else None
        self._step, self._progress = self._resume()
        self._steps_to_read = self._open_reader()
        self._telemetry = (
            Telemetry(
                self._run_folder,
                self._step + 1,
                self._steps,
                report,
                spec.training.weights_and_biases,
            )
            if workers.is_first
            else None
        )

    def finish(self) -> TrainingResult:
        """Train to the last step, export the model and write `result.json`."""
        steps = self._steps
        if 0 not in self._progress.validation_bits_per_byte:
            self._validate()
        while self._step < steps:
            self._train_one_step()
            last = self._step == steps
            if last or self._step % self._training.validate_every_steps == 0:
                self._validate()
            stop, save = self._agree(self._interruption.requested, self._saving.is_due(self._step))
            if last or stop or save:
                self._save()
            if stop and not last:
                self._checkpointer.wait()
                raise Interrupted(f"step {self._step} of {steps}")
        return self._complete()

    def close(self) -> None:
        """Flush the metrics."""
        if self._telemetry:
            self._telemetry.close()

    def _resume(self) -> tuple[int, Progress]:
        restored = self._checkpointer.restore(self._model, self._optimizers)
        parameters = sum(p.numel() for p in self._model.parameters())
        setting = (
            f"{parameters / 1e6:,.0f} M parameters, {self._precision}, {len(self._shards):,} rows "
            f"of {self._spec.shards.sequence_length} tokens, {self._workers.count} worker(s)"
        )
        if restored is None:
            self._report(f"Training for {self._steps} steps: {setting}")
            return 0, Progress()
        step, state = restored
        self._report(f"Going on from the checkpoint of step {step}: {setting}")
        return step, Progress.model_validate(state)

    def _train_one_step(self) -> None:
        if self._step + 1 not in self._training.profile_steps:
            return self._train_next_step()
        with torch.profiler.profile() as profile:
            self._train_next_step()
        folder = self._run_folder / PROFILE_NAME
        folder.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(folder / f"step-{self._step}-{self._workers.rank}.json"))

    def _train_next_step(self) -> None:
        began = time.perf_counter()
        step_input = next(self._steps_to_read)
        waited = time.perf_counter() - began
        self._step += 1
        if self._audit:
            self._audit.write(self._step, step_input.rows.tolist())
        learning_rate = self._training.learning_rate * learning_rate_factor(
            self._training.schedule, self._step, self._steps
        )
        outcome = train_step(
            self._model,
            self._optimizers,
            step_input.batches,
            learning_rate,
            self._training.gradient_clip,
            self._progress.guard.largest_norm(self._training.skip_gradient_above),
            self._precision,
            self._workers,
            self._checkpointer.wait_until_copied,
        )
        self._progress.samples_seen += self._training.global_batch_size
        self._progress.tokens_seen += outcome.targets
        if outcome.skipped:
            limit = self._training.stop_after_skips
            self._report(self._progress.guard.skip(self._step, outcome.gradient_norm, limit))
        else:
            self._progress.guard.accept(outcome.gradient_norm)
        self._tell(outcome, learning_rate, time.perf_counter() - began, waited)

    def _open_reader(self) -> Iterator[StepInput]:
        """This worker's part of every step from here on."""
        training, workers = self._training, self._workers
        share = Share(
            training.global_batch_size, training.device_batch_size, workers.share, workers.shares
        )
        manifest = self._spec.inputs.get("tokenized_shards", "")
        data = TrainingData(self._shards, self._order, share, manifest, self._progress.samples_seen)
        return iter(load(data, training.reader_processes))

    def _tell(
        self, outcome: StepOutcome, learning_rate: float, seconds: float, waited: float
    ) -> None:
        if self._telemetry is None:
            return
        self._telemetry.step(
            self._step,
            seconds,
            {
                "loss": outcome.loss,
                "learning_rate": learning_rate,
                "gradient_norm": outcome.gradient_norm,
                "tokens_per_second": outcome.tokens / seconds,
                "targets": outcome.targets,
                "data_wait_share": waited / seconds,
                "loop_overhead_share": 1 - outcome.compute_seconds / seconds,
                "checkpoint_stall_seconds": self._checkpointer.take_stall(),
                "skipped": outcome.skipped,
                "samples_seen": self._progress.samples_seen,
                "samples_replayed": self._order.replayed(self._progress.samples_seen),
            }
            | self._utilisation(outcome.tokens / seconds)
            | device_readings(self._workers.device),
        )

    def _utilisation(self, tokens_per_second: float) -> dict[str, float]:
        """Model FLOP/s as a share of the machines' peak, where that is known."""
        peak = peak_flops(self._workers.device)
        if peak is None:
            return {}
        flops = self._model.flops_per_token(self._spec.shards.sequence_length)
        return {"mfu": flops * tokens_per_second / (peak * self._workers.count)}

    def _validate(self) -> None:
        result = self._validation.bits_per_byte(self._model, self._precision)
        self._progress.validation_bits_per_byte[self._step] = result
        if self._telemetry:
            self._telemetry.validation(self._step, result)
        if 0 < self._step < self._steps and self._progress.best_step == self._step:
            self._export(self._run_folder / BEST_NAME)

    def _agree(self, *wishes: bool) -> list[bool]:
        """What any worker wishes, all do."""
        return [count > 0 for count in self._workers.sum(*wishes)]

    def _save(self) -> None:
        self._checkpointer.save(
            self._step,
            self._model,
            self._optimizers,
            self._progress.model_dump(mode="json"),
            self._saving.is_permanent(self._step),
        )
        self._saving.saved()

    def _complete(self) -> TrainingResult:
        self._checkpointer.wait()
        folder = Path(self._spec.export_folder)
        self._report(f"Writing the trained model to {folder}")
        if self._training.export == "best" and self._progress.best_step < self._steps:
            if self._workers.is_first:
                copy_model(self._run_folder / BEST_NAME, folder)
        else:
            self._export(folder)
        result = self._progress.result(
            self._step,
            self._run_folder,
            samples_replayed=self._order.replayed(self._progress.samples_seen),
            precision=self._precision,
            workers=self._workers.count,
            parameters=sum(p.numel() for p in self._model.parameters()),
        )
        if self._workers.is_first:
            self._checkpointer.keep_only_newest()
            write_atomically(
                LocalFileSystem(),
                str(self._run_folder / RESULT_NAME),
                result.model_dump_json(indent=2).encode(),
            )
        self._workers.barrier()
        return result

    def _export(self, folder: Path) -> None:
        export_model(
            self._model,
            Path(self._spec.base_model_folder),
            folder,
            getattr(torch, self._training.export_dtype),
            self._workers,
            self._training.lora,
        )
