"""When a checkpoint is due."""

import time
from collections.abc import Callable

from recipes.settings.sections import CheckpointingSettings

Clock = Callable[[], float]


class SavingPlan:
    """Every N steps and every M minutes, whichever comes first."""

    def __init__(self, settings: CheckpointingSettings, clock: Clock = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._saved_at = clock()

    def is_due(self, step: int) -> bool:
        """Whether the state after this step should be saved."""
        minutes = self._settings.every_minutes
        late = minutes is not None and self._clock() - self._saved_at >= minutes * 60
        return late or step % self._settings.every_steps == 0 or self.is_permanent(step)

    def is_permanent(self, step: int) -> bool:
        """Whether this step's checkpoint stays when others rotate."""
        every = self._settings.permanent_every_steps
        return every is not None and step % every == 0

    def saved(self) -> None:
        """Count the minutes again."""
        self._saved_at = self._clock()
