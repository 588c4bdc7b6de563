"""Masked language modeling: an encoder predicts hidden tokens from those on both sides."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from artifacts.errors import UserError
from artifacts.model import first_position, read_tokenizer
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch, EncoderBatch, read_batch
from recipes.device import device_of, local_device
from recipes.encoders.settings import MaskedLanguageModelingSettings
from recipes.evaluation.bits import as_served
from recipes.evaluation.documents import Documents
from recipes.evaluation.results import ExampleScores, Scorer
from recipes.evaluation.settings import Metric
from recipes.model import causal_model
from recipes.model.base_model import check_family, check_masked_head
from recipes.model.decoder import document_blocks
from recipes.objective import Objective
from recipes.spec import TrainingSpec

BATCH_TEXTS = 16
SAME_LOSS = 1e-4
"""Nats by which a token's loss may differ beside another text and without it: rounding alone."""

HIDDEN = -1
"""Stands for the mask token, whose id the model knows."""
MASKED_SHARE, SHOWN_AS_MASK, SHOWN_AS_ANY = 0.15, 0.8, 0.1
"""Of all tokens, the share to predict; of these, the shares shown as the mask token and as a random
one (Devlin et al., "BERT", 2019)."""
# The first digits of e: any number does, as long as it stays.
MASK_SEED = 0x2B7E151628AED2A6


def read_masked(
    shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None
) -> EncoderBatch:
    """Read rows and hide some of their tokens, which are the targets at their own places.

    Which tokens are hidden depends on a row's sample number in the run, so that a row that is read
    again hides others; without samples, on the row's own number. Raises as `read_rows`.
    """
    batch = read_batch(shards, rows)
    drawn = [
        hide(tokens, shards.stats, int(sample))
        for tokens, sample in zip(
            batch.tokens.numpy(), rows if samples is None else samples, strict=True
        )
    ]
    inputs, targets = (torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True))
    padding = batch.segments == PADDING_SEGMENT
    targets = targets.masked_fill(padding, IGNORED)
    return EncoderBatch(inputs, targets, batch.positions, batch.segments)


def hide(tokens: np.ndarray, stats: ShardStats, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens as they are shown and the targets among them, both int64; at least one is a target."""
    tokens = tokens.astype(np.int64)
    draw, how, replacement = np.random.default_rng((MASK_SEED, sample)).random((3, len(tokens)))
    ends = [token for token in (stats.start_token_id, stats.end_token_id) if token is not None]
    # The tokens that begin and end a text are never hidden.
    draw[np.isin(tokens, ends)] = np.inf
    # In a short text all draws may be above the share; then the lowest one is hidden.
    is_target = draw < max(MASKED_SHARE, np.nextafter(draw.min(), 1))
    inputs = tokens.copy()
    inputs[is_target & (how < SHOWN_AS_MASK)] = HIDDEN
    at_random = is_target & (how >= SHOWN_AS_MASK) & (how < SHOWN_AS_MASK + SHOWN_AS_ANY)
    inputs[at_random] = (replacement[at_random] * stats.vocab_size).astype(np.int64)
    return inputs, np.where(is_target, tokens, IGNORED)


def lay_out(texts: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """A batch of texts as `hide` gives them, one each row, as wide as the longest."""
    lengths = np.array([len(inputs) for inputs, _ in texts])
    shape = (len(texts), int(lengths.max()))
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    for number, (inputs, labels) in enumerate(texts):
        tokens[number, : len(inputs)], targets[number, : len(inputs)] = inputs, labels
    positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
    segments = np.where(positions < lengths[:, None], 0, PADDING_SEGMENT)
    return Batch(*map(torch.from_numpy, (tokens, targets, positions, segments)))


def one_text_each_row(batch: Batch) -> Batch:
    """The same texts in the same order, each in a row of its own; a batch without text as it is."""
    is_text = batch.segments != PADDING_SEGMENT
    if not is_text.any():
        return batch
    places = batch.positions[is_text].long()
    # Positions begin again at 0 with each text.
    rows = (places == 0).cumsum(0) - 1
    shape = (int(rows[-1]) + 1, int(places.max()) + 1)

    def moved(values: torch.Tensor, elsewhere: int) -> torch.Tensor:
        result = values.new_full(shape, elsewhere)
        result[rows, places] = values[is_text]
        return result

    return Batch(
        moved(batch.tokens, 0),
        moved(batch.targets, IGNORED),
        moved(batch.positions, 0),
        moved(torch.zeros_like(batch.segments), PADDING_SEGMENT),
    )


class MaskedNetwork(causal_model.ExampleNetwork):
    """An encoder that predicts hidden tokens."""

    def __init__(self, inner: nn.Module, mask_token: int) -> None:
        super().__init__(inner)
        self._mask_token = mask_token
        self._first_position = first_position(self.inner.config.to_dict())
        self._hidden: torch.Tensor | None = None
        """Where tokens are hidden. Only their logits are computed, as the product with the output
        matrix is large."""
        self.inner.get_output_embeddings().register_forward_pre_hook(
            lambda module, args: args if self._hidden is None else (args[0][self._hidden],)
        )
        self.reads_packed_rows = False

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
            mask: Any = (segments[:, :, None] == segments[:, None, :])[:, None]
            if self.inner.config._attn_implementation == causal_model.FLEX:
                mask = document_blocks(segments, is_causal=False)
            positions = batch.positions + self._first_position
            arguments = {"attention_mask": mask, "position_ids": positions}
        input_ids = batch.tokens.masked_fill(batch.tokens == HIDDEN, self._mask_token)
        pad = self.inner.config.pad_token_id or 0
        return self.inner(input_ids=input_ids.masked_fill(~is_text, pad), **arguments).logits

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy of the hidden tokens in nats, summed."""
        if batch.targets.device.type != "xla":
            return self.losses(batch).sum()
        # XLA compiles for one number of hidden tokens: for all.
        self._hidden = None
        return causal_model.summed_loss(self._logits(batch), batch.targets)

    @torch.no_grad()
    def try_packed_rows(self, row_length: int) -> None:
        """Find out, in float32, whether the model keeps two texts apart in one row. The row is as
        long as those to come, because a window of attention shows only then."""
        config, device = self.inner.config, self.head_weight.device
        places = torch.arange(row_length, device=device)
        cut = row_length * 3 // 4
        text = (places >= cut).long()
        # RoBERTa would not count a padding token that stands in a text.
        pad, size = config.pad_token_id or 0, config.vocab_size
        tokens = (pad + 1 + places % (size - 1)) % size
        batch = Batch(*(part[None] for part in (tokens, tokens, places - cut * text, text)))
        # As long as `reads_packed_rows` is not set, `losses` gives each text a row of its own.
        apart, usual = self.losses(batch), config._attn_implementation
        by_blocks = [causal_model.FLEX] if device_of(device).attends_by_blocks else []
        for attention in (*by_blocks, usual):
            if self.set_attention(attention) and self._agrees(batch, apart):
                return

    def _agrees(self, batch: Batch, apart: torch.Tensor) -> bool:
        """Whether each token has the loss in a packed batch that it has apart; if so, rows are
        packed from now on."""
        self.reads_packed_rows = True
        try:
            together = self.losses(batch)
        except (TypeError, ValueError, RuntimeError):
            # Models without positions, or with masks of their own, say so in as many ways.
            together = torch.full_like(apart, torch.nan)
        self.reads_packed_rows = torch.allclose(together, apart, rtol=0, atol=SAME_LOSS)
        return self.reads_packed_rows


def load_masked(folder: Path) -> causal_model.TrainableModel:
    """An encoder that tells hidden tokens; raises UserError for a model of another family or
    without such a head, or whose tokenizer has no mask."""
    from transformers import AutoModelForMaskedLM

    check_family(folder, "encoder")
    mask_token = read_tokenizer(folder).mask_token_id
    if mask_token is None:
        raise UserError(
            f"The tokenizer in {folder} has no mask token, without which no token can be hidden. "
            "Choose a `base_model` that was trained on hidden tokens, such as RoBERTa."
        )
    check_masked_head(folder)
    inner = causal_model.read_inner(folder, AutoModelForMaskedLM)
    model = causal_model.TrainableModel(MaskedNetwork(inner, mask_token))
    model.exported_config = {"architectures": [type(inner).__name__]}
    return model


def _check(model: causal_model.TrainableModel, spec: TrainingSpec) -> None:
    """Find out whether texts can share a row."""
    network = model.network
    assert isinstance(network, MaskedNetwork)
    network.try_packed_rows(spec.shards.sequence_length)


class MaskedScorer(Scorer):
    """Bits that a model needs for a hidden token, averaged over each document."""

    metric = Metric(name="bits_per_masked_token", unit="bits per masked token", has_general=True)

    @torch.inference_mode()
    def score(self, folder: Path, examples: Documents, stats: ShardStats) -> ExampleScores:
        """The scores of a model; the same tokens are hidden from every model."""
        network = load_masked(folder).network
        assert isinstance(network, MaskedNetwork)
        as_served(network.eval().to(local_device()))
        windows = [
            (number, *hide(tokens, stats, _sample(example.id, part)))
            for number, example in enumerate(examples)
            for part, tokens in enumerate(
                example.tokens[start : start + stats.sequence_length]
                for start in range(0, len(example.tokens), stats.sequence_length)
            )
        ]
        bits, token_counts = np.zeros(len(examples)), np.zeros(len(examples))
        for first in range(0, len(windows), BATCH_TEXTS):
            numbers, *texts = zip(*windows[first : first + BATCH_TEXTS], strict=True)
            batch = lay_out(list(zip(*texts, strict=True)))
            losses = network.losses(batch.to(local_device())).double().cpu().numpy()
            counts = (batch.targets != IGNORED).sum(dim=1).numpy()
            # Not `+=`, which would add only one of the losses of the same document.
            np.add.at(bits, np.repeat(numbers, counts), losses / math.log(2))
            np.add.at(token_counts, list(numbers), counts)
        return ExampleScores(
            {self.metric.name: bits / token_counts},
            {"perplexity": float(2.0 ** (bits.sum() / token_counts.sum()))},
        )


def _sample(document: str, part: int) -> int:
    digest = hashlib.blake2b(f"{document}\0{part}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def hidden_tokens(settings: MaskedLanguageModelingSettings) -> Objective:
    """The objective of predicting hidden tokens."""
    return Objective(
        lambda spec: load_masked(Path(spec.base_model_folder)), read_masked, _check, MaskedScorer()
    )
