"""`llm-assets experiment`: other settings side by side, and one table of what came of them."""

from collections.abc import Mapping
from typing import Any

from dagster import AssetMaterialization
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from artifacts.errors import shown
from llm_assets.cli.pipeline.run import run_job
from llm_assets.config import config_path, load_settings
from llm_assets.experiments.job import EXPERIMENT, RESULT, experiment_config
from llm_assets.experiments.result import COLUMNS, TrialResult, caption, ranked, rows
from llm_assets.experiments.trials import plan_trials
from llm_assets.preflight import preflight, seconds_before_run

WORDS = ("settings", "verdict")
"""Columns that are no numbers."""


def run_experiment(changes: Mapping[str, Any], quiet: bool) -> list[TrialResult]:
    """Try all combinations of some settings' values; the results, best first.

    Raises:
        UserError: a key or a value is wrong, or the experiment was interrupted.
    """
    path = config_path()
    settings = load_settings(path)
    plan_trials(path, changes)
    preflight(settings, seconds_before_run(settings), is_judged=False)
    ended = run_job(settings, EXPERIMENT, experiment_config(dict(changes)), quiet)
    events = ended.filter_events(lambda event: event.event_type_value == "ASSET_MATERIALIZATION")
    return ranked(_result(event.materialization) for event in events)


def _result(event: AssetMaterialization) -> TrialResult:
    return TrialResult.model_validate(event.metadata[RESULT].value)


def print_results(console: Console, results: list[TrialResult]) -> None:
    """The table, and what its figures are."""
    columns = COLUMNS if any(one.cost is not None for one in results) else COLUMNS[:-1]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in columns:
        side: JustifyMethod = "left" if name in WORDS else "right"
        table.add_column(name, justify=side, no_wrap=name != "verdict")
    for settings, *figures in rows(results):
        cells = [settings.replace(" ", "\n"), *figures][: len(columns)]
        table.add_row(*(escape(shown(cell)) for cell in cells))
    console.print(table, highlight=False)
    console.print(caption(results), highlight=False)
