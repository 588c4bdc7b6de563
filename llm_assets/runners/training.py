"""Where the PyTorch programs run: training and evaluation."""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, ConfigurableResource

from artifacts.store import layout
from artifacts.store.store import Draft, Store
from llm_assets.runners.child_process import run_child
from recipes.data.records import SEEN_NAME, TRAINED_NAME
from recipes.evaluation.spec import EvaluationSpec
from recipes.settings import PlacementSettings, Precision, RecipeSettings
from recipes.spec import METRICS_NAME, SPEC_NAME, TrainingResult, TrainingSpec, command, read_result

Train = Callable[[TrainingSpec], TrainingResult]


class TrainingRunner(ConfigurableResource, ABC):
    """Runs the programs of `recipes` somewhere."""

    @abstractmethod
    def train(self, context: AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        """Train to the end, continuing an interrupted run of the same specification."""

    @abstractmethod
    def evaluate(self, context: AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
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

        It decides the weights, so the checkpoint's fingerprint has to hold it.
        """
        settings = self.place(settings)
        if settings.precision != "auto":
            return settings
        strategy = settings.placement.strategy
        precision = (strategy and strategy.precision) or self.precision()
        return settings.model_copy(update={"precision": precision})

    @abstractmethod
    def check_hardware(self, placement: PlacementSettings) -> None:
        """Raise UserError where training cannot run as it is placed here."""

    @abstractmethod
    def precision(self) -> Precision:
        """What `checkpoint.precision: auto` means on the processor or GPU where training runs."""

    def world_size(self, placement: PlacementSettings) -> int:
        """The number of training processes; raises UserError where another is asked for."""
        return placement.world_size

    def estimate(self, tokens: int, parameters: int) -> str | None:
        """Time and price of training on so many tokens, in words; None where there is no bill."""
        return None


class LocalTrainingRunner(TrainingRunner):
    """Runs them in child processes on this machine."""

    restarts: int = 3
    """How often a training is started again that was interrupted, or whose worker has died."""

    def check_hardware(self, placement: PlacementSettings) -> None:
        placement.python()

    def precision(self) -> Precision:
        from recipes.device import device_of, local_device

        return device_of(local_device()).precision()

    def train(self, context: AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        run_folder = Path(spec.run_folder)
        spec_path = run_folder / SPEC_NAME
        spec.write(spec_path)
        placement = spec.training.placement
        program = command(spec_path, placement.world_size, placement.python())
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


def train_into(store: Store, draft: Draft, spec: TrainingSpec, train: Train) -> None:
    """Train, and keep beside the exported model its figures and the records of its text.

    The specification stays in the run's folder, for the day on which the run is made once more
    without some texts (`llm_assets.forgetting.replay`).

    Args:
        spec: exports into the draft.
    """
    folder = layout.run(spec.run_id)
    store.write_bytes(f"{folder}/{SPEC_NAME}", spec.model_dump_json(indent=2).encode())
    draft.stats |= train(spec).model_dump()
    for name in (METRICS_NAME, SEEN_NAME, TRAINED_NAME):
        (draft.path / name).write_bytes(store.read_bytes(f"{folder}/{name}") or b"")
