"""The one place where everything is put together."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, cast

import dagster as dg

from artifacts.errors import UserError
from artifacts.reasons import reason_of

if TYPE_CHECKING:
    import pyarrow as pa

STAGES = (
    "llm_assets.assets.corpus",
    "llm_assets.assets.study",
    "llm_assets.assets.model",
    "llm_assets.assets.exam",
    "llm_assets.assets.evaluation",
    "llm_assets.assets.verdict",
    "llm_assets.assets.serving",
)
"""The modules of the graph's own stages (docs/new_stage.md)."""
OTHER_STAGES = "llm_assets.stages"
"""Group of entry points, by which installed packages declare modules with more."""
MEANINGS = {
    "id": "Identifies the document; `llm-assets document ID` shows its history.",
    "text": "The text.",
    "source": "The source in the pipeline file that it came from.",
    "package": "The Python package that it documents.",
    "version": "The version of that package.",
    "license": "The license of that package, as it states it.",
    "path": "The file, relative to the source.",
    "language": "The programming language of code, by the file's name.",
    "example": "A conversation, a pair or a labeled text as JSON, if the recipe learns from those.",
    "cluster": "Documents with the same value are near-copies or versions of each other.",
    "bytes": "Size of the text in UTF-8.",
    "tokens": "Tokens of the text, including its start and end tokens.",
    "text_hash": "A hash of the normalized text.",
    "split": "Training, validation, held-out or replay text; a document stays in its split.",
    "slice": "Number of the corpus in which the text first appeared, from 1.",
    "label": "The class, for classification.",
}
"""Column to what it holds."""
EXECUTOR = dg.multi_or_in_process_executor.configured(
    lambda config: config,
    name="in_process_or_multi",
    config_schema=dg.Field(
        dg.multi_or_in_process_executor.config_schema.config_type, default_value={"in_process": {}}
    ),
)
"""Dagster's default executor with the defaults swapped: a process for each step takes seconds to
start."""
FOLLOWED = ("raw_corpus", "endpoint")
"""Stages that `automation.fresh_days` applies to, as it does to sources."""


@contextmanager
def reason_alone() -> Iterator[None]:
    """Turn an error with a known reason into one that states it, without a traceback.

    Dagster prints what loading this module raises, with some ninety lines of traceback.
    """
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        sys.tracebacklimit = 0
        raise UserError(reason) from None


# A missing package has a known reason, too: the extra that installs it.
with reason_alone():
    from llm_assets.assets.sources import GROUP as SOURCES
    from llm_assets.assets.sources import observable_sources
    from llm_assets.assets.stage import IO_MANAGER, Stage, asset_key
    from llm_assets.automation.jobs import build_jobs, build_schedules
    from llm_assets.automation.notifications import build_notifications
    from llm_assets.automation.sensors import build_sensors
    from llm_assets.config import PipelineSettings, config_path, load_settings
    from llm_assets.experiments import ASSET as EXPERIMENTS
    from llm_assets.experiments import build_experiments
    from llm_assets.history import make_history_private
    from llm_assets.io_manager import ArtifactIOManager
    from llm_assets.platform import build_resources
    from recipes.installed import installed


def build_definitions(settings: PipelineSettings, path: str) -> dg.Definitions:
    """The graph of one pipeline file, which can be merged with any other definitions.

    Raises:
        UserError: a section of `stages` is wrong, or of no stage.
    """
    # A module that imported the stage of another one would give that stage a second time.
    stages = [
        stage
        for module in (*STAGES, *(one.value for one in installed(OTHER_STAGES).values()))
        for stage in vars(import_module(module)).values()
        if isinstance(stage, Stage) and not settings.leaves_out(stage.name)
    ]
    with_section = {stage.name for stage in stages if stage.section(settings) is not None}
    own = with_section - PipelineSettings.model_fields.keys()
    for unknown in sorted(settings.stages.keys() - own):
        raise UserError(
            f"{path}: `stages.{unknown}` is the section of no stage of your own; there "
            f"{'are ' + ', '.join(sorted(own)) if own else 'is none'}. They come from modules that "
            f"installed packages declare in the entry point group {OTHER_STAGES} "
            "(docs/new_stage.md)."
        )
    assets = [
        stage.asset(settings).map_asset_specs(
            partial(present, settings=settings, columns=stage.columns)
        )
        for stage in stages
    ]
    checks = [check for stage in stages for check in stage.asset_checks(settings)]
    resources = {
        **build_resources(settings, path),
        IO_MANAGER: ArtifactIOManager(config_path=path),
    }
    return dg.Definitions(
        assets=[
            *assets,
            observable_sources(settings).map_asset_specs(partial(present, settings=settings)),
            build_experiments(settings).map_asset_specs(partial(present, settings=settings)),
        ],
        asset_checks=cast(list[dg.AssetChecksDefinition], checks),
        jobs=build_jobs(settings, [asset_key(settings, stage.name) for stage in stages]),
        schedules=build_schedules(settings),
        sensors=[*build_sensors(settings), *build_notifications(settings)],
        resources={settings.resource_key(name): resource for name, resource in resources.items()},
    )


def present(
    spec: dg.AssetSpec, settings: PipelineSettings, columns: "pa.Schema | None" = None
) -> dg.AssetSpec:
    """A spec with owners, tags and columns, in a group of its pipeline, so the UI shows the graph
    whole."""
    name, days = spec.key.path[-1], settings.automation.fresh_days
    is_stage = spec.group_name not in (EXPERIMENTS, SOURCES)
    is_followed = spec.group_name == SOURCES or (is_stage and name in FOLLOWED)
    window = timedelta(days=days) if days is not None and is_followed else None
    column_metadata = {}
    if columns is not None:
        table_columns = [
            dg.TableColumn(field.name, str(field.type), MEANINGS.get(field.name))
            for field in columns
        ]
        column_metadata["dagster/column_schema"] = dg.TableSchema(table_columns)
    return spec.replace_attributes(
        owners=list(settings.owners),
        group_name=settings.name,
        tags={**spec.tags, "pipeline": settings.name, "stage": str(spec.group_name)},
        metadata={**spec.metadata, **column_metadata},
        freshness_policy=dg.FreshnessPolicy.time_window(fail_window=window) if window else None,
    )


# Observable assets are a beta feature of Dagster; every command would print the warning.
warnings.filterwarnings("ignore", ".*(observable_source_asset|execution_type)", dg.BetaWarning)


@dg.definitions
def defs() -> dg.Definitions:
    """The graph of the pipeline file in force."""
    with reason_alone():
        make_history_private()
        path = config_path()
        own = build_definitions(load_settings(path), str(path))
    # `build_definitions` gives no executor: Dagster refuses to merge two, and a team may have its
    # own.
    return dg.Definitions.merge(own, dg.Definitions(executor=EXECUTOR))
