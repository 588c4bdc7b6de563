"""`llm-assets run`: the whole graph in one command, told from the events that Dagster records."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO
from uuid import uuid4

import dagster as dg
from rich.console import Console, JustifyMethod
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from artifacts.errors import UserError, shown, shown_in_line
from artifacts.leases import describe_holder
from artifacts.progress import counted
from artifacts.storage.files import is_local, make_private
from llm_assets.assets.stage import asset_key, failure_reason, was_interrupted
from llm_assets.automation.launched import ASSET_JOB, PIPELINE_TAG, PROCESS_TAG
from llm_assets.cli.pipeline.summary import print_summary
from llm_assets.cli.session import Session, open_session, use_this_folders_history
from llm_assets.config import PipelineSettings
from llm_assets.experiments import (
    ASSET,
    COLUMNS,
    RESULT,
    TrialResult,
    caption,
    partitions,
    plan_trials,
    ranked,
    rows,
)
from llm_assets.maintenance.cleaning import clean
from llm_assets.pipeline import JUDGED_TAG, REBUILD_TAG
from llm_assets.preflight.check import preflight

QUIET_INTERVAL_SECONDS = 10


class Progress:
    """Prints a line for each finished asset, and under it what the current one is doing.

    On a terminal the current line is alive; elsewhere a line is printed every ten seconds.
    """

    def __init__(self, console: Console, assets: Sequence[str], settings: PipelineSettings) -> None:
        self._console = console
        self._assets = assets
        self._beginning = settings.dagster_name("")
        self._started: dict[str, float] = {}
        self._results: dict[str, tuple[str, bool]] = {}
        self._last_printed = 0.0
        self.seconds: dict[str, float] = {}
        """Asset to the time it took, for those that were made."""
        self._spinner = Spinner("dots", "starting", style="status.spinner")
        # rich redirects what others print to the terminal, which would bypass the log. Only if the
        # log is the terminal should it do so, and keep the spinner's line below.
        is_shared = console.file is sys.stdout
        self._live = Live(
            self._spinner,
            console=console,
            transient=True,
            refresh_per_second=12.5,
            redirect_stdout=is_shared,
            redirect_stderr=is_shared,
        )
        self.interrupted = False

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def handle(self, entry: dg.EventLogEntry) -> None:
        """Dagster's event listener."""
        step = (entry.step_key or "").removeprefix(self._beginning)
        asset = step if step in self._assets else None
        event = entry.dagster_event
        # An entry without an event is a line that the step has logged.
        if event is None:
            if asset and entry.user_message:
                self._show(asset, entry.user_message)
        elif event.event_type == dg.DagsterEventType.STEP_START and asset:
            self._started[asset] = time.monotonic()
            self._show(asset, "started")
        elif event.event_type == dg.DagsterEventType.ASSET_MATERIALIZATION and asset:
            metadata = event.materialization.metadata
            summary, made_now = metadata.get("summary"), metadata.get("made_now")
            said = str(summary.value) if summary else ""
            # A stage that plans nothing need not say whether it made something, and counts as made
            # then.
            self._results[asset] = said, not made_now or bool(made_now.value)
        elif event.event_type == dg.DagsterEventType.STEP_SUCCESS and asset:
            self._finish(asset)
        elif event.event_type == dg.DagsterEventType.STEP_FAILURE:
            self._fail(step, event)
        elif event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            self._check(event.asset_check_evaluation_data)

    def _finish(self, asset: str) -> None:
        summary, was_made = self._results.get(asset, ("", True))
        seconds = time.monotonic() - self._started.get(asset, time.monotonic())
        duration = f"{seconds:7.1f} s" if was_made else "unchanged"
        if was_made:
            self.seconds[asset] = seconds
        self._print(f"[green]✓[/] {asset:<17} {duration}   {escape(summary)}")

    def _fail(self, step: str, event: Any) -> None:
        data = event.step_failure_data
        if was_interrupted(data):
            # There is no line for each step: whoever started the run says once that it was
            # interrupted.
            self.interrupted = True
            return
        self._print(f"[red]✗[/] {step:<17} {escape(shown(failure_reason(data)))}")

    def _check(self, evaluation: Any) -> None:
        if not evaluation.passed:
            mark = "[yellow]![/]" if evaluation.severity.value == "WARN" else "[red]✗[/]"
            name = evaluation.check_name.replace("_", " ")
            text = evaluation.description or f"check failed: {name}"
            self._print(f"{mark} {'':<17} {escape(shown(text))}")

    def _show(self, asset: str, message: str) -> None:
        position = f"{self._assets.index(asset) + 1}/{len(self._assets)}"
        line = f"{asset} ({position}) · {shown_in_line(message.splitlines()[0])}"
        if self._console.is_terminal:
            self._spinner.update(text=escape(line[: self._console.width - 4]))
        elif time.monotonic() - self._last_printed > QUIET_INTERVAL_SECONDS:
            self._print(f"  {escape(line)}")

    def _print(self, line: str) -> None:
        self._last_printed = time.monotonic()
        self._console.print(line, soft_wrap=True, highlight=False)


LOG_FOLDER = Path(".llm_assets/logs")
INTERRUPTED = "Interrupted. Nothing finished is lost: run the same command to continue."


def run_pipeline(verbose: bool, rebuild: Sequence[str] = (), is_judged: bool = True) -> int:
    """Make every asset, some though nothing changed, and print the summary; returns the exit code.

    Args:
        verbose: sends Dagster's own log to the terminal instead of a file.
        is_judged: whether there has to be enough text for the gate to judge on.

    Raises:
        UserError: one of these is none that can be, or the run could not succeed.
    """
    session = open_session()
    settings = session.settings
    started = time.monotonic()
    with _terminal(verbose) as (terminal, log_path):
        # People's own text may have what looks like an emoji, such as `:key:`.
        console = Console(file=terminal, emoji=False)
        description = escape(shown(settings.description))
        console.print(f"[bold]{settings.name}[/]  {description}", highlight=False)
        if not verbose:
            console.print(f"log: {log_path}\n", style="dim", highlight=False)
        # This is imported within the block, so that what the graph prints as it loads goes to the
        # log.
        from llm_assets.definitions import defs

        graph = defs()
        keys = _assets_in_order(graph)
        assets = [key.path[-1] for key in keys]
        # The endpoint is made in every run; all others are kept in the store.
        stored = [name for name in assets if name != "endpoint"]
        if unknown := set(rebuild) - set(stored):
            names = ", ".join(unknown)
            raise UserError(
                f"--rebuild: there is no asset {names}. Choose from: {', '.join(stored)}."
            )
        for note in preflight(settings, is_judged):
            console.print(f"[yellow]![/] {escape(note)}", soft_wrap=True, highlight=False)
        progress = Progress(console, assets, settings)
        # Named one by one, since the UI shows what is named as the run's target.
        tags = {REBUILD_TAG: ",".join(rebuild)} if rebuild else {}
        # With this tag `checkpoint` refuses to train where the gate could not judge the model.
        tags |= {JUDGED_TAG: "yes"} if is_judged else {}
        result = _execute(graph, progress, settings, keys, tags=tags)
        if result is None:
            console.print(f"\n{INTERRUPTED}")
            # As a shell counts a program that Ctrl-C ended: 128 and the signal's number.
            return 130
        if not result.success:
            log_hint = "" if verbose else f" Full log: {log_path}"
            console.print(f"\n[red]The run failed.[/]{log_hint}", highlight=False)
            return 1
        materializations = result.asset_materializations_for_node(settings.dagster_name("endpoint"))
        endpoint = materializations[0].metadata
        values = {name: entry.value for name, entry in endpoint.items()}
        print_summary(console, session, values, progress.seconds, time.monotonic() - started)
        # One in a bucket, which others may share, is cleaned only where somebody starts the
        # schedule.
        if is_local(settings.store):
            _clean_store(session, console)
    return 0


def _clean_store(session: Session, console: Console) -> None:
    """Delete what `retention` no longer keeps, and report it; a failure here fails no run."""
    try:
        cleaning = clean(
            session.record, session.registry, session.settings, True, lambda line: None
        )
    except (UserError, OSError) as error:
        console.print(f"[yellow]![/] Cleaning the store failed: {escape(shown(str(error)))}")
        return
    if cleaning.removals:
        console.print(
            f"Deleted {decimal(cleaning.bytes)} outside the limits of `retention`; "
            f"{decimal(cleaning.bytes_kept)} remain.",
            highlight=False,
        )


def materialize_assets(
    settings: PipelineSettings, assets: Sequence[str], run_config: dict[str, Any] | None = None
) -> None:
    """Make these assets, named without the pipeline's prefix, and print a line for each; raises
    UserError, with the name of the log, if one fails or is interrupted."""
    result, log_path = _run_in_this_process(settings, assets, run_config)
    if not result.success:
        raise UserError(
            f"The run failed. Run the same command to continue from here. Log: {log_path}"
        )


def _run_in_this_process(
    settings: PipelineSettings,
    assets: Sequence[str],
    run_config: dict[str, Any] | None = None,
    partition: str | None = None,
    quiet: bool = False,
) -> tuple[dg.ExecuteInProcessResult, Path]:
    """The result of making some assets, and the log of it; raises UserError once interrupted."""
    with _terminal() as (terminal, log_path):
        from llm_assets.definitions import defs

        graph = defs()
        keys = [asset_key(settings, name) for name in assets]
        # Lines are counted through the whole graph, except in a trial, which is a single step.
        steps = assets if partition else [key.path[-1] for key in _assets_in_order(graph)]
        progress = Progress(Console(file=terminal, quiet=quiet, emoji=False), steps, settings)
        result = _execute(graph, progress, settings, keys, run_config, partition=partition)
    if result is None:
        raise UserError(INTERRUPTED)
    return result, log_path


def _execute(
    graph: dg.Definitions,
    progress: Progress,
    settings: PipelineSettings,
    assets: Sequence[dg.AssetKey],
    run_config: dict[str, Any] | None = None,
    tags: Mapping[str, str] = MappingProxyType({}),
    partition: str | None = None,
) -> dg.ExecuteInProcessResult | None:
    """Run the job of all assets for some of them; None where it was interrupted."""
    run_id = str(uuid4())
    with progress, dg.DagsterInstance.get() as instance:

        def follow(entry: dg.EventLogEntry) -> None:
            # Every step that is interrupted has an event, and one request is enough.
            is_handled = progress.interrupted
            progress.handle(entry)
            if progress.interrupted and not is_handled and (run := instance.get_run_by_id(run_id)):
                # Without a request to cancel it, a run that ends like this would count as failed.
                instance.report_run_canceling(run)

        instance.add_event_listener(run_id, follow)
        try:
            result = graph.resolve_job_def(ASSET_JOB).execute_in_process(
                instance=instance,
                run_id=run_id,
                # A failed step is told by its event, in a line, without a trace.
                raise_on_error=False,
                asset_selection=assets,
                partition_key=partition,
                run_config=run_config,
                # The process, so that a run that dies without a word can be told from one that goes
                # on.
                tags={PIPELINE_TAG: settings.name, PROCESS_TAG: describe_holder(), **tags},
            )
        except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
            return None
    # Dagster may also return a result, in which the interrupted step has failed.
    return None if progress.interrupted else result


def _assets_in_order(defs: dg.Definitions) -> list[dg.AssetKey]:
    """What a run of the whole graph makes; steps are named without the prefix."""
    graph = defs.resolve_asset_graph()
    # Neither trials, each of which is chosen, nor sources, which nobody here makes.
    keys = graph.unpartitioned_asset_keys & graph.materializable_asset_keys
    return [key for key in graph.toposorted_asset_keys if key in keys]


@contextmanager
def _terminal(verbose: bool = False) -> Iterator[tuple[TextIO, Path]]:
    """The terminal to write on, and the log file that receives all other output meanwhile.

    File descriptors are replaced, not `sys.stdout`, so that Spark's Java and other children are
    quiet too; nothing is replaced with `verbose`. From here on, Dagster reads this folder's
    dagster.yaml.
    """
    use_this_folders_history()
    log_path = LOG_FOLDER / f"run-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    if verbose:
        yield sys.stdout, log_path
        return
    make_private(log_path.parent)
    # Lines that are still buffered belong on the terminal.
    sys.stdout.flush()
    sys.stderr.flush()
    descriptors = os.dup(1), os.dup(2)
    # The terminal gets a descriptor of its own, since 1 becomes that of the log.
    with log_path.open("w") as log, os.fdopen(os.dup(1), "w") as terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal, log_path
        finally:
            # Lines that are still buffered belong in the log.
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)


WORDS = ("settings", "verdict")
"""Columns that hold words, not numbers."""


def run_experiment(changes: Mapping[str, Any], quiet: bool) -> list[TrialResult]:
    """Try all combinations of some settings' values; the results, best first.

    Raises:
        UserError: a key or a value is wrong, or the experiment was interrupted.
    """
    session = open_session()
    settings, gate = session.settings, session.settings.model_version.gate
    # Every combination is checked before the first of them trains.
    trials = [trial.name for trial in plan_trials(session.path, changes)]
    # Trials are compared on validation text, by the deciding metric alone, and never judged.
    asked_nothing = settings.eval_metrics.model_copy(update={"tasks": ()})
    preflight(settings.model_copy(update={"eval_metrics": asked_nothing}), is_judged=False)
    clean = session.record.find_current("clean_corpus")
    least, share = gate.minimum_documents, settings.clean_corpus.split.validation
    # If the split changes, the number of documents is not yet known.
    is_known = clean and clean.manifest.settings["split"]["validation"] == share
    documents = clean.stats["splits"].get("validation", 0) if clean and is_known else least
    if documents < least and not any(key.startswith("clean_corpus.") for key in changes):
        Console(quiet=quiet, emoji=False).print(
            f"[yellow]![/] Validation has {counted(documents, 'document')}, and a verdict takes "
            f"{least}: it will be `too few documents`. Raise `clean_corpus.split.validation`, or "
            "add text.",
            highlight=False,
        )
    use_this_folders_history()
    with dg.DagsterInstance.get() as instance:
        # All before the first is tried: the more there are, the wider the interval of each.
        instance.add_dynamic_partitions(str(partitions(settings).name), trials)
    return ranked(_try(settings, trial, quiet) for trial in trials)


def _try(settings: PipelineSettings, trial: str, quiet: bool) -> TrialResult:
    result, _ = _run_in_this_process(settings, [ASSET], partition=trial, quiet=quiet)
    for event in result.filter_events(lambda event: event.is_step_failure):
        reason = failure_reason(event.step_failure_data)
        return TrialResult(trial=trial, verdict="failed", reason=reason)
    (materialization,) = result.asset_materializations_for_node(settings.dagster_name(ASSET))
    return TrialResult.model_validate(materialization.metadata[RESULT].value)


def print_results(console: Console, results: list[TrialResult]) -> None:
    columns = COLUMNS if any(result.cost is not None for result in results) else COLUMNS[:-1]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in columns:
        side: JustifyMethod = "left" if name in WORDS else "right"
        table.add_column(name, justify=side, overflow="fold")
    for settings, *figures in rows(results):
        cells = [settings.replace(" ", "\n"), *figures][: len(columns)]
        table.add_row(*(escape(shown(cell)) for cell in cells))
    console.print(table, highlight=False)
    console.print(caption(results), highlight=False)
