"""Where the PyTorch programs run: training and evaluation."""

import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, ConfigurableResource

from llm_assets.runners.child_process import run_child
from recipes.evaluation.spec import EvaluationSpec
from recipes.settings.recipe import RecipeSettings
from recipes.settings.sections import DeviceChoice, Precision
from recipes.spec import SPEC_NAME, TrainingResult, TrainingSpec, command, python_of, read_result


class TrainingRunner(ConfigurableResource, ABC):
    """Runs the programs of `recipes` somewhere."""

    @abstractmethod
    def train(self, context: AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        """Train to the end, continuing an interrupted run of the same specification."""

    @abstractmethod
    def evaluate(self, context: AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        """Measure the models and return the evaluation's `result.json`."""

    def resolve(self, settings: RecipeSettings) -> RecipeSettings:
        """The settings with `precision: auto` replaced by what it means where training runs.

        It decides the weights, so the checkpoint's fingerprint has to hold it.
        """
        self.check_device(settings.placement.device)
        if settings.precision != "auto":
            return settings
        return settings.model_copy(update={"precision": self.precision(settings.placement.device)})

    @abstractmethod
    def check_device(self, device: DeviceChoice) -> None:
        """Raise UserError where training cannot run on a device here."""

    @abstractmethod
    def precision(self, device: DeviceChoice) -> Precision:
        """What `checkpoint.precision: auto` means where training runs."""

    def estimate(self, tokens: int, parameters: int) -> str | None:
        """Time and price of training on so many tokens, in words; None where there is no bill."""
        return None


class LocalTrainingRunner(TrainingRunner):
    """Runs them in child processes on this machine."""

    restarts: int = 3
    """How often an interrupted training (exit code 75) is started again."""

    def check_device(self, device: DeviceChoice) -> None:
        python_of(device)

    def precision(self, device: DeviceChoice) -> Precision:
        import torch

        from recipes.device import device_of, local_device

        place = torch.device("xla") if device == "tpu" else local_device()
        return device_of(place).precision()

    def train(self, context: AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        run_folder = Path(spec.run_folder)
        spec_path = run_folder / SPEC_NAME
        spec.write(spec_path)
        placement = spec.training.placement
        program = command(spec_path, placement.workers, placement.device)
        run_child(context, program, run_folder / "program.log", self.restarts)
        result = read_result(run_folder)
        assert result is not None, "a training that ended well leaves its result"
        return result

    def evaluate(self, context: AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        output = Path(spec.output)
        output.mkdir(parents=True, exist_ok=True)
        spec_path = output / "spec.json"
        spec_path.write_text(spec.model_dump_json(indent=2))
        program = [sys.executable, "-m", "recipes.evaluate", "--spec", str(spec_path)]
        run_child(context, program, output / "program.log")
        result: dict[str, Any] = json.loads((output / "result.json").read_text())
        return result
