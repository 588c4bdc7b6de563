"""One interface to every causal model: rows in, summed loss out, Hugging Face weights both ways."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from artifacts.errors import UserError
from recipes.data.batch import Batch
from recipes.model.decoder.attention import SUPPORTED_ROPE_TYPES
from recipes.model.decoder.loss import summed_cross_entropy
from recipes.model.decoder.network import (
    DECODER_MODEL_TYPES,
    Decoder,
    DecoderShape,
)
from recipes.model.transformers_network import (
    TransformersNetwork,
    create_transformers,
    load_transformers,
)


class TrainableModel(nn.Module):
    """The model as the trainer sees it: its forward is the loss."""

    is_exported_by_name: ClassVar[bool] = True
    """Whether `to_hugging_face` takes each weight by itself; else it needs all at once."""

    def __init__(self, network: Decoder | TransformersNetwork) -> None:
        super().__init__()
        self.network = network
        self.loss: Callable[[Any, Any, Any], torch.Tensor] = summed_cross_entropy
        self.exported_config: dict[str, Any] = {}
        """What the exported config says otherwise than the base model's."""
        self.exported_files: dict[str, str] = {}
        """Files of the exported folder that the base model has not, or has otherwise."""
        self.recomputes = False
        """Whether the backward pass computes activations again."""
        self.unread: Path | None = None
        """The folder whose weights are to be read into parameters that have no memory yet."""

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters, those that other workers hold included."""
        # ZeRO-3 leaves parameters empty and keeps their sizes beside them.
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.parameters())

    @property
    def attention_width(self) -> int:
        """Layers times heads times head size."""
        if isinstance(self.network, Decoder):
            shape = self.network.shape
            return shape.layers * shape.heads * shape.head_dim
        config = self.network.inner.config.get_text_config()
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        return int(
            layers * heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        )

    def enable_activation_checkpointing(self) -> None:
        """Keep only each layer's input for the backward pass."""
        self.recomputes = True
        if isinstance(self.network, Decoder):
            self.network.recompute = True
        else:
            self.network.enable_activation_checkpointing()

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss in nats, summed over the batch's targets."""
        network = self.network
        if isinstance(network, Decoder) or network.has_plain_head:
            hidden = network(batch.tokens, batch.positions, batch.segments)
            loss = self.loss(hidden, network.head_weight, batch.targets)
        else:
            loss = network.loss(batch)
        if isinstance(network, TransformersNetwork) and network.has_router_loss:
            loss = loss + network.router_loss(batch)
        return loss

    def to_hugging_face(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole weights under this model's names, in the form of the family's checkpoints.

        Of matrices that are one, such as tied embeddings, one is kept.
        """
        network = self.network
        if isinstance(network, TransformersNetwork):
            every = dict(network.inner.named_parameters(remove_duplicate=False))
            doubled = every.keys() - dict(network.inner.named_parameters()).keys()
            return {name: tensor for name, tensor in weights.items() if name not in doubled}
        if network.shape.tied_embeddings:
            return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
        return weights

    def read_weights(self, device: torch.device) -> None:
        """Read the weights of a model that was loaded without them, each worker its part alone."""
        if self.unread is None:
            return
        # Adapters and such have their memory already.
        self._apply(lambda held: torch.empty_like(held, device=device) if held.is_meta else held)
        names = self.hugging_face_names()
        tensors = {names[name]: tensor for name, tensor in self.state_dict().items()}
        reader = HuggingFaceStorageReader(str(self.unread))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.distributed")
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        self.unread = None

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
        decoder.initialize()
        return TrainableModel(decoder)
    return TrainableModel(create_transformers(folder))


def load_model(folder: Path, reads: bool = True) -> TrainableModel:
    """Read a Hugging Face folder into float32 weights; `check_trainable` says if they can be used.

    Args:
        reads: otherwise the weights of a decoder are left to `TrainableModel.read_weights`, which
            reads a part where the model has been divided meanwhile.

    Raises:
        UserError: the weights and the config do not belong together.
    """
    config = _read_config(folder)
    if not _is_decoder(config):
        return TrainableModel(load_transformers(folder))
    with torch.device("meta"):
        model = TrainableModel(Decoder(DecoderShape.from_config(config)))
    _check_weights(model.network, folder)
    model.unread = folder
    if reads:
        model.read_weights(torch.device("cpu"))
    return model


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


def _check_weights(decoder: Decoder, folder: Path) -> None:
    """Compare names and shapes of the weights in a folder with what its config.json says."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes = {name: torch.empty(weight.size, device="meta") for name, weight in stored.items()}
    if decoder.shape.tied_embeddings:
        shapes.pop("lm_head.weight", None)
    expected = decoder.state_dict()
    shared = expected.keys() & shapes.keys()
    wrong = [name for name in shared if expected[name].shape != shapes[name].shape]
    wrong += expected.keys() ^ shapes.keys()
    if wrong:
        raise UserError(
            f"{folder}: the weights do not fit config.json: {len(wrong)} parameters are absent, "
            f"left over or of another shape, for example {sorted(wrong)[0]}."
        )
