"""The learning rate as a pure function of the step."""

import math

from recipes.settings.sections import ScheduleSettings


def learning_rate_factor(schedule: ScheduleSettings, step: int, steps: int) -> float:
    """Share of the peak learning rate for the 1-based `step` of a run of `steps`.

    Warm-up rises linearly and reaches the peak at its end; the last step has
    `final_fraction`. The stable form is that of Hu et al., "MiniCPM" (2024).
    """
    warmup = schedule.warmup(steps)
    if step < warmup:
        return step / warmup
    if schedule.shape == "cosine":
        progress = _progress(step, warmup, steps)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        decay_steps = round(steps * schedule.decay_fraction)
        share = 1 - _progress(step, steps - decay_steps, steps)
    return schedule.final_fraction + (1 - schedule.final_fraction) * share


def _progress(step: int, first: int, last: int) -> float:
    return min(max((step - first) / (last - first), 0.0), 1.0) if last > first else 0.0
