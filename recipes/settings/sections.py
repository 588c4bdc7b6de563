"""The sections of the training settings; importing them loads no torch."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from artifacts.settings import Settings
from recipes.settings.deepspeed import DeepSpeedSettings

Precision = Literal["bfloat16", "float32"]
Switch = Literal["auto", "always", "never"]
DeviceChoice = Literal["auto", "tpu"]
DEFAULT_STEPS = 32
DEFAULT_WARMUP_STEPS = 3


def chosen(switch: Switch, automatic: bool) -> bool:
    """What a three-way switch means where `auto` would give `automatic`."""
    return automatic if switch == "auto" else switch == "always"


class ExecutionSettings(Settings):
    """A section that says where and how the work is done, never what comes of it.

    Sections of this kind stay out of the checkpoint's fingerprint, so a run goes on after any
    change to them.
    """


class BudgetSettings(Settings):
    """How much is trained: one of steps, tokens and epochs, in global batches of rows."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole run; 32 where neither steps, tokens nor epochs is given."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens to train on instead, rounded up to whole steps; at least one step's."""
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Passes over the train split instead, rounded up to whole steps; of a run that continues from
    the champion, over what no model before it has seen, with `order.seen_share` on top."""
    global_batch_size: int = Field(default=4, ge=1)
    """Rows per step, over all workers and accumulation steps."""

    @model_validator(mode="before")
    @classmethod
    def _default(cls, values: Any) -> Any:
        if isinstance(values, dict) and all(values.get(name) is None for name in BUDGETS):
            return values | {"steps": DEFAULT_STEPS}
        return values

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of steps, tokens, epochs (found {' and '.join(given)})")
        return self


BUDGETS = ("steps", "tokens", "epochs")


class OrderSettings(Settings):
    """Which rows a run that continues from the champion takes; others take all rows alike."""

    new_first: bool = True
    """Take what arrived last first, then what else the lineage has not seen."""
    seen_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of the rows that the lineage has seen before, against forgetting. Ibrahim et al. (2024)
    replay 5 % where the text shifts little and 25 % where it shifts much, as to a new subject."""


class OptimizerSettings(Settings):
    """How gradients become new weights, and which gradients are not used."""

    name: Literal["adamw", "muon"] = "adamw"
    """Muon takes the matrices of the layers; AdamW always takes the rest."""
    learning_rate: float = Field(default=1e-4, gt=0, le=1, allow_inf_nan=False)
    """Peak learning rate; mild, since the base model has learnt already."""
    weight_decay: float = Field(default=0.1, ge=0, le=10, allow_inf_nan=False)
    """Decoupled weight decay on matrices; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    gradient_clip: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Largest gradient norm; larger gradients are scaled down to it."""
    skip_gradient_above: float = Field(default=10.0, gt=1)
    """A step whose gradient norm is this many times the recent median is skipped, as is NaN."""
    accept_after_skips: int = Field(default=4, ge=1)
    """So many steps skipped in a row for their norm are text of another kind, which is learnt."""
    stop_after_skips: int = Field(default=8, ge=1)
    """Skipped steps in a row that end the training; the gate then rejects what it made."""

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("a decay rate is at least 0 and below 1")
        return betas


class ScheduleSettings(Settings):
    """The learning rate over the run, as a share of `optimizer.learning_rate`."""

    shape: Literal["warmup_stable_decay", "cosine"] = "warmup_stable_decay"
    """Hold and then decay linearly, or decay along a cosine from the end of the warm-up."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps of linear rise from zero, at most those of the run; by default three."""
    decay_fraction: float = Field(default=0.3, ge=0, le=1)
    """Share of all steps spent decaying, for `warmup_stable_decay`."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step as a share of the peak."""

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run of `steps`."""
        return min(DEFAULT_WARMUP_STEPS, steps) if self.warmup_steps is None else self.warmup_steps


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraSettings(Settings):
    """Low-rank adapters beside frozen weights (Hu et al., 2021), merged on export."""

    rank: int = Field(default=16, ge=1)
    """Inner size of an adapter."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """The adapter's output is scaled by alpha / rank."""
    dora: bool = False
    """Learn the length of each row of a matrix apart from its direction (Liu et al., "DoRA",
    2024): often better at a low rank, and slower."""
    targets: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Which matrices of each layer get one."""


class ExportSettings(Settings):
    """Which weights the artifact holds, and in which type."""

    weights: Literal["last", "best"] = "last"
    """Those of the last step, or the best by validation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32 keeps the master weights exactly."""


class ValidationSettings(ExecutionSettings):
    """How often, and on how much, the model is measured while it is trained.

    Part of the fingerprint only where `export.weights` is `best`, since then it decides which
    weights these are.
    """

    every_steps: int = Field(default=16, ge=1)
    """Steps between validations, beside those before the first and after the last step."""
    rows: int = Field(default=32, ge=1)
    """Most validation rows read each time, chosen once by hash."""


class PlacementSettings(ExecutionSettings):
    """How the work is spread over processes and devices.

    Any placement trains on the same rows in the same order. Sums are taken in another order, so
    weights agree to float noise, not to the bit; in bfloat16 losses may part by some hundredths.
    """

    device: DeviceChoice = "auto"
    """`auto` trains on GPUs where there are some, else on the processor; `tpu` on all TPU chips of
    one machine, in the environment that `make setup-tpu` makes."""
    workers: int = Field(default=1, ge=1)
    """Training processes on a machine."""
    replicas: int = Field(default=1, ge=1)
    """Groups of workers that each hold the whole model; 1 shards it over all of them."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Neighboring workers that split every matrix between them, for layers too large for one; the
    rest of the workers shard and replicate. It has to divide the model's heads."""
    device_batch_size: int = Field(default=4, ge=1)
    """Rows per forward pass on one worker; the rest of the global batch is accumulated."""
    reader_processes: int = Field(default=0, ge=0)
    """Processes per worker that read rows ahead; 0 reads in the training process, at some hundred
    million tokens per second, which only the fastest storage and models call for more than."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again backwards: less memory, more time."""
    compile: Switch = "auto"
    """torch.compile of the layers; auto compiles on a GPU, where it pays within minutes."""
    deepspeed: DeepSpeedSettings | None = None
    """DeepSpeed's ZeRO in the place of FSDP2."""


class CheckpointingSettings(ExecutionSettings):
    """When the training state is saved, and how much of it stays."""

    every_steps: int = Field(default=8, ge=1)
    """Steps between checkpoints; what a failure can cost."""
    every_minutes: float | None = Field(default=15.0, gt=0)
    """Most minutes between checkpoints, where steps are long."""
    permanent_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints at multiples of this many steps stay while others rotate; absent: none."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept while training, beside the permanent ones."""
    in_background: Switch = "auto"
    """Train on while a checkpoint is copied in memory and written; auto does so on a GPU."""


class LoggingSettings(ExecutionSettings):
    """What a run writes down beside its metrics."""

    audit_rows: bool = False
    """Write down every row that each worker trained on, as proof of the order of the data."""
    profile_steps: tuple[int, ...] = ()
    """Steps whose profile is written to `profile/` in the run folder, for chrome://tracing."""
    weights_and_biases: str | None = None
    """Weights & Biases project that also gets the metrics; absent: none does."""
