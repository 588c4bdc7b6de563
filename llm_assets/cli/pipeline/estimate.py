"""`llm-assets estimate` of a pipeline that trains here: how long, as fast as it trained before."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from artifacts.errors import UserError
from artifacts.progress import format_duration
from artifacts.shards.format import ShardStats
from llm_assets.cli.session import Session
from recipes.spec import total_steps


@dataclass(frozen=True)
class Training:
    """A training that could be next."""

    name: str
    steps: int
    tokens: int
    seconds: float
    cost: float | None
    """At `automation.cost_per_hour`; None where that is not set."""

    def line(self) -> str:
        """`checkpoint: 32 steps, 65,536 tokens, about 4 min 46 s`."""
        price = "" if self.cost is None else f", cost {self.cost:,.2f}"
        return (
            f"{self.name}: {self.steps:,} steps, {self.tokens:,} tokens, about "
            f"{format_duration(self.seconds)}{price}"
        )


@dataclass(frozen=True)
class Expectation:
    """What trainings of the current shards would take on this machine."""

    trainings: tuple[Training, ...]
    tokens_per_second: float
    """Of the training that made the current checkpoint."""

    def lines(self) -> Iterator[str]:
        """The same in words."""
        yield from (training.line() for training in self.trainings)
        yield f"At {self.tokens_per_second:,.0f} tokens per second, as the current checkpoint took."

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)


def expect(session: Session) -> Expectation:
    """Time of the training that the pipeline file asks for, and of one pass over the text.

    Raises:
        MissingArtifact: the text was not tokenized yet.
        UserError: nothing was trained yet, so nobody knows how fast this machine is.
    """
    settings = session.settings.checkpoint
    shards = session.record.current("tokenized_shards", needed_by="checkpoint")
    trained = session.record.find_current("checkpoint")
    if trained is None:
        raise UserError(
            "How fast this machine trains is known once it has trained: materialize `checkpoint` "
            "with a few steps (`checkpoint.budget.steps`) first. For a run on Google Cloud give "
            "--corpus-gb, --tokens or --parameters."
        )
    stats = ShardStats.model_validate(shards.stats)
    speed: float = trained.stats["tokens_per_second"]
    rows_per_step = settings.budget.global_batch_size
    hourly = session.settings.automation.cost_per_hour

    def training(name: str, steps: int) -> Training:
        tokens = steps * rows_per_step * stats.sequence_length
        seconds = tokens / speed
        return Training(
            name, steps, tokens, seconds, None if hourly is None else seconds / 3600 * hourly
        )

    whole = -(-shards.stats["rows"]["train"] // rows_per_step)
    return Expectation(
        (
            training("checkpoint, as its budget says", total_steps(settings, stats)),
            training("one pass over the training text", whole),
        ),
        speed,
    )
