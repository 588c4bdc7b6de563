"""A readable account of a run, from the events that Dagster records."""

import time
from typing import Any

from dagster import DagsterEventType, EventLogEntry
from rich.console import Console
from rich.markup import escape

from artifacts.shown import shown, shown_in_line
from llm_assets.assets.stage import failure_reason, was_interrupted

QUIET_INTERVAL_SECONDS = 10


class Progress:
    """Prints a line for each finished asset, and under it what the current one is doing.

    On a terminal the current line is alive; elsewhere a line is printed every ten seconds.
    """

    def __init__(self, console: Console, assets: list[str]) -> None:
        self._console = console
        self._assets = assets
        self._started: dict[str, float] = {}
        self._results: dict[str, tuple[str, bool]] = {}
        self._last_printed = 0.0
        self._status = console.status("starting", spinner="dots")
        self.interrupted = False

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.stop()

    def handle(self, entry: EventLogEntry) -> None:
        """Dagster's event listener."""
        step = entry.step_key or ""
        asset = step if step in self._assets else None
        event = entry.dagster_event
        if event is None:
            if asset and entry.user_message:
                self._show(asset, entry.user_message)
        elif event.event_type == DagsterEventType.STEP_START and asset:
            self._started[asset] = time.monotonic()
            self._show(asset, "started")
        elif event.event_type == DagsterEventType.ASSET_MATERIALIZATION and asset:
            self._keep_result(asset, event.materialization.metadata)
        elif event.event_type == DagsterEventType.STEP_SUCCESS and asset:
            self._finish(asset)
        elif event.event_type == DagsterEventType.STEP_FAILURE:
            self._fail(step, event)
        elif event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
            self._check(event.asset_check_evaluation_data)

    def _keep_result(self, asset: str, metadata: Any) -> None:
        summary = metadata.get("summary")
        made = metadata.get("made_now")
        self._results[asset] = (
            str(summary.value) if summary else "",
            bool(made.value) if made else True,
        )

    def _finish(self, asset: str) -> None:
        summary, made = self._results.get(asset, ("", True))
        seconds = time.monotonic() - self._started.get(asset, time.monotonic())
        duration = f"{seconds:6.1f} s" if made else "   as is"
        self._print(f"[green]✓[/] {asset:<17} {duration}   {escape(summary)}")

    def _fail(self, step: str, event: Any) -> None:
        data = event.step_failure_data
        if was_interrupted(data):
            self.interrupted = True
            return
        self._print(f"[red]✗[/] {step:<17} {escape(shown(failure_reason(data)))}")

    def _check(self, evaluation: Any) -> None:
        if not evaluation.passed:
            mark = "[yellow]![/]" if evaluation.severity.value == "WARN" else "[red]✗[/]"
            name = evaluation.check_name.replace("_", " ")
            said = evaluation.description or f"check failed: {name}"
            self._print(f"{mark} {'':<17} {escape(shown(said))}")

    def _show(self, asset: str, message: str) -> None:
        position = f"{self._assets.index(asset) + 1}/{len(self._assets)}"
        line = f"{asset} ({position}) · {shown_in_line(message.splitlines()[0])}"
        if self._console.is_terminal:
            self._status.update(escape(line[: self._console.width - 4]))
        elif time.monotonic() - self._last_printed > QUIET_INTERVAL_SECONDS:
            self._print(f"  {escape(line)}")

    def _print(self, line: str) -> None:
        self._last_printed = time.monotonic()
        self._console.print(line, soft_wrap=True, highlight=False)
