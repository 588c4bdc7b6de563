"""What recipes and strategies say of themselves; importing this loads no torch."""

import sys
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, SerializeAsAny, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from artifacts.errors import UserError
from artifacts.examples import Form
from artifacts.settings import Settings
from recipes.installed import RECIPES, STRATEGIES, installed, validate_by_name
from recipes.sections import (
    BudgetSettings,
    CheckpointingSettings,
    ExecutionSettings,
    ExportSettings,
    LoggingSettings,
    LoraSettings,
    OptimizerSettings,
    OrderSettings,
    ScheduleSettings,
    Switch,
    ValidationSettings,
)

OWN = "llm-assets"
"""The distribution whose recipes are covered by the code version of training."""
Precision = Literal["bfloat16", "float32", "float8"]
ModelFamily = Literal["causal", "sequence_to_sequence", "encoder"]


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
    return (
        values if values is None else validate_by_name(StrategySettings, "name", STRATEGIES, values)
    )


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
    hang_minutes: float = Field(default=120, gt=0)
    """Minutes that loading the model, a step with the validation and saving after it, or writing
    the trained model may take, not counting time in which the process or its machine is stopped. A
    training that takes longer is taken to hang: its log gets the stacks of all threads, and it is
    restarted from its newest checkpoint like one that was killed. Lower it where machines cost
    money by the hour."""
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
    return validate_by_name(TrainingSettings, "recipe", RECIPES, values)


RecipeSettings = Annotated[SerializeAsAny[TrainingSettings], PlainValidator(training_settings)]
"""The settings of one training recipe; `recipe` says which."""


def package_of(settings: TrainingSettings) -> set[str]:
    """The package that brings the recipe, where that is another than this."""
    declared = installed(RECIPES)[settings.recipe].dist
    return {declared.name} - {OWN} if declared else set()
