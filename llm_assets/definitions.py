"""The one place where everything is put together."""

import sys

from dagster import (
    AssetsDefinition,
    AssetSpec,
    Definitions,
    in_process_executor,
    load_asset_checks_from_modules,
    load_assets_from_modules,
)

from artifacts.errors import UserError
from llm_assets import checks
from llm_assets.assets import corpus, evaluation, model, serving
from llm_assets.automation.jobs import build_jobs, build_schedules
from llm_assets.automation.notifications import build_notifications
from llm_assets.automation.sensors import build_sensors
from llm_assets.catalog import present
from llm_assets.config import PipelineSettings, config_path, load_settings
from llm_assets.experiments.job import experiments_spec
from llm_assets.platform import build_resources


def build_definitions(settings: PipelineSettings, path: str) -> Definitions:
    """The graph of one pipeline file."""

    def shown(spec: AssetSpec) -> AssetSpec:
        return present(spec, settings)

    modules = [corpus, model, evaluation, serving]
    assets = [
        asset.map_asset_specs(shown)
        for asset in load_assets_from_modules(modules, key_prefix=settings.key_prefix)
        if isinstance(asset, AssetsDefinition)
    ]
    jobs = build_jobs(settings)
    return Definitions(
        assets=[*assets, shown(experiments_spec(settings))],
        asset_checks=load_asset_checks_from_modules([checks], asset_key_prefix=settings.key_prefix),
        jobs=jobs,
        schedules=build_schedules(settings, jobs),
        sensors=[*build_sensors(settings, jobs), *build_notifications(settings)],
        resources=build_resources(settings, path),
        executor=in_process_executor,
    )


def _load() -> Definitions:
    """The definitions of the pipeline file in force; of a wrong one, its faults alone are shown."""
    try:
        path = config_path()
        return build_definitions(load_settings(path), str(path))
    except UserError as error:
        # Whoever loads this prints what is raised, with some ninety lines of how it came here.
        sys.tracebacklimit = 0
        raise UserError(str(error)) from None


defs = _load()
