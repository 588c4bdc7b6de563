"""Cleaning a store, by the command and by the job: the listing, then the removal."""

import time
from collections.abc import Callable

from artifacts.store.pipelines import Pipeline
from llm_assets.maintenance.retention import Version, plan_removals, read_contents, remove
from llm_assets.registry.base import Registry
from llm_assets.registry.records import Alias
from llm_assets.retention_settings import RetentionSettings

ALIASES: tuple[Alias, ...] = ("wanted", "champion", "previous")
LISTED_FILES = 10
"""Files of caches that a listing names one by one."""

Report = Callable[[str], None]


def clean(
    record: Pipeline,
    registry: Registry,
    settings: RetentionSettings,
    delete: bool,
    report: Report,
) -> int:
    """List what no rule keeps, each with reason and size, and remove it if asked to.

    Returns:
        Bytes that went, or would go.

    Raises:
        RegistryUnreachable: nobody knows what serves, so nothing is removed.
        DamagedArtifact: a manifest or a record cannot be read; nothing is removed.
    """
    contents = read_contents(record.store)
    removals = plan_removals(
        contents, record.name, find_versions(registry), settings, now=time.time()
    )
    cached = [removal for removal in removals if removal.is_cached]
    for removal in [*(each for each in removals if not each.is_cached), *cached[:LISTED_FILES]]:
        report(f"{removal.bytes / 1e6:12,.1f} MB  {removal.place}: {removal.reason}")
    if left := cached[LISTED_FILES:]:
        size = sum(removal.bytes for removal in left) / 1e6
        report(f"{size:12,.1f} MB  in {len(left):,} more files of the caches")
    total = sum(removal.bytes for removal in removals)
    kept = sum(folder.bytes for folder in contents.inventory.folders.values())
    kept += sum(file.bytes for file in contents.inventory.cached) - total
    if delete:
        remove(record.store, removals)
        gone = {each.artifact for each in removals if each.artifact and not each.explains}
        record.forget({name for name in gone if name})
    done = "Removed" if delete else "To be removed"
    report(f"{done}: {total / 1e6:,.1f} MB in {len(removals):,} places; {kept / 1e6:,.1f} MB stay.")
    return total


def find_versions(registry: Registry) -> list[Version]:
    """The registered versions with their aliases, as retention looks at them."""
    named: dict[int, tuple[str, ...]] = {}
    for alias in ALIASES:
        if found := registry.find(alias):
            named[found.version] = (*named.get(found.version, ()), alias)
    return [
        Version(version.version, named.get(version.version, ()), version.lineage)
        for version in registry.versions()
    ]
