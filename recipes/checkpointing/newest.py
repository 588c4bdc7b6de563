"""Which checkpoint all workers go on from: the first chooses, each reads its part of the files."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from artifacts import checkpoints
from artifacts.checkpoints import Checkpoint
from artifacts.errors import DamagedArtifact, UserError
from recipes.distributed.workers import Workers


class Choice(NamedTuple):
    """What the first worker tells the others."""

    found: Checkpoint | UserError | None
    is_final: bool
    """Otherwise it is to be looked at by all."""


def find_newest(
    run_url: str, content: dict[str, Any], report: Callable[[str], None], workers: Workers
) -> Checkpoint | None:
    """The newest valid checkpoint of a run, the same one on all workers.

    Every file is read once, by one of them. None goes on before all have found their part whole.

    Raises:
        UserError, DamagedArtifact: as `artifacts.checkpoints.find_newest`, on all workers alike.
    """
    if not workers.is_rank_zero:
        return _follow(workers)

    def check(checkpoint: Checkpoint) -> None:
        workers.share(Choice(checkpoint, is_final=False))
        _check_together(checkpoint, workers)

    found: Checkpoint | UserError | None
    try:
        found = checkpoints.find_newest(run_url, content, report, check)
    except UserError as error:
        found = error
    return _agreed(workers.share(Choice(found, is_final=True)))


def _follow(workers: Workers) -> Checkpoint | None:
    """Look at what the first worker looks at, until it has chosen."""
    while True:
        choice = workers.share(Choice(None, is_final=False))
        if choice.is_final:
            return _agreed(choice)
        assert isinstance(choice.found, Checkpoint)
        with suppress(DamagedArtifact):
            _check_together(choice.found, workers)


def _check_together(checkpoint: Checkpoint, workers: Workers) -> None:
    """Raise the fault of the first worker that has found one, on all of them."""
    fault: DamagedArtifact | None = None
    try:
        checkpoints.verify(checkpoint, workers.rank, workers.count)
    except DamagedArtifact as error:
        fault = error
    for damage in filter(None, workers.gather(fault)):
        raise damage


def _agreed(choice: Choice) -> Checkpoint | None:
    if isinstance(choice.found, UserError):
        raise choice.found
    return choice.found
