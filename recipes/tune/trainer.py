"""A training run whose steps are torchtune's own."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from recipes.data.batch import Batch, ExampleBatch
from recipes.data.preference_rows import PreferenceBatch
from recipes.data.reader import StepInput
from recipes.distributed.fully_sharded import FullySharded
from recipes.distributed.strategy import Strategy
from recipes.model.family import check_family
from recipes.settings.torchtune import TorchtuneSettings
from recipes.training.input_checks import check_vocabulary
from recipes.training.step import StepOutcome
from recipes.training.trainer import Trainer
from recipes.tune.network import PreferenceModel, TuneModel, model_inputs, preference_inputs
from recipes.tune.program import Batches, Inputs, open_recipe, runnable


class TuneTrainer(Trainer):
    """The order of the data, validation, checkpoints, telemetry and export are the trainer's."""

    _gradient_norm = 0.0

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
            Path(settings.teacher) if settings.teacher else None,
        )
        batches = Batches(
            self._steps * settings.config["gradient_accumulation_steps"], self._batches
        )
        self._recipe = open_recipe(settings.run, config, batches, self._workers)
        self._first_rates = [group["lr"] for group in self._recipe._optimizer.param_groups]
        model = self._model(base_model, dict(config.model))
        check_vocabulary(self._spec, config.model.vocab_size)
        # Of a strategy it takes all but the steps.
        optimizers, clip = [self._recipe._optimizer], self._training.optimizer.gradient_clip
        return FullySharded(model, optimizers, clip, self._precision, self._workers.device)

    def _model(self, base_model: Path, arguments: dict[str, Any]) -> TuneModel:
        assert isinstance(self._training, TorchtuneSettings)
        model = TuneModel(self._recipe._model, base_model, arguments)
        if self._training.is_preference:
            model = PreferenceModel(self._recipe, base_model, arguments)
        if self._training.is_preference or self._training.is_distillation:
            self._recipe._optimizer.register_step_pre_hook(self._measure_gradient)
        if template := self._spec.shards.chat_template:
            model.exported_files["chat_template.jinja"] = template
        return model

    def _measure_gradient(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the norm of a step's gradient, of which not every recipe says something."""
        found = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm(gradient for gradient in found if gradient is not None)
        self._gradient_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

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

    def _batches(self) -> Iterator[Inputs]:
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
                yield _as_taken(batch)
            outcome = self._outcome(step_input, time.perf_counter() - began - waited)
            self._record(outcome, rate, time.perf_counter() - began, waited)
            self._end_step()

    def _outcome(self, step_input: StepInput, seconds: float) -> StepOutcome:
        assert isinstance(self._training, TorchtuneSettings)
        said, batches = {"loss": 0.0, "grad_norm": 0.0}, step_input.batches
        if self._workers.is_rank_zero:
            said = {"grad_norm": self._gradient_norm} | self._recipe._metric_logger.last
            if self._training.run == "lora_dpo_distributed":
                # It tells the sum over the workers of their means.
                said["loss"] /= self._workers.count
        loss, norm, tokens, targets = self._workers.sum(
            said["loss"],
            said["grad_norm"],
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


def _as_taken(batch: Batch | ExampleBatch) -> Inputs:
    """A batch in the form in which torchtune's recipes take it."""
    if isinstance(batch, PreferenceBatch):
        return preference_inputs(batch)
    assert isinstance(batch, Batch)
    return model_inputs(batch)
