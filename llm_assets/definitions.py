"""The one place where everything is put together."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, cast

from dagster import (
    AssetChecksDefinition,
    AssetKey,
    AssetsDefinition,
    AssetSpec,
    AutomationCondition,
    BetaWarning,
    Definitions,
    FreshnessPolicy,
    TableColumn,
    TableSchema,
    in_process_executor,
)

from artifacts.errors import UserError, reason_of

if TYPE_CHECKING:
    import pyarrow as pa

STAGES = (
    "llm_assets.assets.corpus",
    "llm_assets.assets.study",
    "llm_assets.assets.model",
    "llm_assets.assets.exam",
    "llm_assets.assets.evaluation",
    "llm_assets.assets.serving",
)
"""The modules of the graph's stages (docs/new_stage.md)."""
MEANINGS = {
    "id": "Identifies the document; `llm-assets document ID` shows its history.",
    "text": "The text.",
    "source": "The source of the pipeline file that it came from.",
    "package": "The Python package that it documents.",
    "version": "Of that package.",
    "license": "As the package states it.",
    "path": "The file, relative to the source.",
    "language": "Of code, by the file's name.",
    "example": "A conversation, a pair or a labeled text as JSON, where a recipe learns those.",
    "cluster": "Documents with one value are copies or near-copies of each other.",
    "bytes": "Of the text in UTF-8.",
    "tokens": "Of the text, start and end included.",
    "text_hash": "Of the normalized text.",
    "split": "Training, validation or held-out text, for ever.",
    "slice": "In which corpus of the pipeline's life it came first, from 1.",
    "label": "The class, for classification.",
}
"""Column to what it holds."""
FOLLOWED = ("raw_corpus", "endpoint")
"""Stages that `automation.fresh_days` is about, as it is about sources."""


@contextmanager
def reason_alone() -> Iterator[None]:
    """Turn what has a known reason into an error that says it, without a traceback.

    Whoever loads this module prints what is raised, with some ninety lines of how it came here.
    """
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        sys.tracebacklimit = 0
        raise UserError(reason) from None


with reason_alone():
    from llm_assets.assets.sources import GROUP as SOURCES
    from llm_assets.assets.sources import observable_sources
    from llm_assets.assets.stage import Stage, asset_key
    from llm_assets.automation.jobs import build_jobs, build_schedules
    from llm_assets.automation.notifications import build_notifications
    from llm_assets.automation.sensors import build_sensors
    from llm_assets.config import PipelineSettings, config_path, load_settings
    from llm_assets.experiments.job import ASSET as EXPERIMENTS
    from llm_assets.experiments.job import experiments_spec
    from llm_assets.history import make_history_private
    from llm_assets.platform import build_resources


def build_definitions(settings: PipelineSettings, path: str) -> Definitions:
    """The graph of one pipeline file.

    Raises:
        UserError: a section of `stages` is wrong, or of no stage.
    """
    stages = [
        stage
        for module in STAGES
        for stage in vars(import_module(module)).values()
        if isinstance(stage, Stage) and not settings.leaves_out(stage.name)
    ]
    with_section = {stage.name for stage in stages if stage.section(settings) is not None}
    own = with_section - PipelineSettings.model_fields.keys()
    for unknown in sorted(settings.stages.keys() - own):
        raise UserError(
            f"{path}: `stages.{unknown}` is the section of no stage of your own; there "
            f"{'are ' + ', '.join(sorted(own)) if own else 'is none'}. They come from the modules "
            "that llm_assets/definitions.py names (docs/new_stage.md)."
        )
    # Afterwards, so that steps are called by the stages' names alone.
    keys = {AssetKey(stage.name): asset_key(settings, stage.name) for stage in stages}

    def prefixed(definition: AssetsDefinition) -> AssetsDefinition:
        return definition.with_attributes(asset_key_replacements=keys)

    assets = [
        prefixed(stage.asset(settings)).map_asset_specs(
            partial(present, settings=settings, columns=stage.columns)
        )
        for stage in stages
    ]
    checks = [prefixed(check) for stage in stages for check in stage.asset_checks()]
    return Definitions(
        assets=[
            *assets,
            observable_sources(settings).map_asset_specs(partial(present, settings=settings)),
            present(experiments_spec(settings), settings),
        ],
        asset_checks=cast(list[AssetChecksDefinition], checks),
        jobs=build_jobs(settings),
        schedules=build_schedules(settings),
        sensors=[*build_sensors(settings), *build_notifications(settings)],
        resources=build_resources(settings, path),
        executor=in_process_executor,
    )


def present(
    spec: AssetSpec, settings: PipelineSettings, columns: "pa.Schema | None" = None
) -> AssetSpec:
    """A spec with owners, tags and columns, in its pipeline's group: so the graph opens whole."""
    name, days = spec.key.path[-1], settings.automation.fresh_days
    is_stage = spec.group_name not in (EXPERIMENTS, SOURCES)
    is_followed = spec.group_name == SOURCES or (is_stage and name in FOLLOWED)
    window = timedelta(days=days) if days is not None and is_followed else None
    declares = settings.automation.way == "declarative" and is_stage
    described = {}
    if columns is not None:
        shown = [
            TableColumn(field.name, str(field.type), MEANINGS.get(field.name)) for field in columns
        ]
        described["dagster/column_schema"] = TableSchema(shown)
    return spec.replace_attributes(
        owners=list(settings.owners),
        group_name=settings.name,
        tags={**spec.tags, "pipeline": settings.name, "stage": str(spec.group_name)},
        metadata={**spec.metadata, **described},
        freshness_policy=FreshnessPolicy.time_window(fail_window=window) if window else None,
        automation_condition=_condition(name, settings) if declares else None,
    )


def _condition(name: str, settings: PipelineSettings) -> AutomationCondition:
    """When an asset is made where automation is declarative.

    Text is read by the clock, since no sensor looks at the sources then. Every other asset follows
    when the data version of one before it is another, once all those are made and sound.
    """
    if name == "raw_corpus":
        zone = settings.automation.time_zone
        return AutomationCondition.cron_tick_passed(settings.retrain_cron, zone)
    if name == "base_model":
        return AutomationCondition.on_missing() | AutomationCondition.code_version_changed()
    changed = AutomationCondition.any_deps_match(AutomationCondition.data_version_changed())
    return (
        changed.since_last_handled()
        & ~AutomationCondition.any_deps_missing()
        & ~AutomationCondition.any_deps_in_progress()
        & ~AutomationCondition.in_progress()
        & AutomationCondition.all_deps_blocking_checks_passed()
    ).with_label("an asset before it has changed")


# Observable assets; every command would print it.
warnings.filterwarnings("ignore", ".*(observable_source_asset|execution_type)", BetaWarning)
with reason_alone():
    make_history_private()
    path = config_path()
    defs = build_definitions(load_settings(path), str(path))
