"""The training run: prepare, resume, step, validate, save, export, and leave its records."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import Any, TextIO

import numpy as np
import torch

from artifacts.errors import DamagedArtifact, UserError, first_line, make_command, pip_command
from artifacts.numbers import permute
from artifacts.program.entry import Interrupted
from artifacts.program.lifetime import Interruption
from artifacts.progress import Report
from artifacts.shards.shard_set import ShardSet
from artifacts.storage import files
from recipes.checkpointing import checkpoint
from recipes.data import reader, records
from recipes.data.batch import IGNORED, Batch, ExampleBatch, bytes_per_token
from recipes.device import choose_precision, device_of
from recipes.distributed.strategy import StepOutcome, Strategy, train_step
from recipes.distributed.workers import Workers
from recipes.model.lora import absent_targets
from recipes.objective import Objective
from recipes.optimization import learning_rate_factor
from recipes.settings import RecipeSettings, chosen
from recipes.spec import (
    BEST_NAME,
    METRICS_NAME,
    PROFILE_NAME,
    RESULT_NAME,
    STEPS_FOR_ESTIMATE,
    TENSORBOARD_NAME,
    TrainingResult,
    TrainingSpec,
    describe_progress,
    read_metrics,
    read_result,
    total_steps,
)
from recipes.training import setup


# What a run tells while it goes: log lines, `metrics.jsonl`, TensorBoard events, profiles.
# In a mounted bucket a file is there for others, and outlives its machine, once it is closed. So
# both files are closed, and go on, every few minutes and before each checkpoint.
def training_flops(
    parameters: int, trained: int, attention_width: int, tokens: int, pairs: int
) -> dict[str, float]:
    """FLOPs of some tokens: `6n`, six per parameter and token, or four of a frozen one, whose
    gradient is not computed; and `masked`, with the attention that document masks leave: pairs of
    positions, each with itself."""
    by_parameters = (4.0 * parameters + 2.0 * trained) * tokens
    return {"6n": by_parameters, "masked": by_parameters + 12.0 * attention_width * pairs}


SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_PUBLICATIONS = 300.0
LOG_FOLDER_VARIABLE = "LOG_FOLDER"
"""Set by the launcher in a job of Vertex AI, whose TensorBoard names a run by its folder there."""


class Telemetry:
    """Writes the first worker's account of the run."""

    def __init__(self, spec: TrainingSpec, first_step: int, steps: int, report: Report) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_folder = Path(spec.run_folder)
        title, project = spec.title or run_folder.name, spec.training.logging.weights_and_biases
        self._report = report
        self._steps = steps
        self._recent: deque[dict[str, Any]] = deque(maxlen=STEPS_FOR_ESTIMATE)
        self._last_line = 0.0
        self._published = time.monotonic()
        # A run that resumed from a checkpoint takes the steps after it once more, so their lines
        # go.
        self._path = path = run_folder / METRICS_NAME
        try:
            lines = [line for line in read_metrics(run_folder) if line["step"] < first_step]
        except DamagedArtifact:
            report(f"{path} cannot be read; the figures of the steps before are lost")
            lines = []
        content = "".join(json.dumps(line) + "\n" for line in lines)
        files.write(path, content.encode())
        self._metrics = path.open("a")
        logs = os.environ.get(LOG_FOLDER_VARIABLE)
        folder = Path(logs) / title if logs else run_folder / TENSORBOARD_NAME
        # TensorBoard leaves out the events of the steps that are taken once more.
        self._events = SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
        self._remote: Any = None
        if project:
            try:
                import wandb
            except ModuleNotFoundError:
                raise UserError(
                    "`checkpoint.logging.weights_and_biases` is set, but the package wandb is not "
                    f"installed. Install it with: {pip_command()} install wandb"
                ) from None
            try:
                # A run goes on under the same id.
                self._remote = wandb.init(
                    project=project, id=run_folder.name, name=title, dir=run_folder, resume="allow"
                )
            except wandb.Error as error:
                raise UserError(
                    f"`checkpoint.logging.weights_and_biases`: {first_line(error)} Give its key in "
                    "WANDB_API_KEY, keep the figures here with WANDB_MODE=offline, or leave the "
                    "setting out."
                ) from error

    def step(self, step: int, seconds: float, values: dict[str, Any], is_shown: bool) -> None:
        """Record one step, and print a line now and then.

        Its seconds count from the end of the step before. `loss` and `tokens_per_second` are among
        the values, which TensorBoard and Weights & Biases get only where they are shown.
        """
        line = {"step": step, "steps": self._steps, "seconds": round(seconds, 4)} | values
        self._recent.append(line)
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        for name, value in values.items() if is_shown else ():
            if isinstance(value, int | float):
                self._events.add_scalar(f"train/{name}", value, step)
        if self._remote and is_shown:
            self._remote.log(values, step=step)
        now = time.monotonic()
        if step == self._steps or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._report(describe_progress(self._recent))
        if now - self._published >= SECONDS_BETWEEN_PUBLICATIONS:
            self.publish()

    def validation(self, step: int, value: float, unit: str) -> None:
        """Record a validation result."""
        name = unit.replace(" ", "_")
        self._events.add_scalar(f"validation/{name}", value, step)
        if self._remote:
            self._remote.log({f"validation_{name}": value}, step=step)
        self._report(f"step {step} of {self._steps} · validation {value:.4f} {unit}")

    def publish(self) -> None:
        """Bring all that was told so far to where others read it."""
        self._metrics.close()
        self._metrics = self._path.open("a")
        # The next figure opens another file beside it.
        self._events.close()
        self._published = time.monotonic()

    def close(self) -> None:
        """Flush everything."""
        self._metrics.close()
        self._events.close()
        if self._remote:
            self._remote.finish()


# Any number will do, the same one in every run: so validations of different runs compare.
SELECTION_KEY = 20_261_121
PADDING_ROW = -1


class Validation:
    """Measures a model on a fixed sample of the validation rows."""

    def __init__(
        self,
        shards: ShardSet,
        training: RecipeSettings,
        objective: Objective,
        workers: Workers,
        may_be_empty: bool = False,
    ) -> None:
        """Choose the rows; none need be left where a run is made once more for text that was
        forgotten: its loss is 0 then, and decides nothing."""
        self._may_be_empty = may_be_empty
        batch_size = workers.rows_per_pass(training.placement.device_batch_size)
        self._shards, self._workers, self._read_batch = shards, workers, objective.read_batch
        tells_every_token = shards.stats.form == "pretraining" and not objective.scorer
        self._units_per_target = bytes_per_token(shards) if tells_every_token else 1.0
        self.unit = "bits per byte" if tells_every_token else "bits per target"
        """A target is a token of an answer, a hidden token, or a class."""
        count = min(training.validation.rows, len(shards))
        sample = np.sort(permute(np.arange(count), len(shards), SELECTION_KEY))
        # Every worker must run equally many forward passes, so the last ones may be padding.
        batches = math.ceil(count / (batch_size * workers.dp_size))
        padded = np.full(batches * batch_size * workers.dp_size, PADDING_ROW)
        padded[:count] = sample
        self._batches = padded.reshape(workers.dp_size, batches, batch_size)[workers.dp_rank]

    @torch.no_grad()
    def measure(self, strategy: Strategy) -> float:
        """Mean loss of a target in bits; of text, over the bytes that a token stands for. Raises
        UserError where there is no target, as all validation text was forgotten."""
        strategy.model.eval()
        loss_sum, targets = 0.0, 0
        for rows in self._batches:
            batch = self._read(rows)
            loss_sum += float(strategy.loss(batch))
            targets += batch.target_count
        strategy.model.train()
        loss_sum, total = self._workers.sum(loss_sum, targets)
        if not total and not self._may_be_empty:
            raise UserError(
                "The validation rows of the shards hold nothing to predict, as their text was "
                "forgotten. Give the corpus more text, and make the shards again with: "
                f"{make_command('tokenized_shards')}"
            )
        return loss_sum / max(total, 1) / math.log(2) / self._units_per_target

    def _read(self, rows: np.ndarray) -> Batch | ExampleBatch:
        real = rows[rows != PADDING_ROW]
        batch = self._read_batch(self._shards, real if len(real) else np.zeros_like(rows), None)
        # Only padding here: row 0 stands in, as every worker has to compute, and counts nothing.
        if not len(real):
            batch.targets.fill_(IGNORED)
        return batch


class Trainer:
    """One start of a training run."""

    def __init__(
        self,
        spec: TrainingSpec,
        objective: Objective,
        workers: Workers,
        interruption: Interruption,
        report: Callable[[str], None],
    ) -> None:
        setup.check_inputs(spec, workers)
        # Resolved once, so that no later start computes in another precision unnoticed.
        self._precision = choose_precision(spec.training.precision, workers.device)
        training = spec.training.model_copy(update={"precision": self._precision})
        spec, placement = spec.model_copy(update={"training": training}), training.placement
        workers = replace(
            workers,
            tensor_parallel=placement.tensor_parallel,
            pipeline_parallel=placement.pipeline_parallel,
        )
        self._spec, self._training, self._workers = spec, spec.training, workers
        self._interruption, self._report = interruption, report
        self._run_folder = Path(spec.run_folder)
        self._run_folder.mkdir(parents=True, exist_ok=True)
        # Each worker looks into a part of the shards; rows are known by the sum.
        shards = ShardSet(spec.shards_folder, spec.shards, "train")
        lineage = records.LineageRecord.read(spec.seen)
        counts = workers.together(
            lambda: records.look_up(shards, lineage, workers.rank, workers.count)
        )
        self._known = records.RowCounts(*map(workers.sum_parts, counts))
        new_rows = int(reader.is_fresh_row(self._known, spec.row_order).sum())
        self._steps = total_steps(spec.training, spec.shards, new_rows)
        report(f"Loading {spec.base_model_folder}")
        self._objective = objective
        self._strategy = self._build()
        model = self._strategy.model
        self._parameters, self._trained = model.parameter_count, model.trained_count
        lora = self._training.adapters
        if lora and (absent := absent_targets(model, lora)):
            report(
                f"WARNING: the model's layers have no {', '.join(absent)}, which "
                "`checkpoint.lora.targets` names; other matrices alone have adapters"
            )
        saving, device = self._training.checkpointing, device_of(workers.device)
        self._checkpointer = checkpoint.Checkpointer(
            self._strategy,
            spec.checkpoints_url or spec.run_folder,
            spec.content(),
            saving.keep,
            self._strategy.saves_in_background
            and chosen(saving.in_background, device.saves_in_background),
            workers,
            report,
        )
        self._saving = checkpoint.SavingPlan(saving, device)
        self._order = reader.DataOrder.of(spec, self._known)
        self._shards = spec.open_shards(*self._order.splits)
        validation = spec.open_shards("validation")
        read = (self._shards, validation)
        workers.together(lambda: setup.check_tokens(read, spec.shards_folder, workers))
        self._validation = Validation(
            validation, self._training, self._objective, workers, may_be_empty=bool(spec.masked)
        )
        self._audit: TextIO | None = None
        if self._training.logging.audit_rows and workers.is_first_of_part:
            # Steps done once more after a kill are there again, further down.
            self._audit = (self._run_folder / f"rows-{workers.dp_rank}.jsonl").open("a")
        self._step, self._state = self._resume()
        self._bests = checkpoint.BestExports(self._run_folder / BEST_NAME, self._state.best_step)
        self._steps_to_read = self._open_reader()
        self._telemetry: Telemetry | None = None
        if workers.is_rank_zero:
            self._telemetry = Telemetry(spec, self._step + 1, self._steps, report)

    def finish(self) -> TrainingResult:
        """Train to the last step, or until it diverges; export the model, write `result.json`."""
        if 0 not in self._state.validation:
            self._validate()
        self._counted_to = time.perf_counter()
        self._train()
        return self._complete()

    def _build(self) -> Strategy:
        return setup.build_strategy(self._spec, self._objective, self._workers, self._precision)

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

    def _end_step(self) -> None:
        """Validate and save where it is time to; raises Interrupted where a signal has come."""
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
            raise Interrupted(f"step {self._step} of {self._steps}")

    @property
    def memory_described(self) -> str:
        """What is reckoned to take a GPU's memory, in words."""
        model, rows = self._strategy.model, self._training.placement.device_batch_size
        tokens = rows * self._spec.shards.sequence_length
        reckon, keeps = setup.memory_of(self._spec, model), not model.recomputes
        sizes = reckon(tokens, self._workers.count, keeps)
        return f"What it should take: {setup.described(sizes)}."

    def close(self) -> None:
        """Flush the metrics."""
        if self._telemetry:
            self._telemetry.close()

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

    def _train_next_step(self) -> None:
        began = time.perf_counter()
        step_input = self._begin_step()
        waited = time.perf_counter() - began
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
        step_input = next(self._steps_to_read)
        self._step += 1
        if self._audit:
            rows, parts = step_input.rows.tolist(), self._workers.dp_size
            line = {"step": self._step, "workers": parts, "rows": rows}
            self._audit.write(json.dumps(line) + "\n")
            self._audit.flush()
        return step_input

    def _record(self, outcome: StepOutcome, learning_rate: float, waited: float) -> None:
        """Enter a finished step into the state, and record it.

        Its seconds include what followed the step before (writing it down, validating, saving), so
        that all of the time belongs to some step.
        """
        now = time.perf_counter()
        seconds, self._counted_to = now - self._counted_to, now
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

    def _utilization(self, outcome: StepOutcome, seconds: float) -> dict[str, float]:
        """Model FLOP/s as a share of the hardware's peak, where that is known."""
        peak = device_of(self._workers.device).peak_flops()
        if peak is None:
            return {}
        width, counts = self._strategy.model.attention_width, (outcome.tokens, outcome.pairs)
        flops = training_flops(self._parameters, self._trained, width, *counts)
        available = seconds * self._workers.count * self._workers.chips * peak
        return {f"mfu_{name}": count / available for name, count in flops.items()}

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
            self._telemetry.publish()
        with self._saving.saving():
            self._checkpointer.save(
                self._step,
                self._state.model_dump(mode="json"),
                self._saving.is_permanent(self._step),
            )
        self._bests.saved(self._state.best_step)

    def _complete(self) -> TrainingResult:
        self._checkpointer.wait()
        folder = Path(self._spec.export_folder)
        self._report(f"Writing the trained model to {folder}")
        exports_best = self._training.export.weights == "best" and self._state.best_step > 0
        exported = self._state.best_step if exports_best else self._step
        is_first = self._workers.is_rank_zero
        best = self._bests.folder(exported)
        if exported == self._step:
            self._export(folder)
        elif not self._workers.share(checkpoint.is_whole(best)):
            raise UserError(
                f"The weights of step {exported}, whose validation was the best, are not whole in "
                f"{best}. Bring that folder back from a backup, or remove {self._run_folder} and "
                "run the same again, which trains from the first step."
            )
        elif is_first:
            checkpoint.copy_model(best, folder)
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
        checkpoint.export_model(
            self._strategy,
            Path(self._spec.base_model_folder),
            folder,
            getattr(torch, self._training.export.dtype),
            self._workers,
            self._training.adapters,
        )


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
    if finished and checkpoint.is_whole(Path(spec.export_folder)):
        report(f"The run {spec.run_id} is complete already: {finished.steps} steps.")
        return finished
    objective: Objective = spec.training.objective()
    kind: type[Trainer] = resolve_name(objective.trainer)
    trainer = kind(spec, objective, workers, interruption, report)
    try:
        return trainer.finish()
    except torch.OutOfMemoryError as error:
        error.add_note(trainer.memory_described)
        raise
    finally:
        trainer.close()
