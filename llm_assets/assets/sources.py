"""The sources of the pipeline file as Dagster's assets before `raw_corpus`.

Nobody here makes them. Who looks at one says what was seen: the sensor `source_text_changed` where
it has changed, and `raw_corpus` as it reads.
"""

import string
import time
from collections.abc import Mapping
from typing import Any

from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    AssetSpec,
    DagsterInstance,
    MetadataValue,
)

from artifacts.store.identity import hash_json
from llm_assets.assets.stage import asset_key
from llm_assets.config import PipelineSettings
from spark_jobs.read.opened import OpenedSource

GROUP = "sources"
LAST_CHANGE = "dagster/last_updated_timestamp"
"""Dagster's name of when an asset that it did not make has changed."""
VERSION_TAG = "dagster/data_version"
_LETTERS = {*string.ascii_letters, *string.digits, "_"}


def source_key(settings: PipelineSettings, name: str) -> AssetKey:
    """The key of a source's asset; a character that Dagster refuses is written as its number."""
    written = "".join(one if one in _LETTERS else f"_{ord(one):x}_" for one in name)
    return AssetKey([*asset_key(settings, GROUP).path, written])


def source_specs(settings: PipelineSettings) -> list[AssetSpec]:
    """An asset for each source."""
    return [
        AssetSpec(
            source_key(settings, source.name),
            description=f"The source `{source.name}` of the pipeline file, as it was when last "
            "looked at.",
            group_name=GROUP,
            kinds={source.type},
        )
        for source in settings.raw_corpus.sources
    ]


def source_versions(
    settings: PipelineSettings, opened: Mapping[str, OpenedSource]
) -> dict[AssetKey, str]:
    """The data version of each source: its fingerprint, or a hash of those of its packages."""
    return {
        source_key(settings, name): source.fingerprints.get(name) or hash_json(source.fingerprints)
        for name, source in opened.items()
    }


def observe(
    instance: DagsterInstance,
    settings: PipelineSettings,
    opened: Mapping[str, OpenedSource],
    read: Mapping[str, Mapping[str, int]] | None = None,
) -> None:
    """Have Dagster know what was seen of sources.

    Args:
        read: source to `documents` and `bytes` of its text, where that was read; else a source that
            is as it was at the last look is worth no word.
    """
    versions = source_versions(settings, opened)
    for (name, source), (key, version) in zip(opened.items(), versions.items(), strict=True):
        records = instance.fetch_observations(key, limit=1).records
        last = records[0].asset_observation if records else None
        is_known = last is not None and last.tags.get(VERSION_TAG) == version
        if is_known and read is None:
            continue
        metadata: dict[str, Any] = dict(last.metadata) if last and is_known else {}
        metadata.setdefault(LAST_CHANGE, MetadataValue.timestamp(time.time()))
        if source.sizes:
            metadata |= {"files": len(source.sizes), "file_bytes": sum(source.sizes.values())}
        metadata |= (read or {}).get(name, {})
        tags = {VERSION_TAG: version}
        instance.report_runless_asset_event(AssetObservation(key, metadata=metadata, tags=tags))
        if not is_known:
            # By these alone Dagster tells whether an asset is fresh.
            instance.report_runless_asset_event(
                AssetMaterialization(key, metadata=metadata, tags=tags)
            )
