"""`llm-assets run`: the whole graph in one command."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from dagster import AssetKey, DagsterInstance, Definitions, ExecuteInProcessResult
from rich.console import Console
from rich.markup import escape

from artifacts.errors import UserError
from artifacts.leases.holder import describe_holder
from artifacts.storage.machine import make_private
from llm_assets.automation.jobs import asset_key
from llm_assets.automation.launched import PIPELINE_TAG, PROCESS_TAG
from llm_assets.cli.progress import Progress
from llm_assets.cli.session import use_this_folders_history
from llm_assets.cli.summary import print_summary
from llm_assets.config import PipelineSettings, config_path, load_settings
from llm_assets.preflight import preflight

LOG_FOLDER = Path(".llm_assets/logs")
INTERRUPTED = "Interrupted. Nothing is lost: the same command goes on from here."


def run_pipeline(verbose: bool) -> int:
    """Make every asset and print the summary; returns the exit code.

    Dagster's own log goes to a file, or to the terminal with `verbose`.
    """
    path = config_path()
    settings = load_settings(path)
    use_this_folders_history()
    log_path = _log_path()
    started = time.monotonic()
    with _terminal(log_path, verbose) as terminal:
        console = Console(file=terminal)
        console.print(f"[bold]{settings.name}[/]  {settings.description}", highlight=False)
        if not verbose:
            console.print(f"log: {log_path}\n", style="dim", highlight=False)
        for note in preflight(settings):
            console.print(f"[yellow]![/] {escape(note)}", soft_wrap=True, highlight=False)
        from llm_assets.definitions import defs

        progress = Progress(console, _assets_in_order(defs))
        with progress:
            result = _execute(defs, progress, settings.name)
        if result is None or progress.interrupted:
            console.print(f"\n{INTERRUPTED}")
            return 130
        if not result.success:
            console.print(f"\n[red]The run failed.[/] The whole log: {log_path}", highlight=False)
            return 1
        endpoint = result.asset_materializations_for_node("endpoint")[0].metadata
        told = {name: entry.value for name, entry in endpoint.items()}
        print_summary(console, settings, told, time.monotonic() - started)
    return 0


def materialize_assets(
    settings: PipelineSettings, assets: Sequence[str], run_config: dict[str, Any] | None = None
) -> None:
    """Make some assets of the graph in this process, with a line for each as it is made.

    Args:
        assets: by their names, without the pipeline's prefix.

    Raises:
        UserError: one of them failed, or the run was interrupted; the message names the log.
    """
    use_this_folders_history()
    log_path = _log_path()
    with _terminal(log_path, verbose=False) as terminal:
        from llm_assets.definitions import defs

        progress = Progress(Console(file=terminal), _assets_in_order(defs))
        keys = [asset_key(settings, name) for name in assets]
        with progress:
            result = _execute(defs, progress, settings.name, keys, run_config)
    if result is None or progress.interrupted:
        raise UserError(INTERRUPTED)
    if not result.success:
        raise UserError(f"The run failed; the same command goes on from here. Its log: {log_path}")


def _log_path() -> Path:
    return LOG_FOLDER / f"run-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"


def _execute(
    defs: Definitions,
    progress: Progress,
    pipeline: str,
    assets: Sequence[AssetKey] | None = None,
    run_config: dict[str, Any] | None = None,
) -> ExecuteInProcessResult | None:
    from dagster import DagsterExecutionInterruptedError
    from dagster._core.utils import make_new_run_id

    run_id = make_new_run_id()
    with DagsterInstance.get() as instance:
        instance.add_event_listener(run_id, progress.handle)
        try:
            return defs.resolve_implicit_global_asset_job_def().execute_in_process(
                instance=instance,
                run_id=run_id,
                raise_on_error=False,
                asset_selection=assets,
                run_config=run_config,
                tags={PIPELINE_TAG: pipeline, PROCESS_TAG: describe_holder()},
            )
        except (KeyboardInterrupt, DagsterExecutionInterruptedError):
            return None


def _assets_in_order(defs: Definitions) -> list[str]:
    """The names of their steps, which have no prefix."""
    graph = defs.resolve_asset_graph()
    return [key.path[-1] for key in graph.toposorted_asset_keys]


@contextmanager
def _terminal(log_path: Path, verbose: bool) -> Iterator[TextIO]:
    """The terminal to write on, while everybody else's output goes to the log file.

    File descriptors are replaced, not `sys.stdout`, so that Spark's Java and other children are
    quiet too.
    """
    if verbose:
        yield sys.stdout
        return
    make_private(log_path.parent)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with log_path.open("w") as log, os.fdopen(os.dup(1), "w") as terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
