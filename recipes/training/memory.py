"""What a training takes of the memory of each of its GPUs, by a reckoning.

It decides whether activations are kept, refuses what cannot fit before anything is read, and says
what took the memory where it ran out.
"""

from dataclasses import dataclass
from typing import Any

from artifacts.errors import UserError
from recipes.device import device_of
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import DECODER_MODEL_TYPES, TOKENS_IN_FLIGHT, Decoder
from recipes.settings import TrainingSettings
from recipes.spec import TrainingSpec

USABLE = 0.85
"""Of a GPU's memory; CUDA itself, buffers of messages and gaps between tensors take the rest."""
EAGER = 2
"""How many times as much a model of transformers keeps as a compiled decoder."""
FLOAT32 = 4
"""Bytes of a number."""
MOST_WORKERS = 1024
"""The most workers that a refusal suggests."""


@dataclass(frozen=True)
class Reckoning:
    """What a run takes, by the rows of a pass, the workers, and whether activations are kept.

    On an H200, a model of 1B took 66.2 GB where this says 71.0, and one of 135M 39.7 where it says
    41.3.
    """

    config: Any
    """The model's, of transformers; sizes are those of its part for text."""
    training: TrainingSettings
    parameters: int
    trained: int
    """Those of the parameters that are not frozen."""
    row_tokens: int

    def sizes(self, rows: int, workers: int, keeps: bool) -> dict[str, float]:
        """Bytes on the GPU of one of `workers`, by what takes them, for a forward pass of some
        rows; activations that are not kept are computed twice."""
        tokens = rows * self.row_tokens
        logits = self._logits(tokens)
        return {
            "weights, gradients and optimizer state": self._state(workers),
            "weights as they are multiplied": self._multiplied(workers),
            "logits": logits,
            "activations": self._activations(tokens, logits, keeps),
        }

    def check(self, workers: int, memory: float, keeps: bool = False) -> None:
        """Raise UserError where the training fits GPUs of so many bytes in no way in which it may
        be computed.

        It names what takes the memory, and what helps, the cheapest first. Activations are kept
        where the settings or the model let none be computed twice.
        """
        placement = self.training.placement
        rows = placement.device_batch_size
        sizes = self.sizes(rows, workers, keeps)
        total = sum(sizes.values())
        # What may just fit is let through; what is advised below leaves room (USABLE).
        if total <= memory:
            return

        def fits(rows: int, workers: int, keeps: bool = keeps) -> bool:
            return sum(self.sizes(rows, workers, keeps).values()) <= USABLE * memory

        fewer_rows = next((n for n in range(rows - 1, 0, -1) if fits(n, workers)), None)
        doubled = (workers << n for n in range(1, MOST_WORKERS.bit_length()))
        count = next((n for n in doubled if fits(1, n)), None)
        remedy = "Shorten `tokenized_shards.sequence_length`, or choose a smaller `base_model`."
        if placement.activation_checkpointing is False and fits(rows, workers, keeps=False):
            remedy = "Set `checkpoint.placement.activation_checkpointing` to true."
        elif fewer_rows:
            remedy = f"Set `checkpoint.placement.device_batch_size` to {fewer_rows}."
        elif count:
            remedy = (
                f"It fits {count} workers with `checkpoint.placement.device_batch_size` at 1; "
                "fewer do with `checkpoint.lora`, which trains adapters alone."
            )
        how = "with activations kept" if keeps else "even where activations are computed twice"
        raise UserError(
            f"This training does not fit a GPU of {memory / 1e9:,.0f} GB: on each of {workers} "
            f"worker(s), with `checkpoint.placement.device_batch_size` at {rows}, it takes "
            f"{total / 1e9:,.0f} GB {how} ({described(sizes)}). {remedy}"
        )

    @property
    def _text(self) -> Any:
        return self.config.get_text_config()

    @property
    def _width(self) -> int:
        """Bytes of a number in matrix products."""
        return FLOAT32 if self.training.precision == "float32" else 2

    def _divided(self, workers: int) -> int:
        """Over how many workers each replica of the training state is divided."""
        return max(workers // self.training.placement.replicas, 1)

    def _state(self, workers: int) -> float:
        placement, divided = self.training.placement, self._divided(workers)
        moments = 2 if self.training.optimizer.name == "adamw" else 1
        if placement.strategy:
            # What it holds at least.
            return placement.strategy.state_bytes(self.parameters, self.trained, moments, workers)
        # What is trained has a gradient and moments beside the weights, what is frozen neither.
        numbers = (2 + moments) * self.trained + (self.parameters - self.trained)
        state = FLOAT32 * numbers / divided
        if placement.pipeline_parallel > 1:
            # The schedule keeps a stage's weights and gradients whole until all passes are done.
            stage_share = 1 / (placement.tensor_parallel * placement.pipeline_parallel)
            state += FLOAT32 * self.trained * (stage_share - 1 / divided)
        return state

    def _multiplied(self, workers: int) -> float:
        """Copies of weights in the type, or at the place, in which they are multiplied."""
        placement, text = self.training.placement, self._text
        # In float32, one worker multiplies by the weights themselves.
        narrowed = 0 if self._width == FLOAT32 else self.parameters
        copied = narrowed // placement.pipeline_parallel
        is_divided = self._divided(workers) > placement.tensor_parallel
        if is_divided and placement.pipeline_parallel == 1:
            # Each worker gathers two layers and the embeddings at once.
            matrices = 1 if text.tie_word_embeddings else 2
            embeddings = matrices * text.vocab_size * text.hidden_size
            in_layers = max(self.parameters - embeddings, 0)
            copied = embeddings + 2 * in_layers // text.num_hidden_layers
        return self._width * copied / placement.tensor_parallel

    def _logits(self, tokens: int) -> float:
        """The logits that exist at once, and the gradient of the output matrix."""
        in_flight = min(tokens, TOKENS_IN_FLIGHT["cuda"])
        # Where the tokens take several turns, the product of each is added to a sum in float32.
        sums = 2 * FLOAT32 if tokens > in_flight else FLOAT32 * (self._width < FLOAT32)
        each_token = self._width * in_flight / self.training.placement.tensor_parallel
        return self._text.vocab_size * (each_token + (self._width + sums) * self._text.hidden_size)

    def _activations(self, tokens: int, logits: float, keeps: bool) -> float:
        text = self._text
        layers, hidden = text.num_hidden_layers, text.hidden_size
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        keys, times = hidden, EAGER
        if text.model_type in DECODER_MODEL_TYPES:
            head_dim = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
            keys, times = text.num_key_value_heads * head_dim, 1
        # Of each token and layer in float32 the residual stream, twice; in the type of the products
        # what both norms, the queries and the attention give, keys and values, and three times the
        # inner feed-forward.
        degree = self.training.placement.tensor_parallel
        products = self._width * (4 * hidden + 2 * keys + 3 * inner) / degree
        of_a_layer = tokens * times * (2 * FLOAT32 * hidden + products)
        if keeps:
            # A stage of a pipeline has a part of the layers, and as many passes under way at once.
            return layers * of_a_layer
        # The layers' inputs. Logits are gone when the last layer is computed again.
        return layers * tokens * FLOAT32 * hidden + max(of_a_layer - logits, 0)


def described(memory: dict[str, float]) -> str:
    """What takes memory, in words, the largest first."""
    ordered = sorted(memory.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in ordered)


def reckoning_of(spec: TrainingSpec, model: TrainableModel) -> Reckoning:
    """The reckoning of a run."""
    from transformers import AutoConfig

    return Reckoning(
        AutoConfig.from_pretrained(spec.base_model_folder),
        spec.training,
        model.parameter_count,
        model.trained_count,
        spec.shards.sequence_length,
    )


def recomputes(spec: TrainingSpec, model: TrainableModel, workers: Workers) -> bool:
    """Whether activations are computed twice; raises UserError where that does not fit either."""
    placement, network = spec.training.placement, model.network
    setting, memory = placement.activation_checkpointing, device_of(workers.device).memory()
    if memory is None:
        return bool(setting)
    can = isinstance(network, Decoder) or network.inner.supports_gradient_checkpointing
    keeps = not (can if setting is None else setting)
    reckoning = reckoning_of(spec, model)
    reckoning.check(workers.count, memory, keeps)
    sizes = reckoning.sizes(placement.device_batch_size, workers.count, keeps=True)
    return not keeps and (setting or sum(sizes.values()) > USABLE * memory)
