"""torchtune's model of a Hugging Face folder: its component, its losses, its weights."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from artifacts.errors import UserError
from recipes.data.batch import IGNORED, Batch
from recipes.model.causal_model import TrainableModel
from recipes.torchtune.objective import PreferenceBatch
from recipes.torchtune.settings import MODEL_TYPES, model_package

SCALED_ROPE = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""What torchtune's Llama writes into its code."""


def component(
    model: dict[str, Any], folder: Path, key: str = "model"
) -> tuple[dict[str, Any], str]:
    """The builder and arguments of a folder's model as torchtune builds it, and its model type.

    Its sizes are those of the folder's `config.json`; from the configuration come the adapters.

    Args:
        model: the section of a torchtune configuration that names it, and its key there.

    Raises:
        UserError: torchtune cannot build it so that it computes what transformers computes.
    """
    config = json.loads((folder / "config.json").read_text())
    wanted, found = MODEL_TYPES[model_package(model)], config["model_type"]
    if wanted != found:
        raise UserError(
            f"`checkpoint.config`: `{key}._component_` is {model['_component_']}, but the model in "
            f"{folder} is of the type {found}. Name the component of that model."
        )
    arguments = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
    }
    head_dim = config.get("head_dim") or arguments["embed_dim"] // arguments["num_heads"]
    if head_dim * arguments["num_heads"] != arguments["embed_dim"]:
        raise _unlike(folder, "head_dim", head_dim)
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise _unlike(folder, key, True)
    builder, of_family, model_type = _family(config, folder)
    adapters = {key: value for key, value in model.items() if key != "_component_"}
    name = str(model["_component_"]).rpartition(".")[2]
    if name.startswith("qlora"):
        adapters.setdefault("quantize_base", True)
    is_adapted = "lora" in name
    package, _, plain = builder.rpartition(".")
    built = f"{package}.lora_{plain}" if is_adapted else builder
    return {"_component_": built} | arguments | of_family | adapters, model_type


def _family(config: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any], str]:
    """Builder, its own arguments and the name by which torchtune converts the weights."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = {"rope_base": rope.get("rope_theta") or config.get("rope_theta", 10_000.0)}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    tied = bool(config.get("tie_word_embeddings"))
    if config["model_type"] == "llama":
        if kind == "llama3":
            for key, value in SCALED_ROPE.items():
                if rope.get(key) != value:
                    raise _unlike(folder, key, rope.get(key))
        elif kind != "default":
            raise _unlike(folder, "rope_type", kind)
        base |= {"scale_factor": rope["factor"] if kind == "llama3" else 1}
        name = "llama3_2" if tied else "llama3_1"
        return f"torchtune.models.{name}.{name}", base, "LLAMA3_2" if tied else "LLAMA3"
    if kind != "default":
        raise _unlike(folder, "rope_type", kind)
    if config["model_type"] == "qwen2":
        return "torchtune.models.qwen2.qwen2", base | {"tie_word_embeddings": tied}, "QWEN2"
    if tied:
        raise _unlike(folder, "tie_word_embeddings", True)
    return "torchtune.models.mistral.mistral", base, "MISTRAL"


def _unlike(folder: Path, key: str, value: Any) -> UserError:
    return UserError(
        f"{folder}/config.json says `{key}: {value}`, which torchtune's model of this family does "
        "not compute. Use the recipe continued_pretraining or fine_tuning."
    )


class TuneModel(TrainableModel):
    """A torchtune model as the trainer sees it: its forward is the loss."""

    is_exported_by_name = False

    def __init__(self, network: nn.Module, base_model: Path, arguments: dict[str, Any]) -> None:
        super().__init__(network)
        self._config = json.loads((base_model / "config.json").read_text())
        self._arguments = arguments

    @property
    def attention_width(self) -> int:
        """Layers times heads times head size."""
        return int(self._arguments["num_layers"] * self._arguments["embed_dim"])

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss in nats, summed over the batch's targets, in the precision of the weights."""
        inputs = model_inputs(batch)
        del inputs["labels"]
        with torch.autocast(batch.tokens.device.type, enabled=False):
            logits = self.network(**inputs)
        # A loss that is made in chunks has the model give its logits in chunks.
        whole = torch.cat(logits, dim=1) if isinstance(logits, list) else logits
        return F.cross_entropy(
            whole.flatten(0, 1).float(),
            batch.targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )

    def hugging_face_names(self) -> dict[str, str]:
        """This model's state-dict key to torchtune's own."""
        return {name: name.removeprefix("network.") for name in self.state_dict()}

    def to_hugging_face(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole weights in the form of the family's checkpoints, adapters merged.

        Args:
            weights: by torchtune's names.
        """
        from torchtune.models import convert_weights
        from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
        from torchtune.modules.peft import get_merged_lora_ckpt

        made = self._arguments
        if "lora_rank" in made:
            # It adds in place, and these may be the tensors that are trained.
            copied = {name: tensor.clone() for name, tensor in weights.items()}
            weights = get_merged_lora_ckpt(copied, made["lora_rank"], made["lora_alpha"])
        sizes = {
            "num_heads": made["num_heads"],
            "num_kv_heads": made["num_kv_heads"],
            "dim": made["embed_dim"],
        }
        if self._config["model_type"] == "qwen2":
            tied = made["tie_word_embeddings"]
            return qwen2_tune_to_hf(weights, tie_word_embeddings=tied, **sizes)
        return convert_weights.tune_to_hf(weights, **sizes)


def model_inputs(batch: Batch) -> dict[str, Any]:
    """A batch of packed rows as torchtune's recipes take it, whose documents do not see another.

    `labels` stand at the place of the token that they are, shape (rows, sequence_length): a recipe
    shifts them itself.
    """
    from torchtune.modules.attention_utils import packed_block_causal_mask

    labels = torch.full_like(batch.targets, IGNORED)
    labels[:, 1:] = batch.targets[:, :-1]
    return {
        "tokens": batch.tokens,
        "labels": labels,
        "input_pos": batch.positions.long(),
        # Each stretch of padding is a segment as well.
        "mask": packed_block_causal_mask(
            [torch.unique_consecutive(row, return_counts=True)[1] for row in batch.segments]
        ),
    }


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
