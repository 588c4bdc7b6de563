"""The training run: prepare, resume, step, validate, save, export."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import TextIO

import numpy as np
import torch

from artifacts.errors import DamagedArtifact, UserError
from artifacts.program.entry import Interrupted
from artifacts.program.lifetime import Interruption, Watchdog
from artifacts.shards.shard_set import ShardSet
from artifacts.storage import files
from recipes.checkpointing import checkpoint, export
from recipes.data import reader, records
from recipes.device import choose_precision, device_of
from recipes.distributed.strategy import StepOutcome, Strategy, train_step
from recipes.distributed.workers import Workers
from recipes.model.lora import absent_targets
from recipes.objective import Objective
from recipes.optimization import learning_rate_factor
from recipes.sections import chosen
from recipes.spec import (
    BEST_NAME,
    METRICS_NAME,
    PROFILE_NAME,
    RESULT_NAME,
    TrainingResult,
    TrainingSpec,
    read_result,
    total_steps,
)
from recipes.training import memory, setup
from recipes.training.telemetry import Telemetry, Validation, training_flops


class Trainer:
    """One start of a training run."""

    def __init__(
        self,
        spec: TrainingSpec,
        objective: Objective,
        workers: Workers,
        interruption: Interruption,
        watchdog: Watchdog,
        report: Callable[[str], None],
    ) -> None:
        setup.check_inputs(spec, workers)
        # Resolved once, so that no later start computes in another precision unnoticed.
        self._precision = choose_precision(spec.training.precision, workers.device)
        training = spec.training.model_copy(update={"precision": self._precision})
        self._spec = spec = spec.model_copy(update={"training": training})
        self._training, placement = training, training.placement
        self._workers = replace(
            workers,
            tensor_parallel=placement.tensor_parallel,
            pipeline_parallel=placement.pipeline_parallel,
        )
        self._objective, self._interruption, self._report = objective, interruption, report
        self._watchdog = watchdog
        self._run_folder = Path(spec.run_folder)
        self._run_folder.mkdir(parents=True, exist_ok=True)
        self._known = self._look_up_rows()
        new_rows = int(reader.is_fresh_row(self._known, spec.row_order).sum())
        self._steps = total_steps(training, spec.shards, new_rows)
        report(f"Loading {spec.base_model_folder}")
        self._strategy = self._build()
        model = self._strategy.model
        self._parameters, self._trained = model.parameter_count, model.trained_count
        if training.adapters and (absent := absent_targets(model, training.adapters)):
            report(
                f"WARNING: the model's layers have no {', '.join(absent)}, which "
                "`checkpoint.lora.targets` names; other matrices alone have adapters"
            )
        saving, device = training.checkpointing, device_of(workers.device)
        self._saving = checkpoint.SavingPlan(saving, device)
        self._checkpointer = checkpoint.Checkpointer(
            self._strategy,
            spec.checkpoints_url or spec.run_folder,
            spec.content(),
            saving.keep,
            self._strategy.saves_in_background
            and chosen(saving.in_background, device.saves_in_background),
            self._workers,
            report,
        )
        self._open_rows()
        self._step, self._state = self._resume()
        self._bests = export.BestExports(self._run_folder / BEST_NAME, self._state.best_step)
        # After `_resume`, whose state says how many samples the run has taken.
        self._steps_to_read = self._open_reader()
        self._telemetry: Telemetry | None = None
        if workers.is_rank_zero:
            self._telemetry = Telemetry(spec, self._step + 1, self._steps, report)

    def finish(self) -> TrainingResult:
        """Train to the last step, or until it diverges; export the model, write `result.json`."""
        self._watchdog.progress()
        # The starting model's validation; a run that goes on has it in its checkpoint.
        if 0 not in self._state.validation:
            self._validate()
        self._counted_to = time.perf_counter()
        self._train()
        self._watchdog.progress()
        return self._complete()

    def _look_up_rows(self) -> records.RowCounts:
        """What the lineage has seen of the train rows; each worker looks into a part of the
        shards, and the sum is known to all."""
        spec, workers = self._spec, self._workers
        # Nothing is masked here: a run that is made once more without some texts has to plan the
        # same rows as with them.
        shards = ShardSet(spec.shards_folder, spec.shards, "train")
        lineage = records.LineageRecord.read(spec.seen)
        counts = workers.together(
            lambda: records.look_up(shards, lineage, workers.rank, workers.count)
        )
        return records.RowCounts(*map(workers.sum_parts, counts))

    def _build(self) -> Strategy:
        return setup.build_strategy(self._spec, self._objective, self._workers, self._precision)

    def _open_rows(self) -> None:
        """Open the rows to train on, those to validate on, and the record of what is read."""
        spec, workers = self._spec, self._workers
        self._order = reader.DataOrder.of(spec, self._known)
        self._shards = spec.open_shards(*self._order.splits)
        self._validation = Validation(spec, self._objective, workers)
        read = (self._shards, self._validation.shards)
        workers.together(lambda: setup.check_tokens(read, spec.shards_folder, workers))
        self._audit: TextIO | None = None
        if self._training.logging.audit_rows and workers.is_first_of_part:
            # Steps done once more after a kill are there again, further down.
            self._audit = (self._run_folder / f"rows-{workers.dp_rank}.jsonl").open("a")

    def _resume(self) -> tuple[int, checkpoint.TrainState]:
        restored = self._checkpointer.restore()
        setting = (
            f"{self._parameters / 1e6:,.0f} M parameters, {self._precision}, {len(self._shards):,} "
            f"rows of {self._spec.shards.sequence_length} tokens, {self._workers.described}"
        )
        if restored is None:
            self._report(f"Training for {self._steps} steps: {setting}")
            return 0, checkpoint.TrainState()
        step, state = restored
        self._report(f"Going on from the checkpoint of step {step}: {setting}")
        return step, checkpoint.TrainState.model_validate(state)

    def _open_reader(self) -> Iterator[reader.StepInput]:
        """This worker's part of every step from here on."""
        training, workers = self._training, self._workers
        share = reader.BatchSplit(
            training.budget.global_batch_size,
            workers.rows_per_pass(training.placement.device_batch_size),
            workers.dp_rank,
            workers.dp_size,
        )
        samples_seen, read_batch = self._state.samples_seen, self._objective.read_batch
        steps = reader.read_steps(self._shards, self._order, share, samples_seen, read_batch)
        reads_ahead = device_of(workers.device).reads_ahead
        return reader.read_ahead(steps, workers.device) if reads_ahead else steps

    def _train(self) -> None:
        while self._step < self._steps and not self._state.diverged:
            with self._profile_of_next_step():
                self._train_next_step()
            self._end_step()

    @contextmanager
    def _profile_of_next_step(self) -> Iterator[None]:
        """Write what the step's operators took, as Chrome's trace viewer reads it, if asked for."""
        if self._step + 1 not in self._training.logging.profile_steps:
            yield
            return
        path = self._run_folder / PROFILE_NAME / f"step-{self._step + 1}-{self._workers.rank}.json"
        with torch.profiler.profile() as profile:
            yield
        path.parent.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(path))

    def _train_next_step(self) -> None:
        began = time.perf_counter()
        step_input = self._begin_step()
        waited = time.perf_counter() - began
        # `_begin_step` has counted this step already, so the first one is 1.
        learning_rate = self._training.optimizer.learning_rate * learning_rate_factor(
            self._training.schedule, self._step, self._steps
        )
        outcome = train_step(
            self._strategy,
            step_input.batches,
            learning_rate,
            self._state.guard.largest_norm(self._training.optimizer.skip_gradient_above),
            self._workers,
            self._checkpointer.wait_until_copied,
        )
        self._record(outcome, learning_rate, waited)

    def _begin_step(self) -> reader.StepInput:
        """Read this worker's part of the next step."""
        self._watchdog.progress()
        step_input = next(self._steps_to_read)
        self._step += 1
        if self._audit:
            rows, parts = step_input.rows.tolist(), self._workers.dp_size
            line = {"step": self._step, "workers": parts, "rows": rows}
            self._audit.write(json.dumps(line) + "\n")
            # At once, so that a kill leaves no step without its line.
            self._audit.flush()
        return step_input

    def _record(self, outcome: StepOutcome, learning_rate: float, waited: float) -> None:
        """Enter a finished step into the state, and record it.

        Its seconds include what followed the step before (writing it down, validating, saving), so
        that all of the time belongs to some step.
        """
        now = time.perf_counter()
        seconds, self._counted_to = now - self._counted_to, now
        # Also of a skipped step: its rows were taken, and a run that goes on must not take them
        # again.
        self._state.samples_seen += self._training.budget.global_batch_size
        self._state.tokens_seen += outcome.targets
        if outcome.skipped:
            settings = self._training.optimizer
            why, is_over = self._state.guard.skip(self._step, outcome.gradient_norm, settings)
            if is_over:
                self._state.diverged = why
            else:
                self._report(why)
        else:
            self._state.guard.accept(outcome.gradient_norm)
            self._state.add_step(outcome.loss, outcome.tokens / seconds)
        if self._telemetry is None:
            return
        device = device_of(self._workers.device)
        every = self._training.logging.every_steps or device.logs_every_steps
        is_shown = self._step % every == 0 or self._step == self._steps
        figures = {
            "loss": outcome.loss,
            "learning_rate": learning_rate,
            "gradient_norm": outcome.gradient_norm,
            "tokens_per_second": outcome.tokens / seconds,
            "targets": outcome.targets,
            "data_wait_share": waited / seconds,
            "loop_overhead_share": 1 - outcome.compute_seconds / seconds,
            "checkpoint_stall_seconds": self._checkpointer.take_stall(),
            "skipped": outcome.skipped,
            "samples_seen": self._state.samples_seen,
            "samples_replayed": self._order.replayed(self._state.samples_seen),
        }
        figures |= self._utilization(outcome, seconds) | (device.readings() if is_shown else {})
        self._telemetry.step(self._step, seconds, figures, is_shown)

    def _utilization(self, outcome: StepOutcome, seconds: float) -> dict[str, float]:
        """Model FLOP/s as a share of the hardware's peak, where that is known."""
        peak = device_of(self._workers.device).peak_flops()
        if peak is None:
            return {}
        width, counts = self._strategy.model.attention_width, (outcome.tokens, outcome.pairs)
        flops = training_flops(self._parameters, self._trained, width, *counts)
        available = seconds * self._workers.count * self._workers.chips * peak
        return {f"mfu_{name}": count / available for name, count in flops.items()}

    def _end_step(self) -> None:
        """Validate and save where it is time to; raises Interrupted where a signal has come."""
        self._watchdog.progress()
        is_last = self._step == self._steps
        # Before saving: a state whose validation is not a number is never saved.
        if is_last or self._step % self._training.validation.every_steps == 0:
            self._validate()
        if self._state.diverged:
            self._report(self._state.diverged)
            return
        # A signal may reach one worker alone, and clocks differ: if one wants to stop or save, all
        # do.
        stop, save = self._workers.agree(
            self._interruption.requested, self._saving.is_due(self._step)
        )
        if is_last or stop or save:
            self._save()
        if stop and not is_last:
            self._checkpointer.wait()
            raise Interrupted(f"saved at step {self._step} of {self._steps}")

    def _validate(self) -> None:
        result = self._validation.measure(self._strategy)
        self._state.add_validation(self._step, result)
        if self._state.diverged:
            return
        if self._telemetry:
            self._telemetry.validation(self._step, result, self._validation.unit)
        # Else nobody reads them, and each would be a whole model on the disk or in the bucket.
        keeps_best = self._training.export.weights == "best"
        if keeps_best and 0 < self._step < self._steps and self._state.best_step == self._step:
            self._export(self._bests.folder(self._step))
            if self._workers.is_rank_zero:
                self._bests.keep(self._step)

    def _save(self) -> None:
        if self._telemetry:
            # First, so that the lines of all steps that the checkpoint covers outlive the machine
            # with it.
            self._telemetry.publish()
        with self._saving.saving():
            self._checkpointer.save(
                self._step,
                self._state.model_dump(mode="json"),
                self._saving.is_permanent(self._step),
            )
        # Only after `save`, which has waited for the save before to be committed.
        self._bests.saved(self._state.best_step)

    def _complete(self) -> TrainingResult:
        # Raises what the last save in the background met, before anything says that the run is
        # complete.
        self._checkpointer.wait()
        folder = Path(self._spec.export_folder)
        self._report(f"Writing the trained model to {folder}")
        exports_best = self._training.export.weights == "best" and self._state.best_step > 0
        exported = self._state.best_step if exports_best else self._step
        is_first = self._workers.is_rank_zero
        best = self._bests.folder(exported)
        if exported == self._step:
            self._export(folder)
        elif not self._workers.share(export.is_whole(best)):
            raise UserError(
                f"The weights of step {exported}, whose validation was the best, are not whole in "
                f"{best}. Bring that folder back from a backup, or remove {self._run_folder} and "
                "run the same again, which trains from the first step."
            )
        elif is_first:
            export.copy_model(best, folder)
        coverage, seen_before = self._record_text(exported) if is_first else (0.0, 0)
        state, validation = self._state, self._state.validation
        result = TrainingResult(
            steps=self._step,
            tokens_seen=state.tokens_seen,
            samples_seen=state.samples_seen,
            samples_replayed=self._order.replayed(state.samples_seen),
            coverage=coverage,
            tokens_seen_before=seen_before,
            validation={
                "start": validation[0],
                "end": validation[max(validation)],
                "best": validation[state.best_step],
            },
            validation_unit=self._validation.unit,
            best_step=state.best_step,
            tokens_per_second=median(state.recent_tokens_per_second or [0.0]),
            final_loss=state.last_loss,
            skipped_steps=len(state.guard.skipped_steps),
            diverged=state.diverged,
            precision=self._precision,
            workers=self._workers.count,
            parameters=self._parameters,
            metrics_path=str(self._run_folder / METRICS_NAME),
        )
        if is_first:
            # The result comes last, also after a loss of power: whoever finds it asks for nothing
            # else of the run.
            told = (records.SEEN_NAME, records.TRAINED_NAME, METRICS_NAME)
            files.flush_folder(self._run_folder, told)
            self._checkpointer.rotate(keep=1)
            result.write(self._run_folder)
        # No worker leaves the group while the first one still writes.
        self._workers.barrier()
        return result

    def _record_text(self, last_step: int) -> tuple[float, int]:
        """Write `seen.parquet` and `trained.parquet` into the run folder, of the steps up to that
        whose weights are exported; returns what `record_seen` does."""
        spec, size = self._spec, self._training.budget.global_batch_size
        steps = 1 + np.arange(last_step * size) // size
        # Only what taught the exported weights: the next run goes on from these, and takes what
        # they have not seen first.
        taught = ~np.isin(steps, self._state.guard.skipped_steps)
        rows = self._order.rows(0, len(steps))[taught]
        shards = ShardSet(spec.shards_folder, spec.shards, *self._order.splits)
        path = str(self._run_folder / records.TRAINED_NAME)
        records.record_trained(shards, rows, steps[taught], path, spec.hidden)
        shards = ShardSet(spec.shards_folder, spec.shards, "train")
        path = str(self._run_folder / records.SEEN_NAME)
        lineage = records.LineageRecord.read(spec.seen)
        return records.record_seen(shards, self._known, lineage, rows, path, spec.hidden)

    def _export(self, folder: Path) -> None:
        export.export_model(
            self._strategy,
            Path(self._spec.base_model_folder),
            folder,
            getattr(torch, self._training.export.dtype),
            self._workers,
            self._training.adapters,
        )

    @property
    def memory_described(self) -> str:
        """What is reckoned to take a GPU's memory, in words."""
        model, rows = self._strategy.model, self._training.placement.device_batch_size
        reckoning = memory.reckoning_of(self._spec, model)
        sizes = reckoning.sizes(rows, self._workers.count, keeps=not model.recomputes)
        return f"What it should take: {memory.described(sizes)}."

    def close(self) -> None:
        """Flush the metrics."""
        if self._telemetry:
            self._telemetry.close()


def train(
    spec: TrainingSpec, workers: Workers, interruption: Interruption, report: Callable[[str], None]
) -> TrainingResult:
    """Bring a run to its end, from wherever it stands.

    Raises UserError where the inputs do not fit together, or the run folder belongs to other
    settings, and Interrupted where a signal came; everything is saved then.
    """
    try:
        finished = read_result(Path(spec.run_folder))
    except DamagedArtifact:
        report(f"{spec.run_folder}/{RESULT_NAME} cannot be read and is written again")
        finished = None
    # Where the model is gone, the run goes on from its last checkpoint, which exports it again.
    if finished and export.is_whole(Path(spec.export_folder)):
        report(f"The run {spec.run_id} is complete already: {finished.steps} steps.")
        return finished
    objective: Objective = spec.training.objective()
    kind: type[Trainer] = resolve_name(objective.trainer)
    minutes = spec.training.placement.hang_minutes
    # On every worker: the others wait for one that hangs for hours (`workers.host_group`).
    with Watchdog(
        minutes * 60,
        f"Nothing was finished within {minutes:g} minutes (`checkpoint.placement.hang_minutes`), "
        "so this training is ended; it goes on from its newest checkpoint when started again.",
    ) as watchdog:
        trainer = kind(spec, objective, workers, interruption, watchdog, report)
        try:
            return trainer.finish()
        except torch.OutOfMemoryError as error:
            error.add_note(trainer.memory_described)
            raise
        finally:
            trainer.close()
