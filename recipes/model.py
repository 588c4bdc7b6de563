"""One interface to every causal model: rows in, summed loss out, Hugging Face weights both ways."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from artifacts.errors import UserError
from recipes.attention import allowed_positions
from recipes.batch import Batch
from recipes.decoder import DECODER_MODEL_TYPES, Decoder, DecoderShape
from recipes.fused_weights import fuse, split_fused
from recipes.hardware import flops_per_token
from recipes.loss import summed_cross_entropy
from recipes.rotary import SUPPORTED_ROPE_TYPES


class TransformersNetwork(nn.Module):
    """Any causal model of transformers, seen as hidden states and an output matrix."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def layers(self) -> nn.ModuleList:
        """The repeated blocks: the longest module list."""
        lists = [m for m in self.inner.modules() if isinstance(m, nn.ModuleList)]
        return max(lists, key=len)

    @property
    def head_weight(self) -> torch.Tensor:
        """The output matrix, shape (vocabulary, hidden size)."""
        return self.inner.get_output_embeddings().weight

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of shape (rows, sequence_length, hidden_size) after the last norm."""
        hidden: torch.Tensor = self.inner.base_model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=allowed_positions(segments),
            use_cache=False,
        ).last_hidden_state
        return hidden


class TrainableModel(nn.Module):
    """The model as the trainer sees it: its forward is the loss."""

    def __init__(self, network: Decoder | TransformersNetwork) -> None:
        super().__init__()
        self.network = network
        self.loss: Callable[[Any, Any, Any], torch.Tensor] = summed_cross_entropy

    def flops_per_token(self, sequence_length: int) -> float:
        """Forward and backward FLOPs a token of a row."""
        parameters = sum(p.numel() for p in self.parameters())
        if isinstance(self.network, Decoder):
            shape = self.network.shape
            layers, heads, head_dim = shape.layers, shape.heads, shape.head_dim
        else:
            config = self.network.inner.config
            layers, heads = config.num_hidden_layers, config.num_attention_heads
            head_dim = config.hidden_size // heads
        return flops_per_token(parameters, layers, heads, head_dim, sequence_length)

    def recompute_activations(self) -> None:
        """Keep only each layer's input for the backward pass."""
        if isinstance(self.network, Decoder):
            self.network.recompute = True
        else:
            self.network.inner.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss in nats, summed over the batch's targets."""
        hidden = self.network(batch.tokens, batch.positions, batch.segments)
        return self.loss(hidden, self.network.head_weight, batch.targets)

    @property
    def has_tied_embeddings(self) -> bool:
        """True where input and output share one matrix, which is then exported once."""
        if isinstance(self.network, Decoder):
            return self.network.shape.tied_embeddings
        return bool(self.network.inner.config.tie_word_embeddings)

    def to_hugging_face(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole weights under this decoder's names, in the form of the family's checkpoints."""
        if self.has_tied_embeddings:
            weights = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
        is_fused = isinstance(self.network, Decoder) and self.network.shape.fused_checkpoint
        return fuse(weights) if is_fused else weights

    def hugging_face_names(self) -> dict[str, str]:
        """This model's state-dict key to the key in a Hugging Face checkpoint."""
        prefix = "network.inner." if isinstance(self.network, TransformersNetwork) else "network."
        return {name: name.removeprefix(prefix) for name in self.state_dict()}


def create_model(folder: Path, seed: int) -> TrainableModel:
    """A model of a Hugging Face folder's architecture with random float32 weights."""
    config = _read_config(folder)
    torch.manual_seed(seed)
    if _is_decoder(config):
        decoder = Decoder(DecoderShape.from_config(config))
        decoder.initialise()
        return TrainableModel(decoder)
    from transformers import AutoModelForCausalLM

    inner = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    return TrainableModel(TransformersNetwork(_without_dropout(inner)))


def load_model(folder: Path) -> TrainableModel:
    """Read a Hugging Face folder into float32 weights.

    Raises:
        UserError: the weights and the config do not belong together.
    """
    config = _read_config(folder)
    if _is_decoder(config):
        return TrainableModel(_load_decoder(folder, config))
    return TrainableModel(_load_transformers(folder))


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    raw = json.loads((folder / "config.json").read_text())
    if "auto_map" in raw:
        raise UserError(f"{folder}/config.json asks for remote code, which is never run.")
    return AutoConfig.from_pretrained(folder)


def _is_decoder(config: Any) -> bool:
    return (
        config.model_type in DECODER_MODEL_TYPES
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type", "default") in SUPPORTED_ROPE_TYPES
        and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
    )


def _load_decoder(folder: Path, config: Any) -> Decoder:
    from safetensors.torch import load_file

    with torch.device("meta"):
        decoder = Decoder(DecoderShape.from_config(config))
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= {name: tensor.float() for name, tensor in load_file(path).items()}
    if decoder.shape.tied_embeddings:
        weights.pop("lm_head.weight", None)
    shape = decoder.shape
    if shape.fused_checkpoint:
        head_dim = shape.head_dim
        weights = split_fused(weights, shape.heads * head_dim, shape.key_value_heads * head_dim)
    expected = decoder.state_dict()
    shared = expected.keys() & weights.keys()
    wrong = [name for name in shared if expected[name].shape != weights[name].shape]
    wrong += expected.keys() ^ weights.keys()
    if wrong:
        raise UserError(
            f"{folder}: the weights do not fit config.json: {len(wrong)} parameters are absent, "
            f"left over or of another shape, for example {sorted(wrong)[0]}."
        )
    decoder.load_state_dict(weights, assign=True)
    return decoder.requires_grad_(True)


def _load_transformers(folder: Path) -> TransformersNetwork:
    from transformers import AutoModelForCausalLM

    inner = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    )
    return TransformersNetwork(_without_dropout(inner))


def _without_dropout(inner: nn.Module) -> nn.Module:
    """Dropout would make a step depend on more than its samples; pre-training goes without."""
    for module in inner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.0
    return inner
