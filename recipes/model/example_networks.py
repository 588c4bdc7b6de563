"""Models of transformers that learn from examples: an input, and what is to be said of it."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from artifacts.errors import UserError
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch, ExampleBatch
from recipes.data.masked_rows import HIDDEN, one_text_each_row
from recipes.model.causal_model import TrainableModel
from recipes.model.family import check_family
from recipes.model.transformers_network import (
    TransformersNetwork,
    config_without_dropout,
    without_dropout,
)

SAME_LOSS = 1e-4
"""Nats by which a token's loss may differ beside another text and without it: rounding alone."""


class SequenceToSequenceNetwork(TransformersNetwork):
    """An encoder-decoder model."""

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks of the encoder and of the decoder."""
        parts = (self.inner.get_encoder(), self.inner.get_decoder())
        return nn.ModuleList([block for part in parts for block in _blocks(part)])

    @property
    def head_weight(self) -> torch.Tensor:
        """The embeddings, shape (vocabulary, hidden size)."""
        weight: torch.Tensor = self.inner.get_input_embeddings().weight
        return weight

    def loss(self, batch: ExampleBatch) -> torch.Tensor:  # type: ignore[override]
        """Cross-entropy of the targets' tokens in nats, summed."""
        config = self.inner.config
        start = torch.full_like(batch.targets[:, :1], config.decoder_start_token_id)
        before = torch.cat([start, batch.targets[:, :-1]], dim=1)
        logits = self.inner(
            input_ids=batch.tokens,
            attention_mask=batch.is_input.long(),
            decoder_input_ids=before.masked_fill(before == IGNORED, config.pad_token_id or 0),
            use_cache=False,
        ).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )


class ClassificationNetwork(TransformersNetwork):
    """An encoder with a head that tells classes apart."""

    def __init__(self, inner: nn.Module, class_weights: list[float] | None = None) -> None:
        super().__init__(inner)
        weights = torch.tensor(class_weights) if class_weights else None
        self.register_buffer("class_weights", weights, persistent=False)

    @property
    def head_weight(self) -> torch.Tensor:
        """The embeddings, shape (vocabulary, hidden size)."""
        weight: torch.Tensor = self.inner.get_input_embeddings().weight
        return weight

    def loss(self, batch: ExampleBatch) -> torch.Tensor:  # type: ignore[override]
        """Cross-entropy of the classes in nats, summed, each by its class's weight."""
        pad = self.inner.config.pad_token_id or 0
        logits = self.inner(
            input_ids=batch.tokens.masked_fill(~batch.is_input, pad),
            attention_mask=batch.is_input.long(),
        ).logits
        return F.cross_entropy(
            logits.float(),
            batch.targets[:, 0],
            weight=self.class_weights,
            ignore_index=IGNORED,
            reduction="sum",
        )


class MaskedNetwork(TransformersNetwork):
    """An encoder that tells hidden tokens."""

    def __init__(self, inner: nn.Module, mask_token: int) -> None:
        super().__init__(inner)
        self._mask_token = mask_token
        self._hidden: torch.Tensor | None = None
        """Where tokens are hidden, whose logits alone are worth their large matrix product."""
        self.inner.get_output_embeddings().register_forward_pre_hook(
            lambda module, args: args if self._hidden is None else (args[0][self._hidden],)
        )
        self.reads_packed_rows = False
        """Whether texts stay in the rows that they share; each gets a row of its own otherwise."""

    @property
    def head_weight(self) -> torch.Tensor:
        """The embeddings, shape (vocabulary, hidden size)."""
        weight: torch.Tensor = self.inner.get_input_embeddings().weight
        return weight

    @property
    def first_position(self) -> int:
        """RoBERTa counts its positions from the one after the padding token's."""
        config = self.inner.config
        return (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0

    def losses(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy of each hidden token in nats, row by row; shape (hidden tokens,)."""
        if not self.reads_packed_rows:
            batch = one_text_each_row(batch)
        self._hidden = batch.targets != IGNORED
        logits = self._logits(batch)
        if logits.dim() > 2:
            # A model that multiplies by the matrix itself gives the logits of every token.
            logits = logits[self._hidden]
        return F.cross_entropy(logits.float(), batch.targets[self._hidden], reduction="none")

    def _logits(self, batch: Batch) -> torch.Tensor:
        """The model's own, of `_hidden` or of all tokens."""
        segments, is_text = batch.segments, batch.segments != PADDING_SEGMENT
        # Of a row whose texts are all forgotten, padding is shown: a model shown nothing at all
        # answers with no number.
        arguments = {"attention_mask": (is_text | ~is_text.any(1, keepdim=True)).long()}
        if self.reads_packed_rows:
            arguments = {
                "attention_mask": (segments[:, :, None] == segments[:, None, :])[:, None],
                "position_ids": batch.positions + self.first_position,
            }
        shown = batch.tokens.masked_fill(batch.tokens == HIDDEN, self._mask_token)
        pad = self.inner.config.pad_token_id or 0
        logits: torch.Tensor = self.inner(
            input_ids=shown.masked_fill(~is_text, pad), **arguments
        ).logits
        return logits

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy of the hidden tokens in nats, summed."""
        if batch.targets.device.type != "xla":
            return self.losses(batch).sum()
        # XLA compiles for one number of hidden tokens: for all.
        self._hidden = None
        logits = self._logits(batch).flatten(0, 1).float()
        return F.cross_entropy(
            logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    @torch.no_grad()
    def try_packed_rows(self, row_length: int) -> None:
        """Find out by a row of two texts whether the model, in float32, keeps them apart.

        Args:
            row_length: tokens of the rows to come; a window of attention shows on long ones only.
        """
        config, device = self.inner.config, self.head_weight.device
        places = torch.arange(row_length, device=device)
        cut = row_length * 3 // 4
        text = (places >= cut).long()
        # RoBERTa would not count a padding token that stands in a text.
        pad, size = config.pad_token_id or 0, config.vocab_size
        tokens = (pad + 1 + places % (size - 1)) % size
        batch = Batch(*(part[None] for part in (tokens, tokens, places - cut * text, text)))
        apart = self.losses(batch)
        self.reads_packed_rows = True
        try:
            together = self.losses(batch)
        except (TypeError, ValueError, RuntimeError):
            # Models without positions, or with masks of their own, say so in as many ways.
            together = torch.full_like(apart, torch.nan)
        self.reads_packed_rows = torch.allclose(together, apart, rtol=0, atol=SAME_LOSS)


def load_masked(folder: Path) -> TrainableModel:
    """An encoder that tells hidden tokens; raises UserError for another family or tokenizer."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    check_family(folder, "encoder")
    mask_token = AutoTokenizer.from_pretrained(folder).mask_token_id
    if mask_token is None:
        raise UserError(
            f"The tokenizer in {folder} has no mask token, without which no token can be hidden. "
            "Choose a `base_model` that was trained on hidden tokens, such as RoBERTa."
        )
    inner = AutoModelForMaskedLM.from_pretrained(
        folder, config=config_without_dropout(folder), dtype=torch.float32, use_safetensors=True
    )
    model = TrainableModel(without_dropout(MaskedNetwork(inner, mask_token)))
    model.exported_config = {"architectures": [type(inner).__name__]}
    return model


def load_sequence_to_sequence(folder: Path) -> TrainableModel:
    """An encoder-decoder model with float32 weights; raises UserError for another family."""
    from transformers import AutoModelForSeq2SeqLM

    check_family(folder, "sequence_to_sequence")
    config = config_without_dropout(folder)
    inner = AutoModelForSeq2SeqLM.from_pretrained(
        folder, config=config, dtype=torch.float32, use_safetensors=True
    )
    return TrainableModel(without_dropout(SequenceToSequenceNetwork(inner)))


def load_classifier(
    folder: Path, labels: list[str], seed: int, class_weights: list[float] | None
) -> TrainableModel:
    """An encoder with a head for these classes, a new one unless it has one for the same.

    Raises:
        UserError: the model is of another family.
    """
    from transformers import AutoModelForSequenceClassification

    check_family(folder, "encoder")
    config = config_without_dropout(folder)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(seed)
    inner = AutoModelForSequenceClassification.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
    )
    model = TrainableModel(without_dropout(ClassificationNetwork(inner, class_weights)))
    model.exported_config = {
        "architectures": [type(inner).__name__],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": config.label2id,
    }
    return model


def _blocks(part: Any) -> list[nn.Module]:
    lists: list[nn.ModuleList] = [
        module for module in part.children() if isinstance(module, nn.ModuleList)
    ]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
    return list(largest.children())
