"""Any causal model of transformers that can be trained on packed rows exactly as by itself."""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from artifacts.errors import UserError
from artifacts.model import read_model
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch
from recipes.model.decoder.attention import allowed_positions, document_blocks

FLEX = "flex_attention"
"""transformers' name of the attention that skips pairs of positions of different documents."""


class TransformersNetwork(nn.Module):
    """A causal model behind the interface of the decoder.

    The loss comes from the model's own logits, with whatever it does to them (scaling,
    soft-capping, biases, layers of the head). Where `recipes.model.probe` has proved that the head
    is a plain matrix, the loss is made from hidden states without holding all logits.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner
        self.has_plain_head = False
        self._router_logits: tuple[torch.Tensor, ...] = ()
        if self.has_router_loss:
            self._record_router_logits()

    @property
    def layers(self) -> nn.ModuleList:
        """The repeated blocks: the module list that holds the most parameters."""
        lists = [m for m in self.inner.modules() if isinstance(m, nn.ModuleList)]
        return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))

    @property
    def head_weight(self) -> torch.Tensor:
        """The output matrix, shape (vocabulary, hidden size)."""
        weight: torch.Tensor = self.inner.get_output_embeddings().weight
        return weight

    @property
    def has_router_loss(self) -> bool:
        """True where the config asks for the load-balancing loss of a mixture of experts."""
        return bool(getattr(self.inner.config, "output_router_logits", False))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of shape (rows, sequence_length, hidden_size) after the last norm."""
        arguments = self._arguments(self.inner.base_model, tokens, positions, segments)
        hidden: torch.Tensor = self.inner.base_model(**arguments).last_hidden_state
        return hidden

    def logits(self, batch: Batch) -> torch.Tensor:
        """The model's own logits, shape (rows, sequence_length, vocabulary)."""
        arguments = self._arguments(self.inner, batch.tokens, batch.positions, batch.segments)
        if self.has_router_loss:
            # With the mask of packed rows its own router loss would fail; `router_loss` is ours.
            arguments["output_router_logits"] = False
        logits: torch.Tensor = self.inner(**arguments).logits
        return logits

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy of the model's own logits in nats, summed over the batch's targets."""
        logits = self.logits(batch).flatten(0, 1).float()
        return F.cross_entropy(
            logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def router_loss(self, batch: Batch) -> torch.Tensor:
        """The load-balancing loss of the last forward pass, by the model's own function.

        As Hugging Face adds it to the mean loss of each document, it counts once a target.
        """
        inner, routed = self.inner, self._router_logits
        balance = vars(sys.modules[type(inner).__module__])["load_balancing_loss_func"]
        width = batch.segments.shape[1]
        rows = torch.arange(len(batch.segments), device=batch.segments.device)[:, None]
        documents = (rows * width + batch.segments).masked_fill(
            batch.segments == PADDING_SEGMENT, -1
        )
        documents, counted = documents.flatten(), (batch.targets != IGNORED).flatten()
        total = routed[0].new_zeros((), dtype=torch.float32)
        for document in documents.unique():
            if document >= 0:
                mine = documents == document
                part = tuple(logits.view(len(mine), -1)[mine] for logits in routed)
                loss = balance(part, inner.num_experts, inner.num_experts_per_tok)
                total = total + loss * counted[mine].sum()
        return total * inner.router_aux_loss_coef

    def set_attention(self, kind: str) -> bool:
        """Have another of transformers' attentions; False of a model that has not that one."""
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
        known = inspect.signature(module.forward).parameters
        return {name: value for name, value in arguments.items() if name in known}

    def _record_router_logits(self) -> None:
        def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"output_router_logits": True}

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._router_logits = tuple(output.router_logits)

        self.inner.base_model.register_forward_pre_hook(ask, with_kwargs=True)
        self.inner.base_model.register_forward_hook(keep)


class ExampleNetwork(TransformersNetwork):
    """A model whose output need not be a matrix of the vocabulary's size."""

    @property
    def head_weight(self) -> torch.Tensor:
        """The embeddings, shape (vocabulary, hidden size)."""
        weight: torch.Tensor = self.inner.get_input_embeddings().weight
        return weight


def load_transformers(folder: Path) -> TransformersNetwork:
    """A causal model of a Hugging Face folder, as `read_inner` reads it."""
    from transformers import AutoModelForCausalLM

    return TransformersNetwork(read_inner(folder, AutoModelForCausalLM))


def create_transformers(folder: Path) -> TransformersNetwork:
    """A model of a Hugging Face folder's architecture with random float32 weights."""
    from transformers import AutoModelForCausalLM

    config = config_without_dropout(folder)
    inner = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return TransformersNetwork(_without_dropout(inner))


def read_inner(folder: Path, kind: Any, config: Any = None, **arguments: Any) -> Any:
    """A model of transformers in float32, nothing about it random.

    Args:
        kind: of transformers' classes, such as AutoModelForCausalLM.
        config: a changed one of `config_without_dropout`.

    Raises:
        UserError: the folder cannot be read.
    """
    config = config or config_without_dropout(folder)
    inner = read_model(folder, kind, config=config, dtype=torch.float32, **arguments)
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
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _without_dropout(inner: Any) -> Any:
    """The model rid of dropout, whose figure some models write into their code."""
    for module in inner.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return inner
