"""Pictures for the Dagster metadata, drawn without a display, each once.

Dagster shows Markdown of less than 1,000 characters at once and hides the rest behind a click, so
what should be seen at a glance is text.
"""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec

import dagster as dg

from artifacts.cache import cache_key, cached

SPARKS = "▁▂▃▄▅▆▇█"
SPARKS_WIDTH = 40
INK = "#1f4fd8"
MUTED = "#9aa5b8"
MOST_LABELS = 20


def sparkline(values: Sequence[float]) -> str:
    """A curve of at most `SPARKS_WIDTH` block characters; gaps where a value is not finite."""
    step = max(1, math.ceil(len(values) / SPARKS_WIDTH))
    chunks = [values[start : start + step] for start in range(0, len(values), step)]
    means = [sum(chunk) / len(chunk) for chunk in chunks]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return ""
    # A curve of equal values has no span to divide by.
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        SPARKS[round((value - low) / span * (len(SPARKS) - 1))] if math.isfinite(value) else " "
        for value in means
    )


MEAN_PARTS = 8
"""Parts into which a training is divided; one of them is the length of the running mean."""


def loss_line(records: Sequence[Mapping[str, Any]]) -> str:
    """How the training loss went, by a running mean: a single batch's is mostly noise.

    Args:
        records: a training's metrics, each with its `loss`, which is None where it was no number.
    """
    losses = [math.nan if record["loss"] is None else record["loss"] for record in records]
    length = max(1, len(losses) // MEAN_PARTS)
    ends = range(length, len(losses) + 1)
    means = [sum(losses[end - length : end]) / length for end in ends]
    line = f"{means[0]:.3f} {sparkline(means)} {means[-1]:.3f}"
    return line if length == 1 else f"{line}, averaged over {length} steps"


@dataclass(frozen=True)
class Picture:
    """What is drawn once somebody is shown it."""

    draw: "partial[Any]"
    """Gives matplotlib's figure; its first argument is the title."""

    def markdown(self, cache: str | None = None) -> dg.MarkdownMetadataValue:
        """The picture, from the cache if it was drawn before: a run without changes shows all of
        them again, and matplotlib takes a second to import and draw."""
        # The source of this module is part of the key (`cache_key`), so a change of how pictures
        # are drawn draws them again.
        arguments = [self.draw.func.__name__, repr(self.draw.args), repr(self.draw.keywords)]
        key = cache_key("picture", __name__, ["matplotlib"], drawn=arguments)
        encoded = base64.b64encode(cached(cache, key, self._as_png)).decode()
        return dg.MetadataValue.md(f"![{self.draw.args[0]}](data:image/png;base64,{encoded})")

    def _as_png(self) -> bytes:
        buffer = io.BytesIO()
        self.draw().savefig(buffer, format="png")
        return buffer.getvalue()


Given = ParamSpec("Given")


def picture(draw: Callable[Given, Any]) -> Callable[Given, Picture]:
    """Put off drawing."""

    def describe(*given: Given.args, **named: Given.kwargs) -> Picture:
        return Picture(partial(draw, *given, **named))

    return describe


@picture
def curve(
    title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> Any:
    """Lines over a shared axis; the first series is drawn strongest."""
    figure, axes = _axes(title, x_label, y_label)
    for number, (name, points) in enumerate(series.items()):
        horizontal, vertical = zip(*points, strict=True) if points else ((), ())
        axes.plot(
            horizontal,
            vertical,
            label=name,
            color=INK if number == 0 else MUTED,
            marker="o" if len(points) < 12 else None,
            linewidth=1.8,
        )
    if len(series) > 1:
        axes.legend(frameon=False)
    return figure


@picture
def bars(title: str, x_label: str, y_label: str, counts: Mapping[int, int]) -> Any:
    """How often which whole number occurs, counts on a logarithmic scale."""
    figure, axes = _axes(title, x_label, y_label)
    ordered = sorted(counts)
    places = range(len(ordered))
    axes.bar(places, [counts[number] for number in ordered], color=INK)
    axes.set_yscale("log")
    # More labels overlap, and take longer to lay out than all else of a run without changes.
    step = math.ceil(len(ordered) / MOST_LABELS) or 1
    axes.set_xticks(places[::step], [str(number) for number in ordered[::step]])
    return figure


@picture
def intervals(title: str, x_label: str, rows: Mapping[str, Sequence[Any]]) -> Any:
    """One line a row: a value between the low and the high end of its interval.

    Rows with a missing bound are left out.
    """
    finite = [(name, bounds) for name, bounds in rows.items() if None not in bounds]
    figure, axes = _axes(title, x_label, "", height=0.6 + 0.45 * max(len(finite), 2))
    for position, (_, (low, value, high)) in enumerate(reversed(finite)):
        axes.plot([low, high], [position, position], color=MUTED, linewidth=3)
        axes.plot([value], [position], marker="o", color=INK)
    axes.set_yticks(range(len(finite)), [name for name, _ in reversed(finite)])
    axes.set_ylim(-0.6, len(finite) - 0.4)
    return figure


@picture
def matrix(
    title: str, x_label: str, y_label: str, names: Sequence[str], counts: Sequence[Sequence[int]]
) -> Any:
    """A square table of counts, darker where there are more; a row each for `y_label`."""
    figure, axes = _axes(title, x_label, y_label, height=1.6 + 0.35 * len(names))
    axes.grid(False)
    axes.imshow(counts, cmap="Blues", aspect="auto")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    largest = max(max(row) for row in counts)
    for y, row in enumerate(counts):
        for x, count in enumerate(row):
            color = "white" if count > largest / 2 else "black"
            axes.text(x, y, f"{count:,}", ha="center", va="center", color=color)
    return figure


def _axes(title: str, x_label: str, y_label: str, height: float = 3.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    # Not by pyplot, which keeps every figure and looks for a display.
    figure = Figure(figsize=(6.4, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    # Over the whole picture: over the axes alone a long one is cut off.
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
