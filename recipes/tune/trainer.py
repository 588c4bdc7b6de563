"""A training run whose steps are torchtune's own."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recipes.data.batch import Batch
from recipes.data.reader import StepInput
from recipes.distributed.fully_sharded import FullySharded
from recipes.distributed.strategy import Strategy
from recipes.model.family import check_family
from recipes.torchtune_settings import TorchtuneSettings
from recipes.training.input_checks import check_vocabulary
from recipes.training.step import StepOutcome
from recipes.training.trainer import Trainer
from recipes.tune.network import TuneModel, model_inputs
from recipes.tune.program import Batches, open_recipe, runnable


class TuneTrainer(Trainer):
    """The order of the data, validation, checkpoints, telemetry and export are the trainer's."""

    def _build(self) -> Strategy:
        settings, base_model = self._training, Path(self._spec.base_model_folder)
        assert isinstance(settings, TorchtuneSettings)
        check_family(base_model, "causal")
        config = runnable(
            settings.config,
            base_model,
            self._run_folder,
            self._workers.device,
            settings.seed,
            self._report,
        )
        batches = Batches(
            self._steps * settings.config["gradient_accumulation_steps"], self._batches
        )
        self._recipe = open_recipe(settings.run, config, batches, self._workers)
        self._first_rates = [group["lr"] for group in self._recipe._optimizer.param_groups]
        model = TuneModel(self._recipe._model, base_model, dict(config.model))
        check_vocabulary(self._spec, config.model.vocab_size)
        # Of a strategy it takes all but the steps.
        optimizers, clip = [self._recipe._optimizer], self._training.optimizer.gradient_clip
        return FullySharded(model, optimizers, clip, self._precision, self._workers.device)

    def _train(self) -> None:
        self._recipe.global_step = self._step
        self._advance_schedule()
        if self._step < self._steps:
            self._recipe.train()

    def _advance_schedule(self) -> None:
        """Bring the learning rates to the step that the run goes on from, by the schedule itself.

        Those in a checkpoint may be of an earlier step, and not every schedule can be asked for the
        rate of a step.
        """
        groups, schedule = self._recipe._optimizer.param_groups, self._recipe._lr_scheduler
        for group, rate in zip(groups, self._first_rates, strict=True):
            group["lr"] = rate
        if schedule is not None:
            for _ in range(self._step):
                schedule.step()

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Every batch that is left; between two steps the run is validated and saved."""
        while self._step < self._steps and not self._state.diverged:
            began = time.perf_counter()
            step_input = self._begin_step()
            waited = time.perf_counter() - began
            self._checkpointer.wait_until_copied()
            # Dropout, where there is any, is another in every step and on every worker.
            torch.manual_seed(hash((self._training.seed, self._step, self._workers.rank)))
            rate = self._recipe._optimizer.param_groups[0]["lr"]
            for batch in step_input.batches:
                assert isinstance(batch, Batch)
                yield model_inputs(batch)
            outcome = self._outcome(step_input, time.perf_counter() - began - waited)
            self._record(outcome, rate, time.perf_counter() - began, waited)
            self._end_step()

    def _outcome(self, step_input: StepInput, seconds: float) -> StepOutcome:
        said = self._recipe._metric_logger.last if self._workers.is_rank_zero else {}
        batches = step_input.batches
        loss, norm, tokens, targets = self._workers.sum(
            said.get("loss", 0.0),
            said.get("grad_norm", 0.0),
            sum(batch.token_count for batch in batches),
            sum(batch.target_count for batch in batches),
        )
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._state.diverged = (
                f"Training stopped at step {self._step}: loss {loss}, gradient norm {norm}. Every "
                "checkpoint that was saved can be loaded. Lower `optimizer.lr` by "
                "`checkpoint.overrides`."
            )
        return StepOutcome(loss, norm, int(tokens), int(targets), seconds, skipped=False)
