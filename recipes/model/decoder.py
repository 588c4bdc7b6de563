"""A Llama-shaped decoder for training on packed rows.

Its parameters carry the names of Hugging Face checkpoints, so weights go in and out unchanged. It
covers Llama, SmolLM2, Mistral, Qwen2 and Qwen3: RMS norms, gated SiLU, rotary positions in the
half-rotation layout, grouped queries, optional biases and query/key norms. Rows have to be no
longer than a sliding window.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from recipes.data.batch import IGNORED

TOKENS_IN_FLIGHT = {"cpu": 1024, "cuda": 8192}
"""Tokens whose logits exist at once, in the type of the matrix product; elsewhere all, since XLA
divides the work itself."""
TOKENS_IN_FLOAT32 = {"cpu": 64}
"""Tokens whose logits exist at once in float32; few enough for a processor's cache."""


def summed_cross_entropy(
    hidden: torch.Tensor, head_weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The loss in nats, summed over all positions that have a target.

    Hidden states are of shape (rows, sequence_length, hidden_size), the head of (vocabulary,
    hidden_size), targets of (rows, sequence_length), `IGNORED` where there is nothing to predict.
    """
    device = hidden.device.type
    mixed = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else hidden.dtype
    return _LinearCrossEntropy.apply(
        hidden.flatten(0, 1), head_weight, targets.flatten(), dtype, torch.is_grad_enabled()
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Output matrix and cross-entropy in one, the gradients made in the forward pass.

    Logits become their own gradient in place, so neither are they kept nor computed again (the
    idea of Hsu et al., "Liger Kernel", 2024).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        targets: torch.Tensor,
        dtype: torch.dtype,
        differentiate: bool,
    ) -> torch.Tensor:
        weight = head_weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if differentiate else None
        weight_gradient: torch.Tensor | None = None
        size = TOKENS_IN_FLIGHT.get(hidden.device.type, len(targets))
        # On a GPU two fused kernels instead of a dozen passes over the logits.
        to_gradient = _compiled(to_gradient_by_mask) if hidden.is_cuda else _to_gradient
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            inputs = hidden[part].to(dtype)
            logits = F.linear(inputs, weight)
            loss += to_gradient(logits, targets[part], differentiate)
            # `logits` now holds its own gradient.
            if hidden_gradient is not None:
                hidden_gradient[part] = logits @ weight
            if differentiate and ctx.needs_input_grad[1]:
                # In float32 also where the matrix arrives from other workers in bfloat16.
                product = (logits.T @ inputs).float()
                weight_gradient = (
                    product if weight_gradient is None else weight_gradient.add_(product)
                )
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = head_weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The forward pass has computed the gradients of the sum; the chain rule only scales them.
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * scale).to(ctx.weight_dtype)
        return hidden_gradient * scale, weight_gradient, None, None, None


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, dynamic=False)


def to_gradient_by_mask(logits: torch.Tensor, targets: torch.Tensor, replace: bool) -> torch.Tensor:
    """As `_to_gradient`; without its scatter, for which all logits would be written in float32."""
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    log_probabilities = torch.log_softmax(logits.float(), dim=1)
    if replace:
        has_target = (targets != IGNORED)[:, None]
        logits.copy_((log_probabilities.exp() - is_target.float()) * has_target)
    return -torch.where(is_target, log_probabilities, 0.0).sum()


def _to_gradient(logits: torch.Tensor, targets: torch.Tensor, replace: bool) -> torch.Tensor:
    """The summed loss of some logits, which their gradient replaces on request."""
    has_target = targets != IGNORED
    # `IGNORED` is no place to gather from; `counted` drops what place 0 gives instead.
    places = targets.clamp_min(0)[:, None]
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    size = TOKENS_IN_FLOAT32.get(logits.device.type, len(targets))
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        log_probabilities = torch.log_softmax(logits[part].float(), dim=1)
        likelihoods = log_probabilities.gather(1, places[part])[:, 0]
        loss -= (likelihoods * has_target[part]).sum()
        if replace:
            gradient = log_probabilities.exp_()
            gradient.scatter_add_(1, places[part], gradient.new_full((len(likelihoods), 1), -1.0))
            logits[part] = gradient.mul_(has_target[part, None])
    return loss


Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each of shape (rows, sequence_length, 1, head_dim / 2), float32."""


def rotary_frequencies(
    rope: dict[str, Any], head_dim: int, device: torch.device
) -> tuple[torch.Tensor, float]:
    """`(frequencies of shape (head_dim / 2,), attention scale)` as transformers computes them."""
    kind = rope.get("rope_type", "default")
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / (rope["rope_theta"] ** steps)
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / rope["factor"], 1.0
    if kind == "llama3":
        return _stretch_long_waves(frequencies, rope), 1.0
    # Models of other types run through transformers, see `_is_decoder` in
    # `recipes.model.causal_model`.
    raise ValueError(f"rope_type {kind} is not supported by this decoder")


SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


def _stretch_long_waves(frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: short waves stay, long ones stretch by `factor`, a ramp between."""
    context = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = context * frequencies / (2 * torch.pi)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / rope["factor"])


def rotation_at(positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> Rotation:
    """The rotation at given positions, of shape (rows, sequence_length); made once a batch."""
    # Never in bfloat16, which has no odd numbers above 256: neighbors would be turned alike.
    angles = positions[..., None, None].float() * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn queries or keys of shape (rows, sequence_length, heads, head_dim)."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)


BLOCK = 64
"""Queries a block in `_attend_in_blocks`; small enough to save most of the causal half."""


@dataclass(frozen=True)
class SegmentMask:
    """Which position may look at which: earlier ones of the same segment, and itself."""

    allowed: torch.Tensor | None
    """Booleans of shape (rows, 1, sequence_length, sequence_length)."""
    bias: torch.Tensor | None = None
    """The same as 0 and minus infinity in bfloat16, where the block-wise form is the faster."""
    blocks: BlockMask | None = None
    """The same for flex attention, on a GPU."""


def allowed_positions(segments: torch.Tensor) -> torch.Tensor:
    """Booleans of shape (rows, 1, sequence_length, sequence_length), by the segment number of each
    position, of shape (rows, sequence_length)."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


def segment_mask(segments: torch.Tensor, dtype: torch.dtype) -> SegmentMask:
    """The mask of a batch, made once for all layers that compute in `dtype`."""
    if segments.device.type == "cuda":
        return SegmentMask(None, blocks=document_blocks(segments))
    allowed = allowed_positions(segments)
    if segments.device.type != "cpu" or dtype != torch.bfloat16:
        return SegmentMask(allowed)
    zero = torch.zeros((), dtype=dtype)
    # Each position sees itself, so no row is minus infinity alone, of which softmax makes NaN.
    return SegmentMask(allowed, torch.where(allowed, zero, float("-inf")))


def document_blocks(segments: torch.Tensor, is_causal: bool = True) -> BlockMask:
    """`block_mask`, on a GPU by one kernel in the place of a hundred, and of masks as large as all
    pairs of positions."""
    compiles = segments.is_cuda and not torch.compiler.is_compiling()
    build = _compiled(block_mask) if compiles else block_mask
    return build(segments, is_causal)


def block_mask(segments: torch.Tensor, is_causal: bool = True) -> BlockMask:
    """The mask of `allowed_positions` in flex attention's form, which skips whole blocks; one that
    is not causal also looks at later positions of a segment."""

    def may_look(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        is_inside = segments[row, query] == segments[row, key]
        return is_inside & (query >= key) if is_causal else is_inside

    rows, length = segments.shape
    return create_block_mask(may_look, rows, None, length, length, device=segments.device)


# `ROWS_GUARANTEED_SAFE` is set nowhere. Every position looks at itself at least, but where a
# document starts inside a tile it sees nothing in the tiles before, and the option makes that NaN.
FLEX_OPTIONS_HOPPER_64: dict[str, Any] = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "fwd_num_stages": 3,
    "fwd_num_warps": 4,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 64,
    "bwd_num_stages": 2,
    "bwd_num_warps": 4,
}
"""For heads of 64 in 16 bits on an H100 or H200: the smaller tiles that torch takes on an A100.
Over its own choice for these cards the forward pass takes 0.68 of the time, and with documents of
512 tokens 0.53; the backward pass 0.98 and 0.91 (8 rows of 4,096 on an H200)."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SegmentMask
) -> torch.Tensor:
    """Grouped-query attention over (rows, sequence_length, heads, head_dim), same shape out."""
    if mask.bias is not None:
        return _attend_in_blocks(query, key, value, mask.bias)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if mask.blocks is not None:
        # It is only fast, and only lean, when compiled.
        flex = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
        attended = flex(
            query,
            key,
            value,
            block_mask=mask.blocks,
            enable_gqa=grouped,
            kernel_options=_flex_options(query),
        )
        return attended.transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.allowed, enable_gqa=grouped
    )
    return attended.transpose(1, 2)


def _flex_options(query: torch.Tensor) -> dict[str, Any]:
    is_measured = query.is_cuda and query.shape[-1] == 64 and query.element_size() == 2
    # Compute capability 9 is Hopper, of which H100 and H200 are.
    if is_measured and torch.cuda.get_device_properties(query.device).major == 9:
        return FLEX_OPTIONS_HOPPER_64
    return {}


def _attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """The same by plain matrix products, a block of queries at a time, causal half only.

    In bfloat16 on a CPU it takes about 40% of the time of torch's fused attention, most of whose
    cost is in the backward pass.
    """
    rows, length, heads, size = query.shape
    groups = key.shape[2]
    shared = heads // groups
    # Queries that share a key head become rows of one product, so no key is repeated for them.
    query = query.view(rows, length, groups, shared, size).permute(0, 2, 3, 1, 4) * size**-0.5
    key = key.permute(0, 2, 3, 1).reshape(rows * groups, size, length)
    value = value.transpose(1, 2).reshape(rows * groups, length, size)
    attended = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        block = query[:, :, :, start:end].reshape(rows * groups, -1, size)
        scores = torch.bmm(block, key[:, :, :end]).view(rows, groups, shared, end - start, end)
        weights = torch.softmax(scores + bias[:, :, None, start:end, :end], dim=-1)
        mixed = torch.bmm(weights.view(rows * groups, -1, end), value[:, :end])
        attended.append(mixed.view(rows, groups, shared, end - start, size))
    return torch.cat(attended, dim=3).permute(0, 3, 1, 2, 4).reshape(rows, length, heads, size)


DECODER_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder, in Hugging Face's terms."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    norm_eps: float
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    tied_embeddings: bool
    initializer_range: float
    rope: dict[str, Any]

    @classmethod
    def from_config(cls, config: Any) -> "DecoderShape":
        """Read the sizes of a transformers config of one of `DECODER_MODEL_TYPES`."""
        # Its queries, keys and values have biases and its outputs none, without a word in its
        # config.
        is_qwen2 = config.model_type == "qwen2"
        bias = is_qwen2 or bool(getattr(config, "attention_bias", False))
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_value_heads=config.num_key_value_heads,
            # Qwen2's config does not name it.
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            norm_eps=config.rms_norm_eps,
            attention_bias=bias,
            output_bias=bias and not is_qwen2,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            query_key_norm=config.model_type == "qwen3",
            tied_embeddings=bool(config.tie_word_embeddings),
            initializer_range=config.initializer_range,
            rope=dict(config.rope_parameters),
        )


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """The type that matrix products with this weight run in: autocast's, or its own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, handed on in the type that the next matrix wants."""

    def __init__(self, size: int, eps: float, of_a_head: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.of_a_head = of_a_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            # Workers that share out the heads each see a part of a head norm's gradient.
            weight = weight.to_local(grad_placements=[Partial()] if self.of_a_head else None)
        normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), self.eps)
        return normed.to(compute_dtype(self.weight))


class Attention(nn.Module):
    """Grouped-query self-attention confined to the segments of a packed row."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query, key_value = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=shape.attention_bias)
        self.k_proj = nn.Linear(shape.hidden_size, key_value, bias=shape.attention_bias)
        self.v_proj = nn.Linear(shape.hidden_size, key_value, bias=shape.attention_bias)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=shape.output_bias)
        if shape.query_key_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, of_a_head=True)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, of_a_head=True)

    def forward(self, x: torch.Tensor, rotation: Rotation, mask: SegmentMask) -> torch.Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(x).view(heads), self.k_proj(x).view(heads)
        value = self.v_proj(x).view(heads)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        attended = attend(rotate(query, rotation), rotate(key, rotation), value, mask)
        return self.o_proj(attended.flatten(-2))


class FeedForward(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        size, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer; the residual stream keeps the type it came in."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: torch.Tensor, rotation: Rotation, mask: SegmentMask) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderStack(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Decoder(nn.Module):
    """The whole network up to the last hidden state; the loss applies `head_weight`."""

    has_plain_head = reads_packed_rows = True
    has_router_loss = False

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = False
        self.begins = self.ends = True
        """Whether it has the embedding, and the last norm; a stage of a pipeline may not."""
        self.model = DecoderStack(shape)
        if not shape.tied_embeddings:
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    @property
    def layers(self) -> nn.ModuleList:
        """The repeated blocks: the units of sharding and of activation checkpointing."""
        return self.model.layers

    @property
    def head_weight(self) -> torch.Tensor:
        """The output matrix, shape (vocabulary, hidden size)."""
        return self.model.embed_tokens.weight if self.shape.tied_embeddings else self.lm_head.weight

    def keep_stage(self, index: int, count: int) -> None:
        """Drop all but one of `count` stages of about as many layers; names stay as they are.

        The last stage keeps tied embeddings too, as its output matrix.
        """
        first, end = (len(self.layers) * place // count for place in (index, index + 1))
        kept_layers = nn.ModuleList()
        for number in range(first, end):
            # By its number in the whole model, by which checkpoints name its weights.
            kept_layers.add_module(str(number), self.layers[number])
        self.model.layers = kept_layers
        self.begins, self.ends = index == 0, index == count - 1
        if not self.begins and not (self.ends and self.shape.tied_embeddings):
            del self.model.embed_tokens
        if not self.ends:
            del self.model.norm
            if not self.shape.tied_embeddings:
                del self.lm_head

    def forward(
        self, given: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of shape (rows, sequence_length, hidden_size), after the last norm.

        Given are tokens of shape (rows, sequence_length), or to a stage that does not begin, what
        the one before gave; of the same shape positions, from each segment's start, and segments,
        by row.
        """
        frequencies, scale = rotary_frequencies(self.shape.rope, self.shape.head_dim, given.device)
        rotation = rotation_at(positions, frequencies, scale)
        hidden = self.model.embed_tokens(given) if self.begins else given
        # By a layer: every stage has one, but not every stage an embedding.
        weight = next(layer.self_attn.q_proj.weight for layer in self.layers)
        mask = segment_mask(segments, compute_dtype(weight))
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                # torch's reentrant form gives no gradients where no input needs one, as behind
                # embeddings that LoRA has frozen.
                hidden = checkpoint(layer, hidden, rotation, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, rotation, mask)
        return self.model.norm(hidden) if self.ends else hidden

    @torch.no_grad()
    def initialize(self) -> None:
        """Fresh weights: normal with the config's deviation, residual outputs scaled by depth.

        The scaling by 1/sqrt(2 · layers) is GPT-2's (Radford et al., 2019).
        """
        deviation = self.shape.initializer_range
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("o_proj", "down_proj"))
                scale = (2 * self.shape.layers) ** -0.5 if residual else 1.0
                module.weight.normal_(0.0, deviation * scale)
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
