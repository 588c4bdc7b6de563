"""Cleaning a store, by the command and by the job: the listing, then the removal."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from artifacts.store.pipelines import Pipeline
from llm_assets.forgetting.erase import read_list
from llm_assets.maintenance.retention import (
    DAY_SECONDS,
    Name,
    Removal,
    Version,
    plan_removals,
    read_contents,
    remove,
)
from llm_assets.operation_settings import ForgettingSettings, RetentionSettings
from llm_assets.registry.base import Registry
from llm_assets.registry.state import Alias

SERVING: tuple[Alias, ...] = ("wanted", "champion")
ALIASES: tuple[Alias, ...] = (*SERVING, "previous")
LISTED_FILES = 10
"""Files of caches that a listing names one by one."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Cleaning:
    """What no rule keeps."""

    removals: Sequence[Removal]
    bytes_kept: int
    """Of all else in the store."""

    @property
    def bytes(self) -> int:
        """That went, or would go."""
        return sum(removal.bytes for removal in self.removals)

    def as_json(self) -> dict[str, Any]:
        """Each removal with its place, bytes and reason, and the sums."""
        return {
            "removals": [
                {"place": one.place, "bytes": one.bytes, "reason": one.reason}
                for one in self.removals
            ],
            "bytes": self.bytes,
            "bytes_kept": self.bytes_kept,
        }


def clean(
    record: Pipeline,
    registry: Registry,
    settings: RetentionSettings,
    forgetting: ForgettingSettings,
    delete: bool,
    report: Report,
) -> Cleaning:
    """List what no rule keeps, each with reason and size, and remove it if asked to.

    Raises:
        RegistryUnreachable: nobody knows what serves, so nothing is removed.
        DamagedArtifact: a manifest or a record cannot be read; nothing is removed.
    """
    contents = read_contents(record.store)
    now = time.time()
    withdrawn = find_withdrawn(record, registry, forgetting, now)
    removals = plan_removals(
        contents, record.name, find_versions(registry), settings, now, withdrawn
    )
    stored = sum(folder.bytes for folder in contents.inventory.folders.values())
    stored += sum(file.bytes for file in contents.inventory.cached)
    found = Cleaning(removals, stored - sum(removal.bytes for removal in removals))
    _list(found, report)
    if delete:
        remove(record.store, removals)
        gone = {each.artifact for each in removals if each.artifact and not each.explains}
        record.forget({name for name in gone if name})
    report(
        f"{'Removed' if delete else 'To be removed'}: {found.bytes / 1e6:,.1f} MB in "
        f"{len(removals):,} places; {found.bytes_kept / 1e6:,.1f} MB stay."
    )
    return found


def _list(found: Cleaning, report: Report) -> None:
    cached = [removal for removal in found.removals if removal.is_cached]
    named = [removal for removal in found.removals if not removal.is_cached]
    for removal in [*named, *cached[:LISTED_FILES]]:
        report(f"{removal.bytes / 1e6:12,.1f} MB  {removal.place}: {removal.reason}")
    if left := cached[LISTED_FILES:]:
        size = sum(removal.bytes for removal in left) / 1e6
        report(f"{size:12,.1f} MB  in {len(left):,} more files of the caches")


def find_withdrawn(
    record: Pipeline, registry: Registry, settings: ForgettingSettings, now: float
) -> dict[Name, str]:
    """Checkpoints that were trained on forgotten text and whose time is over, with the reason."""
    serving = {found.model_fingerprint for alias in SERVING if (found := registry.find(alias))}
    return {
        ("checkpoint", one.checkpoint): f"version {one.version} was withdrawn {one.at:%Y-%m-%d}: "
        "it was trained on forgotten text"
        for one in read_list(record.store, record.name).withdrawn
        if one.checkpoint not in serving
        and one.at.timestamp() <= now - settings.grace_days * DAY_SECONDS
    }


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
