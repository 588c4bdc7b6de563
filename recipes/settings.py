"""What recipes and strategies say of themselves, what they share, how they are found by name.

A package declares each as an entry point: its name, and the settings model that is its door.

    [project.entry-points."llm_assets.recipes"]
    classification = "recipes.encoders.settings:ClassificationSettings"

Importing this loads no torch.
"""

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from artifacts.errors import UserError
from artifacts.examples import Form
from artifacts.settings import Settings

RECIPES, STRATEGIES = "llm_assets.recipes", "llm_assets.strategies"
"""Groups of entry points, by which packages declare what they bring."""
OWN = "llm-assets"
"""The distribution whose recipes are covered by the code version of training."""
Precision = Literal["bfloat16", "float32", "float8"]
Switch = Literal["auto", "always", "never"]
DEFAULT_STEPS = 32
DEFAULT_WARMUP_STEPS = 3


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """What installed packages declare in a group, in the order of the names."""
    declared = sorted(entry_points(group=group), key=lambda entry: entry.name)
    return {entry.name: entry for entry in declared}


@cache
def settings_model(group: str, name: str) -> type[Settings]:
    """The settings that are declared; raises PydanticCustomError where none or broken ones are."""
    declared = installed(group).get(name)
    if declared is None:
        raise PydanticCustomError(
            "unknown_name",
            "nothing of this name is installed. Installed: {names}. Other packages can add more "
            "through the entry point group {group}; if one of llm-assets' own is missing, "
            "reinstall llm-assets",
            {"names": ", ".join(installed(group)) or "none", "group": group},
        )
    package = declared.dist.name if declared.dist else "an unnamed package"
    try:
        model = declared.load()
        if not issubclass(model, Settings):
            raise TypeError(f"{declared.value} is not a settings model")
    except (ImportError, AttributeError, TypeError) as error:
        raise PydanticCustomError(
            "broken_package",
            "what the package {package} provides under this name cannot be loaded: {error}",
            {"package": package, "error": str(error)},
        ) from error
    return model


def _validate(base: type[Settings], tag: str, group: str, values: Any) -> Any:
    """Validate settings by the model that their tag names."""
    if isinstance(values, base):
        return values
    if not isinstance(values, dict):
        return base.model_validate(values)
    name = str(values.get(tag, base.model_fields[tag].default))
    try:
        model = settings_model(group, name)
    except PydanticCustomError as fault:
        # A fault of the tag, so that the message names the setting that holds the unknown name.
        details = InitErrorDetails(type=fault, loc=(tag,), input=name)
        raise ValidationError.from_exception_data(base.__name__, [details]) from None
    return model.model_validate(values)


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


BUDGETS = ("steps", "tokens", "epochs")


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

    shape: Literal["warmup_stable_decay", "cosine"] = "warmup_stable_decay"
    """Hold the peak and then decay linearly, or decay along a cosine from the end of the
    warm-up."""
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


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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


class StrategySettings(Settings):
    """Another way than FSDP2 over processes to spread a model, or other hardware.

    `placement` asks for one by its name: `deepspeed: {stage: 2}`, or `device: tpu`. Packages bring
    more by entry points in the group `llm_assets.strategies`.
    """

    asked_by: ClassVar[str]
    """How the settings ask for it, such as `placement.device: tpu`."""
    builds: ClassVar[str]
    """`module:function` that makes the `recipes.distributed.strategy.Strategy`; it takes the spec,
    the workers, the precision and a function that gives the model."""
    joins: ClassVar[str | None] = None
    """`module:function` that makes the `Workers` of other hardware from the number of processes."""
    precision: ClassVar[Precision | None] = None
    """What `precision: auto` comes to on other hardware."""
    libraries: ClassVar[frozenset[str]] = frozenset({"torch"})
    """Those of the environment that trains and that decide the weights."""
    name: str
    """Which strategy this is; other packages may bring more."""

    def python(self) -> str:
        """The interpreter that trains; raises UserError where its environment is not there."""
        return sys.executable

    def faults(self, training: "TrainingSettings") -> list[str]:
        """Which settings do not go with it."""
        return []

    def state_bytes(self, parameters: int, trained: int, moments: int, workers: int) -> float:
        """Bytes of a GPU's memory that weights, gradients and the optimizer's `moments` of each
        number take at least; some parameters may be frozen."""
        return 0.0


def _strategy(values: Any) -> Any:
    return values if values is None else _validate(StrategySettings, "name", STRATEGIES, values)


def _short_forms(placement: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The strategies that settings of a placement give by short forms, each under the key that was
    written, and the other settings."""
    rest = {name: value for name, value in placement.items() if name not in installed(STRATEGIES)}
    strategies = {
        name: settings | {"name": name} if isinstance(settings, dict) else settings
        for name, settings in placement.items()
        if name not in rest and settings is not None
    }
    # `device: tpu` beside a section `tpu` asks for one strategy, not for two.
    if (device := rest.pop("device", "auto")) != "auto" and [device] != [*strategies]:
        strategies["device"] = {"name": device}
    return strategies, rest


def spell_out_strategy(placement: Any) -> Any:
    """Settings of a placement with its strategy under `strategy`, so that one of its settings can
    be replaced; faulty ones come back unchanged."""
    if not isinstance(placement, dict):
        return placement
    strategies, rest = _short_forms(placement)
    if len(strategies) != 1 or rest.get("strategy") is not None:
        return placement
    (rest["strategy"],) = strategies.values()
    return rest


class PlacementSettings(ExecutionSettings):
    """How the work is distributed over processes and devices.

    Every placement trains on the same rows in the same order. Sums are computed in a different
    order, so the weights agree up to rounding, but not bit for bit. The exception is the recipe
    `torchtune`, whose global batch grows with the number of workers.
    """

    workers: int | None = Field(default=None, ge=1)
    """Number of training processes over all machines. If unset, one locally, and on Google Cloud
    one for each accelerator of each machine. If a different number starts, the run fails before its
    first step."""
    replicas: int = Field(default=1, ge=1)
    """Number of worker groups that each hold the whole model; 1 shards it over all workers."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of neighboring workers that split every matrix between them, for layers too large for
    one worker; sharding and replication apply across these groups. Only for Llama, Mistral, Qwen2
    and Qwen3 models. It must divide the numbers of attention heads, key-value heads and
    feed-forward units."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Number of stages that the layers are split into, for models too large for one machine: stages
    exchange only hidden states. Only for the same models as `tensor_parallel`. Each group of
    `tensor_parallel` times `pipeline_parallel` workers gets an equal share of the global batch; it
    must be a multiple of `device_batch_size`, and at least `pipeline_parallel` times as large."""
    device_batch_size: int = Field(default=4, ge=1)
    """Maximum number of rows per forward pass on one worker, or on one TPU chip; the rest of its
    share of the global batch is processed by gradient accumulation."""
    activation_checkpointing: bool | None = None
    """Keep only each layer's input and recompute the rest in the backward pass, which saves memory
    but takes more time. If unset, this is done on GPUs whose memory is estimated to be too small
    otherwise, if the model supports it. Not available on TPUs."""
    compile: Switch = "auto"
    """Whether to compile the layers with torch.compile; `auto` does so on a GPU, where it pays off
    within minutes, but not with DeepSpeed, which does not support it."""
    strategy: Annotated[SerializeAsAny[StrategySettings | None], PlainValidator(_strategy)] = None
    """An alternative to the default, FSDP2 over processes on GPUs or, if there are none, on the
    CPU; written as `deepspeed: {...}` or `device: tpu`."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_strategy(cls, values: Any) -> Any:
        """`deepspeed: {stage: 2}` stands for a strategy of this name, and so does `device: tpu`."""
        if not isinstance(values, dict):
            return values
        strategies, rest = _short_forms(values)
        if len(strategies) + (rest.get("strategy") is not None) > 1:
            raise ValueError(f"give one strategy (found {' and '.join(strategies)})")
        for key, settings in strategies.items():
            try:
                rest["strategy"] = _strategy(settings)
            except ValidationError as error:
                # Under the key that was written.
                details = [
                    InitErrorDetails(
                        type=PydanticCustomError(fault["type"], fault["msg"]),
                        loc=(key, *fault["loc"]),
                        input=fault["input"],
                    )
                    for fault in error.errors()
                ]
                raise ValidationError.from_exception_data(cls.__name__, details) from None
        return rest

    def python(self) -> str:
        """The interpreter that trains; raises UserError where its environment is not there."""
        return self.strategy.python() if self.strategy else sys.executable

    @property
    def world_size(self) -> int:
        """The number of processes that a run is planned for."""
        return self.workers or 1


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


ModelFamily = Literal["causal", "sequence_to_sequence", "encoder"]


class TrainingSettings(Settings):
    """Settings that all training recipes share, in sections.

    The first sections determine the checkpoint and are part of its fingerprint; `validation`
    (unless `export.weights` is `best`), `placement`, `checkpointing` and `logging` say how the work
    is done and are not.
    """

    # A recipe derives from this or from `WarmStartSettings`, has its name in `recipe` as a Literal,
    # and answers what is asked below; `training_settings` finds it by that name.
    teaches: ClassVar[str]
    """`module:function` that makes the recipe's `recipes.objective.Objective` of such settings."""
    family: ClassVar[ModelFamily] = "causal"
    """Which kind of model it trains; how that serves follows from its architecture."""
    needs_masked_head: ClassVar[bool] = False
    """Whether an encoder has to come with the head that tells hidden tokens."""
    has_first_step: ClassVar[bool] = True
    """Whether a run of one step, by any schedule, takes the first step of a longer one."""
    recipe: str = "continued_pretraining"
    """The training recipe; other packages may provide more."""
    seed: int = Field(default=0, ge=0)
    """Seed for the order of the data, and for random weights (also of adapters or a new head) if a
    recipe needs them."""
    precision: Literal["auto", "bfloat16", "float32", "float8"] = "auto"
    """`bfloat16` keeps float32 master weights; `auto` uses it if the hardware is fast at it.
    `float8` is bfloat16 with the layers' matrix products in float8, for models of 1B parameters or
    more on an L4, H100 or later. What `auto` resolves to is part of the fingerprint."""
    replay_share: float = Field(default=0, ge=0, lt=1)
    """Share of the rows that are general text, replayed evenly throughout training to counter
    forgetting; `clean_corpus.split.sources` says which sources this text comes from. Values of 0.05
    to 0.25 are usual if such text is available."""
    budget: BudgetSettings = BudgetSettings()
    order: OrderSettings = OrderSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    export: ExportSettings = ExportSettings()
    validation: ValidationSettings = ValidationSettings()
    placement: PlacementSettings = PlacementSettings()
    checkpointing: CheckpointingSettings = CheckpointingSettings()
    logging: LoggingSettings = LoggingSettings()

    @property
    def form(self) -> Form:
        """What a corpus for this recipe consists of."""
        return "pretraining"

    def objective(self) -> Any:
        """The `recipes.objective.Objective`, for the programs; importing it loads torch."""
        return resolve_name(self.teaches)(self)

    @property
    def libraries(self) -> set[str]:
        """Those that decide the weights."""
        strategy = self.placement.strategy
        used = {"safetensors", "transformers", *(strategy.libraries if strategy else {"torch"})}
        return used | ({"torchao"} if self.precision == "float8" else set())

    def longest_input(self, row_tokens: int) -> int | None:
        """Tokens that the model is given at once of a row of so many; None where each row is cut to
        a length of its own."""
        return row_tokens

    def scoring(self) -> dict[str, Any]:
        """The settings that decide how models are compared, for the evaluation's fingerprint."""
        return {}

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        """Which weights training begins with."""
        return "base_model"

    @property
    def adapters(self) -> LoraSettings | None:
        """The adapters that are trained instead of all weights, if any."""
        return None

    @property
    def is_judged_in_bits(self) -> bool:
        """Whether an engine's log-probabilities of held-out text give the gate's metric as well.

        Encoders and encoder-decoders, which no such engine runs, need not say.
        """
        return True

    @property
    def answers_questions(self) -> bool:
        """Whether models take an exam and run lm-eval's tasks, as those do that a recipe's own
        scorer does not measure."""
        return self.family == "causal" and self.is_judged_in_bits

    def placed(self, processes: int) -> Self:
        """The settings for so many processes; raises UserError where they do not go with the
        others."""
        placement = self.placement.model_copy(update={"workers": processes})
        placed = self.model_copy(update={"placement": placement})
        if faults := placed.faults():
            raise UserError(f"`checkpoint`: {'; '.join(faults)}.")
        return placed

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if faults := self.faults():
            raise ValueError("; ".join(faults))
        return self

    def faults(self) -> list[str]:
        """Which settings do not go together."""
        faults = []
        warmup, steps = self.schedule.warmup_steps, self.budget.steps
        if steps and warmup and warmup > steps:
            faults.append(f"schedule.warmup_steps ({warmup}) is longer than the {steps} steps")
        if self.adapters and self.optimizer.name == "muon":
            faults.append("lora needs optimizer.name: adamw")
        split = {
            f"placement.{name}"
            for name in ("tensor_parallel", "pipeline_parallel")
            if getattr(self.placement, name) > 1
        }
        if self.adapters or self.optimizer.name == "muon":
            faults += [f"{name} cannot be combined with lora or muon" for name in sorted(split)]
        if self.precision == "float8":
            refused = sorted(split | ({"lora"} if self.adapters else set()))
            faults += [f"precision: float8 cannot be combined with {name}" for name in refused]
        if self.placement.strategy:
            faults += self.placement.strategy.faults(self)
        return faults

    def faults_beside(self, other: str, more: dict[str, bool]) -> list[str]:
        """Faults under another strategy: what needs FSDP2 over processes, and the settings in
        `more`."""
        placement = self.placement
        refused = {
            "precision: float8": self.precision == "float8",
            "optimizer.name: muon": self.optimizer.name == "muon",
            "placement.replicas": placement.replicas > 1,
            "placement.tensor_parallel": placement.tensor_parallel > 1,
            "placement.pipeline_parallel": placement.pipeline_parallel > 1,
            "placement.compile: always": placement.compile == "always",
            "checkpointing.in_background: always": self.checkpointing.in_background == "always",
        } | more
        return [f"{other} cannot be combined with {key}" for key in refused if refused[key]]

    def content(self) -> dict[str, Any]:
        """The settings that decide what the checkpoint is, for its fingerprint."""
        execution = {
            name
            for name in type(self).model_fields
            if isinstance(getattr(self, name), ExecutionSettings)
        }
        if self.export.weights == "best":
            # Which weights are the best depends on when they were compared, and on what.
            execution.remove("validation")
        return self.model_dump(mode="json", exclude=execution)


class WarmStartSettings(TrainingSettings):
    """Of recipes that begin with weights that have learned already."""

    initialize: Literal["base_model", "champion"] = "base_model"
    """Start from the base model's weights or from those of the champion (the version that should
    serve; the base model as long as nothing has been promoted), in either case with a new
    learning-rate warm-up."""

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        return self.initialize


def training_settings(values: Any) -> TrainingSettings:
    """Validate training settings of any recipe; raises pydantic's ValidationError."""
    return _validate(TrainingSettings, "recipe", RECIPES, values)


RecipeSettings = Annotated[SerializeAsAny[TrainingSettings], PlainValidator(training_settings)]
"""The settings of one training recipe; `recipe` says which."""


def package_of(settings: TrainingSettings) -> set[str]:
    """The package that brings the recipe, where that is another than this."""
    declared = installed(RECIPES)[settings.recipe].dist
    return {declared.name} - {OWN} if declared else set()
