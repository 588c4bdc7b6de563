"""One interface to every causal model: rows in, summed loss out, Hugging Face weights both ways."""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from artifacts.errors import UserError
from artifacts.model import (
    GENERATION_NAME,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    end_of_turn,
    end_tokens_of,
    read_config,
    read_generation_config,
    read_model,
    read_tokenizer,
)
from artifacts.shards.format import ShardStats
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch
from recipes.model.decoder import (
    DECODER_MODEL_TYPES,
    SUPPORTED_ROPE_TYPES,
    Decoder,
    DecoderShape,
    allowed_positions,
    document_blocks,
    summed_cross_entropy,
)

# Below: any causal model of transformers that trains on packed rows exactly as by itself.
FLEX = "flex_attention"
"""transformers' name of the attention that skips pairs of positions of different documents."""


class TransformersNetwork(nn.Module):
    """A causal model behind the interface of the decoder.

    The loss comes from the model's own logits, with whatever it does to them (scaling,
    soft-capping, biases, layers of the head). Where `recipes.model.probe` has proved that the head
    is a plain matrix, the loss is made from hidden states without holding all logits.
    """

    reads_packed_rows = True
    """Whether texts may share a row; each needs a row of its own otherwise."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner
        self.has_plain_head = False
        self._router_logits: tuple[torch.Tensor, ...] = ()
        if self.has_router_loss:
            self._record_router_logits()

    @property
    def layers(self) -> nn.ModuleList:
        """The repeated blocks."""
        return repeated_blocks(self.inner)

    @property
    def head_weight(self) -> torch.Tensor:
        """The output matrix, shape (vocabulary, hidden size)."""
        return self.inner.get_output_embeddings().weight

    @property
    def has_router_loss(self) -> bool:
        """True where the config asks for the load-balancing loss of a mixture of experts."""
        return bool(getattr(self.inner.config, "output_router_logits", False))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of shape (rows, sequence_length, hidden_size) after the last norm."""
        arguments = self._arguments(self.inner.base_model, tokens, positions, segments)
        return self.inner.base_model(**arguments).last_hidden_state

    def logits(self, batch: Batch) -> torch.Tensor:
        """The model's own logits, shape (rows, sequence_length, vocabulary)."""
        arguments = self._arguments(self.inner, batch.tokens, batch.positions, batch.segments)
        if self.has_router_loss:
            # With the mask of packed rows its own router loss would fail; `router_loss` is ours.
            arguments["output_router_logits"] = False
        return self.inner(**arguments).logits

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy of the model's own logits in nats, summed over the batch's targets."""
        return summed_loss(self.logits(batch), batch.targets)

    def router_loss(self, batch: Batch) -> torch.Tensor:
        """The load-balancing loss of the last forward pass, by the model's own function.

        Hugging Face adds it to the mean loss of each document, so in a sum it counts once per
        target.
        """
        inner, routed = self.inner, self._router_logits
        balance = vars(sys.modules[type(inner).__module__])["load_balancing_loss_func"]
        width = batch.segments.shape[1]
        # Segments are numbered within their row; over all rows each needs a number of its own.
        rows = torch.arange(len(batch.segments), device=batch.segments.device)[:, None]
        documents = (rows * width + batch.segments).masked_fill(
            batch.segments == PADDING_SEGMENT, -1
        )
        documents, has_target = documents.flatten(), (batch.targets != IGNORED).flatten()
        total = routed[0].new_zeros((), dtype=torch.float32)
        for document in documents.unique():
            if document >= 0:
                in_document = documents == document
                part = tuple(logits.view(len(in_document), -1)[in_document] for logits in routed)
                loss = balance(part, inner.num_experts, inner.num_experts_per_tok)
                total = total + loss * has_target[in_document].sum()
        return total * inner.router_aux_loss_coef

    def set_attention(self, kind: str) -> bool:
        """Switch to another of transformers' attention implementations; False where the model lacks
        it."""
        try:
            self.inner.set_attn_implementation(kind)
        except ValueError:
            return False
        return bool(self.inner.config._attn_implementation == kind)

    def enable_activation_checkpointing(self) -> None:
        """Keep only each layer's input for the backward pass."""
        if not self.inner.supports_gradient_checkpointing:
            raise UserError(
                "`checkpoint.placement.activation_checkpointing` has to be false: transformers "
                f"does not support it for {type(self.inner).__name__}."
            )
        self.inner.gradient_checkpointing_enable({"use_reentrant": False})

    def _arguments(
        self,
        module: nn.Module,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor,
    ) -> dict[str, Any]:
        kind, mask = self.inner.config._attn_implementation, None
        if kind == FLEX:
            mask = document_blocks(segments)
        elif kind == "sdpa":
            mask = allowed_positions(segments)
        else:
            allowed = allowed_positions(segments)
            # Plain attention adds the mask to its scores.
            lowest = torch.finfo(torch.float32).min
            mask = torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, lowest)
        arguments = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": mask,
            "use_cache": False,
        }
        # Models that count distances in place of positions, such as BLOOM, take none.
        parameters = inspect.signature(module.forward).parameters
        return {name: value for name, value in arguments.items() if name in parameters}

    def _record_router_logits(self) -> None:
        def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"output_router_logits": True}

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._router_logits = tuple(output.router_logits)

        self.inner.base_model.register_forward_pre_hook(ask, with_kwargs=True)
        self.inner.base_model.register_forward_hook(keep)


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats, summed over all positions that have a target.

    Logits are of shape (rows, positions, vocabulary), targets of (rows, positions).
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def repeated_blocks(part: nn.Module) -> nn.ModuleList:
    """The module list that holds the most parameters."""
    # Experts are lists within a layer: the list around them holds their parameters, too.
    lists = [m for m in part.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


class ExampleNetwork(TransformersNetwork):
    """A model whose output need not be a matrix of the vocabulary's size."""

    @property
    def head_weight(self) -> torch.Tensor:
        """The embeddings, shape (vocabulary, hidden size)."""
        return self.inner.get_input_embeddings().weight


def read_inner(folder: Path, kind: Any, config: Any = None, **arguments: Any) -> Any:
    """A model of one of transformers' classes in float32, nothing about it random; raises UserError
    where the folder cannot be read."""
    config = config or config_without_dropout(folder)
    inner = read_model(folder, kind, config=config, dtype=torch.float32, **arguments)
    # Weights are exported in the family's form, however they were stored, such as in four bits.
    inner._weight_conversions = None
    return _without_dropout(inner)


def config_without_dropout(folder: Path) -> Any:
    """The folder's config with every dropout at zero.

    Dropout would make a step depend on more than its samples; pre-training goes without.
    """
    from transformers import AutoConfig, PretrainedConfig

    config = AutoConfig.from_pretrained(folder)
    parts = [config, *(v for v in vars(config).values() if isinstance(v, PretrainedConfig))]
    for part in parts:
        for name, value in list(vars(part).items()):
            # Families call it `attention_dropout`, `attn_pdrop`, `hidden_dropout_prob` and so on.
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _without_dropout(inner: Any) -> Any:
    """The model rid of dropout, whose figure some models write into their code."""
    for module in inner.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return inner


class TrainableModel(nn.Module):
    """The model as the trainer sees it: its forward is the loss."""

    def __init__(self, network: Decoder | TransformersNetwork) -> None:
        super().__init__()
        self.network = network
        self.loss: Callable[[Any, Any, Any], torch.Tensor] = summed_cross_entropy
        self.exported_config: dict[str, Any] = {}
        """What the exported config says otherwise than the base model's."""
        self.exported_files: dict[str, str | None] = {}
        """Files of the exported folder that the base model has not, or has otherwise; None of those
        that only the base model has."""
        self.recomputes = False
        """Whether the backward pass computes activations again."""
        self.unread: Path | None = None
        """The folder whose weights are to be read into parameters that have no memory yet."""

    def export_form_of(self, shards: ShardStats, base_model: Path) -> None:
        """Export how rows were written: their chat template, and the token that ends a document.

        A chat model's own EOS ends a turn. Continued on documents, it ends those with their
        separator, and whoever serves it has to stop there, too. A base model's own EOS ends a
        document, and the chat template may end a turn with another token.
        """
        if shards.chat_template is not None:
            # Empty where rows were written plainly: then the base model's own template is left out.
            self.exported_files[TEMPLATE_NAME] = shards.chat_template or None
            # Older folders have it there, and it would count where there is no file.
            path = base_model / TOKENIZER_CONFIG_NAME
            tokenizer_config = json.loads(path.read_text()) if path.is_file() else {}
            if tokenizer_config.pop("chat_template", None) is not None:
                self.exported_files[TOKENIZER_CONFIG_NAME] = json.dumps(tokenizer_config, indent=2)
        ends = end_tokens_of(read_config(base_model))
        end_tokens = [shards.end_token_id]
        if shards.form in ("conversations", "preferences"):
            end_tokens += end_of_turn(read_tokenizer(base_model), shards.chat_template)
        if not {*end_tokens} <= {*ends}:
            generation = read_generation_config(base_model)
            generation["eos_token_id"] = list(dict.fromkeys([*ends, *end_tokens]))
            self.exported_files[GENERATION_NAME] = json.dumps(generation, indent=2)

    @property
    def is_exported_by_name(self) -> bool:
        """Whether `to_hugging_face` takes each weight by itself; else it needs all at once."""
        if isinstance(self.network, Decoder):
            return True
        from transformers.conversion_mapping import get_model_conversion_mapping

        # Weights that transformers splits when it reads them can be joined again only all together.
        conversions = get_model_conversion_mapping(self.network.inner, add_legacy=False)
        return all(len(conversion.target_patterns) == 1 for conversion in conversions)

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters, those that other workers hold included."""
        return sum(map(_size, self.parameters()))

    @property
    def trained_count(self) -> int:
        """Those of them that are not frozen."""
        return sum(_size(p) for p in self.parameters() if p.requires_grad)

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
        if network.has_plain_head:
            hidden = network(batch.tokens, batch.positions, batch.segments)
            loss = self.loss(hidden, network.head_weight, batch.targets)
        else:
            loss = network.loss(batch)
        # What is measured is the text's likelihood alone.
        if self.training and network.has_router_loss:
            loss = loss + network.router_loss(batch)
        return loss

    def to_hugging_face(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole weights under this model's names, in the form of the family's checkpoints.

        Of matrices that are one, such as tied embeddings, one is kept.
        """
        network = self.network
        if isinstance(network, TransformersNetwork):
            from transformers.core_model_loading import revert_weight_conversion

            parameters = dict(network.inner.named_parameters(remove_duplicate=False))
            tied = parameters.keys() - dict(network.inner.named_parameters()).keys()
            unique = {name: tensor for name, tensor in weights.items() if name not in tied}
            return revert_weight_conversion(network.inner, unique)
        if network.shape.tied_embeddings:
            return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
        return weights

    def read_weights(self, device: torch.device) -> None:
        """Read the weights of a model that was loaded without them, each worker its part alone."""
        if self.unread is None:
            return
        # Adapters and such have their memory already.
        self._apply(lambda part: torch.empty_like(part, device=device) if part.is_meta else part)
        tensors = {self.hugging_face_name(name): value for name, value in self.state_dict().items()}
        reader = HuggingFaceStorageReader(str(self.unread))
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        self.unread = None

    def hugging_face_name(self, name: str) -> str:
        """The key in a Hugging Face checkpoint of a key of this model's state dict."""
        return name.removeprefix("network.").removeprefix("inner.")


def _size(parameter: torch.Tensor) -> int:
    # ZeRO-3 leaves parameters empty and keeps their sizes beside them.
    return getattr(parameter, "ds_numel", parameter.numel())


def create_model(folder: Path, seed: int) -> TrainableModel:
    """A model of a Hugging Face folder's architecture with random float32 weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # On every worker alike: each draws all weights, and keeps its own part of them.
    torch.manual_seed(seed)
    if _is_decoder(config):
        decoder = Decoder(DecoderShape.from_config(config))
        decoder.initialize()
        return TrainableModel(decoder)
    config = config_without_dropout(folder)
    inner = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return TrainableModel(TransformersNetwork(_without_dropout(inner)))


def load_model(folder: Path, reads: bool = True) -> TrainableModel:
    """Read a Hugging Face folder into float32 weights; `check_trainable` says if they can be used.

    The weights of a decoder may be left to `TrainableModel.read_weights`, which reads a part where
    the model has been divided meanwhile. Raises UserError where weights and config do not belong
    together.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not _is_decoder(config):
        return TrainableModel(TransformersNetwork(read_inner(folder, AutoModelForCausalLM)))
    # No memory yet: if the model is divided first, each worker reads only its part.
    with torch.device("meta"):
        model = TrainableModel(Decoder(DecoderShape.from_config(config)))
    _check_weights(model.network, folder)
    model.unread = folder
    if reads:
        model.read_weights(torch.device("cpu"))
    return model


def _is_decoder(config: Any) -> bool:
    return (
        config.model_type in DECODER_MODEL_TYPES
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type", "default") in SUPPORTED_ROPE_TYPES
        and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
    )


def _check_weights(decoder: Decoder, folder: Path) -> None:
    """Compare names and shapes of the weights in a folder with what its config.json says."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    stored = {
        name: weight.size
        for name, weight in metadata.items()
        # Computed from the config; what was written by old programs, as Llama 2 was, has it, too.
        if not name.endswith(".rotary_emb.inv_freq")
    }
    if decoder.shape.tied_embeddings and stored.pop("lm_head.weight", None) is not None:
        _check_tied(folder)
    expected = {name: weight.shape for name, weight in decoder.state_dict().items()}
    wrong = [name for name in {**stored, **expected} if stored.get(name) != expected.get(name)]
    if wrong:
        raise UserError(
            f"{folder}: the weights do not fit config.json: {len(wrong)} parameters are absent, "
            f"left over or of another shape, for example {sorted(wrong)[0]}."
        )


def _check_tied(folder: Path) -> None:
    """Compare an output matrix that is stored beside the embeddings, though config.json says that
    they are one; transformers takes two that differ for two, and other engines do not."""
    pair = {name: torch.empty(0) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            pair |= {name: weights.get_tensor(name) for name in pair.keys() & weights.keys()}
    if not torch.equal(*(matrix.float() for matrix in pair.values())):
        raise UserError(
            f"{folder}: config.json says `tie_word_embeddings: true`, but {' and '.join(pair)} are "
            "both stored, and differ. Set `tie_word_embeddings` to false there."
        )
