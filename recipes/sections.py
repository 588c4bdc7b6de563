"""The sections that the settings of all training recipes share; importing this loads no torch."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from artifacts.settings import Settings

Switch = Literal["auto", "always", "never"]
BUDGETS = ("steps", "tokens", "epochs")
DEFAULT_STEPS = 32
DEFAULT_WARMUP_STEPS = 3
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def chosen(switch: Switch, automatic: bool) -> bool:
    """What a three-way switch means where `auto` would give `automatic`."""
    return automatic if switch == "auto" else switch == "always"


class ExecutionSettings(Settings):
    """A section that says where and how the work is done, never what comes of it.

    Sections of this kind stay out of the checkpoint's fingerprint, so a run goes on after any
    change to them.
    """


class BudgetSettings(Settings):
    """How much to train: one of steps, tokens and epochs, in global batches of rows."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole run; 32 if steps, tokens and epochs are all unset."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens to train on, instead of `steps`; rounded up to whole steps. Fewer than one step takes
    are rejected."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the train split, instead of `steps`; rounded up to whole steps; replayed rows
    come on top. With `initialize: champion`, a pass covers only rows that the champion and its
    predecessors have seen less than half of (all rows if there are none), plus the share in
    `order.seen_share`."""
    global_batch_size: int = Field(default=4, ge=1)
    """Rows per step, over all workers and accumulation steps."""

    @model_validator(mode="before")
    @classmethod
    def _default(cls, values: Any) -> Any:
        # Not the default of the field `steps`: it has to stay unset beside `tokens` or `epochs`.
        if isinstance(values, dict) and all(values.get(name) is None for name in BUDGETS):
            return values | {"steps": DEFAULT_STEPS}
        return values

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) != 1:
            raise ValueError(f"give one of steps, tokens, epochs (found {' and '.join(budgets)})")
        return self


class OrderSettings(Settings):
    """Which rows a run that continues from the champion reads, and in which order; other runs read
    all rows alike."""

    new_first: bool = True
    """Train on the newest text first, then on everything else that the lineage (the champion and
    its predecessors) has not seen."""
    seen_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of the rows (those of `replay_share` aside) that are taken from what the lineage has
    seen before, to counter forgetting. Ibrahim et al. (2024) replay 5% if the text shifts little
    and 25% if it shifts a lot, for example to another language."""


class OptimizerSettings(Settings):
    """How gradients update the weights, and which gradients are skipped."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` uses Muon for the matrices of the layers and AdamW for the rest."""
    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    """Peak learning rate; low, since the base model is already trained."""
    weight_decay: float = Field(default=0.1, ge=0, le=10)
    """Decoupled weight decay on matrices; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates for the first and second moments."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    skip_gradient_above: float = Field(default=10.0, gt=1)
    """A step is skipped if its gradient norm is more than this many times the median of the last 64
    accepted ones (once there are 16), or if its loss or gradient is not finite."""
    accept_after_skips: int = Field(default=4, ge=1)
    """After this many consecutive steps are skipped for their gradient norm, their norms replace
    the recent ones, so that training continues on text of a different kind."""
    stop_after_skips: int = Field(default=8, ge=1)
    """Number of consecutive skipped steps that ends training; the gate then rejects the result."""

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("a decay rate is at least 0 and below 1")
        return betas


class ScheduleSettings(Settings):
    """The learning rate over the run, as a share of `optimizer.learning_rate`."""

    shape: Literal["warmup_stable_decay", "cosine", "linear"] = "warmup_stable_decay"
    """Hold the peak and then decay linearly, or decay from the end of the warm-up, along a cosine
    or linearly, as the Hugging Face Trainer does by default (with `final_fraction: 0`)."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps of linear warm-up from zero, at most the steps of the run; if unset, three."""
    decay_fraction: float = Field(default=0.3, ge=0, le=1)
    """Share of all steps spent decaying, for `warmup_stable_decay`; with 0, the peak is held to the
    end."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step, as a share of the peak."""

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run of `steps`."""
        return min(DEFAULT_WARMUP_STEPS, steps) if self.warmup_steps is None else self.warmup_steps


class LoraSettings(Settings):
    """Low-rank adapters beside frozen weights (Hu et al., 2021), merged on export."""

    rank: int = Field(default=16, ge=1)
    """Inner dimension of an adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    dora: bool = False
    """Learn the length of each matrix row separately from its direction (Liu et al., "DoRA", 2024):
    often better at a low rank, but slower."""
    targets: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Which matrices of each layer get an adapter."""


class ExportSettings(Settings):
    """Which weights the artifact contains, and in which data type."""

    weights: Literal["last", "best"] = "last"
    """The weights of the last step, or those of the best validation after training began."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32 keeps the master weights exactly."""


class ValidationSettings(ExecutionSettings):
    """How often, and on how much text, the model is validated during training.

    These settings are part of the fingerprint only if `export.weights` is `best`, since they then
    determine which weights are exported.
    """

    every_steps: int = Field(default=16, ge=1)
    """Steps between validations, in addition to those before the first and after the last step."""
    rows: int = Field(default=32, ge=1)
    """Maximum number of validation rows to read each time, always the same ones."""


class CheckpointingSettings(ExecutionSettings):
    """When the training state is saved, and which checkpoints are kept."""

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; a failure costs the steps since the newest one. If unset, 8, or as
    many more as keep saving below a twentieth of the time; on a GPU, where steps are short, only
    `every_minutes` applies. The last step is always saved, and so is the step at which training is
    asked to stop."""
    every_minutes: float | None = Field(default=15.0, gt=0)
    """Maximum minutes between checkpoints, checked after each step; `null` means no limit."""
    permanent_every_steps: int | None = Field(default=None, ge=1)
    """At multiples of this many steps, a checkpoint is saved that is kept while others rotate; if
    unset, none is. Once the model is exported, `retention.optimizer_state` decides whether they
    are still kept."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep during training, in addition to the permanent ones."""
    in_background: Switch = "auto"
    """Continue training while a checkpoint is copied in memory and written; `auto` does so on a
    GPU, but not with DeepSpeed, which does not support it."""


class LoggingSettings(ExecutionSettings):
    """What a run records besides its metrics."""

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between values in TensorBoard and Weights & Biases, and between hardware readings. The
    last step is always logged, and `metrics.jsonl` has a line for every step. If unset, 1, or 10 on
    a GPU, where steps are short."""
    audit_rows: bool = False
    """Record every row that each worker trained on, in `rows-<worker>.jsonl` in the run folder, as
    proof of the order of the data."""
    profile_steps: tuple[int, ...] = ()
    """Steps whose profiles are written to `profile/` in the run folder, for chrome://tracing."""
    weights_and_biases: str | None = None
    """Weights & Biases project that also receives the metrics, which needs the package `wandb`; if
    unset, none does."""
