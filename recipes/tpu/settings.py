"""The settings of TPUs; importing them loads neither torch nor torch_xla."""

import os
import sys
from pathlib import Path
from typing import Literal

from artifacts.errors import UserError
from recipes.settings import StrategySettings, TrainingSettings

TPU_ENVIRONMENT = "LLM_ASSETS_TPU_ENVIRONMENT"
"""Names the folder of the environment that has torch_xla, where it is not `.venv-tpu` beside that
which runs."""


class TpuSettings(StrategySettings):
    """Train on all TPU chips of one machine, locally in the environment that `make setup-tpu`
    creates, on Google Cloud in the image `images.tpu`. One process drives all chips."""

    asked_by = "placement.device: tpu"
    builds = "recipes.tpu.strategy:build"
    joins = "recipes.tpu.device:join"
    precision = "bfloat16"
    # Those of the other environment, which are not looked up: docs/architecture.md says so.
    libraries = frozenset()
    name: Literal["tpu"]

    def python(self) -> str:
        environment = os.environ.get(TPU_ENVIRONMENT) or Path(sys.prefix).with_name(".venv-tpu")
        python = Path(environment) / "bin" / "python"
        if not python.exists():
            raise UserError(
                f"`checkpoint.placement.device` is tpu, but there is no {python}. Create its "
                f"environment with `make setup-tpu`, or set {TPU_ENVIRONMENT} to the folder of "
                "another one."
            )
        return str(python)

    def faults(self, training: TrainingSettings) -> list[str]:
        """What does not go with a TPU, whose chips one process drives by a program of XLA's."""
        placement = training.placement
        more = {
            "placement.workers": placement.world_size > 1,
            "placement.activation_checkpointing": placement.activation_checkpointing is True,
        }
        return training.faults_beside(self.asked_by, more)
