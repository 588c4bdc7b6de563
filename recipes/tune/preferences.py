"""torchtune's recipes of DPO: their batches, and their loss on validation examples."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from recipes.data.preference_rows import PreferenceBatch
from recipes.tune.network import TuneModel


class PreferenceModel(TuneModel):
    """A model as a recipe of DPO trains it: its forward is the recipe's loss."""

    def __init__(self, recipe: Any, base_model: Path, arguments: dict[str, Any]) -> None:
        super().__init__(recipe._model, base_model, arguments)
        self._recipe = recipe

    def forward(self, batch: PreferenceBatch) -> torch.Tensor:  # type: ignore[override]
        """The loss, summed over examples; ln 2 each, as long as nothing has been learnt."""
        from torchtune.modules.peft import disable_adapter

        recipe, inputs = self._recipe, preference_inputs(batch)
        # Without its adapters, a model with adapters is the reference model.
        reference = getattr(recipe, "_ref_model", None)
        with torch.autocast(batch.tokens.device.type, enabled=False):
            chosen, rejected, *_ = recipe.concatenated_forward(self.network, inputs)
            with torch.no_grad(), nullcontext() if reference else disable_adapter(self.network):
                before = recipe.concatenated_forward(reference or self.network, inputs)[:2]
            losses = recipe._loss_fn(chosen, rejected, *before)[0]
        return (losses * batch.is_example).sum()


def preference_inputs(batch: PreferenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as those recipes take it: tokens, and labels at their own places."""
    return batch.tokens, batch.targets
