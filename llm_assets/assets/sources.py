"""The sources of the pipeline file as Dagster's assets before `raw_corpus`.

No stage builds them. Whoever looks at a source reports what was seen: the sensor
`source_text_changed` after a change, `raw_corpus` as it reads, and a person who presses Observe.
"""

import string
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import dagster as dg

from artifacts.store.identity import hash_json
from llm_assets.assets.stage import asset_key, own_resources, user_faults
from llm_assets.config import PipelineSettings
from llm_assets.pipeline import PipelineResource
from spark_jobs.read.files.reading import Digests
from spark_jobs.read.opened import OpenedSource
from spark_jobs.read.settings import HuggingFaceDataset, RawCorpusSettings
from spark_jobs.read.snapshot import open_sources

GROUP = "sources"
LAST_CHANGE = "dagster/last_updated_timestamp"
"""Dagster's name of when an asset that it did not make has changed."""
VERSION_TAG = "dagster/data_version"
PIPELINE = "pipeline"
"""Name of the metadata that says for which pipeline a source was looked at."""
LAST = 20
"""Observations in which the pipeline's own last one is looked for."""
_LETTERS = {*string.ascii_letters, *string.digits, "_"}


def source_key(settings: PipelineSettings, name: str) -> dg.AssetKey:
    """The key of a source's asset; a character that Dagster refuses is written as its number."""
    escaped = "".join(letter if letter in _LETTERS else f"_{ord(letter):x}_" for letter in name)
    return dg.AssetKey([*asset_key(settings, GROUP).path, escaped])


def source_specs(settings: PipelineSettings) -> list[dg.AssetSpec]:
    return [
        dg.AssetSpec(
            source_key(settings, source.name),
            description=f"The source `{source.name}` of the pipeline file, as last observed.",
            group_name=GROUP,
            kinds={source.type},
        )
        for source in settings.raw_corpus.sources
    ]


def source_versions(
    settings: PipelineSettings, opened: Mapping[str, OpenedSource]
) -> dict[dg.AssetKey, str]:
    """The data version of each source: its fingerprint, or a hash of those of its packages."""
    return {
        source_key(settings, name): source.fingerprints.get(name) or hash_json(source.fingerprints)
        for name, source in opened.items()
    }


def source_access(
    pipeline: PipelineResource, settings: RawCorpusSettings
) -> AbstractContextManager[None]:
    """Within it, sources may be looked at and read: the Hub's with its token where one is there."""
    # The token is a secret, and only the Hub is given it.
    is_needed = any(isinstance(source, HuggingFaceDataset) for source in settings.sources)
    return pipeline.hub_access() if is_needed else nullcontext()


def look(pipeline: PipelineResource) -> dict[str, OpenedSource]:
    """Look at every source; raises UserError where one cannot be reached or read."""
    settings, store = pipeline.settings, pipeline.store
    # All processes share these, so that a look hashes only the files that have changed.
    digests = Digests(Path(store.machine_cache) / "digests" / f"{settings.name}.json")
    with source_access(pipeline, settings.raw_corpus):
        return open_sources(settings.raw_corpus, apart=store.root, digests=digests)


def observable_sources(settings: PipelineSettings) -> dg.AssetsDefinition:
    """The assets of all sources, which a person may have observed as well."""

    @dg.multi_observable_source_asset(
        name=settings.dagster_name("observe_sources"), specs=source_specs(settings), can_subset=True
    )
    @own_resources(settings)
    def observe_sources(
        context: dg.AssetExecutionContext, pipeline: PipelineResource
    ) -> Iterator[dg.ObserveResult]:
        with user_faults(pipeline):
            sources = look(pipeline)
        for result, _ in _seen(context.instance, pipeline.settings, sources, {}):
            if result.asset_key in context.selected_asset_keys:
                yield result

    return observe_sources


def observe(
    instance: dg.DagsterInstance,
    settings: PipelineSettings,
    opened: Mapping[str, OpenedSource],
    read: Mapping[str, Mapping[str, int]] | None = None,
) -> None:
    """Report to Dagster what was seen of sources.

    Args:
        read: source to `documents` and `bytes` of its text, where that was read; without it, only
            sources that have changed since the last look are reported.
    """
    for result, is_known in _seen(instance, settings, opened, read or {}):
        if not is_known or read is not None:
            assert result.asset_key and result.data_version
            tags = {VERSION_TAG: result.data_version.value}
            observation = dg.AssetObservation(result.asset_key, metadata=result.metadata, tags=tags)
            instance.report_runless_asset_event(observation)


def _seen(
    instance: dg.DagsterInstance,
    settings: PipelineSettings,
    opened: Mapping[str, OpenedSource],
    read: Mapping[str, Mapping[str, int]],
) -> Iterator[tuple[dg.ObserveResult, bool]]:
    """An observation of each source, and whether Dagster already knows this version of it."""
    versions, own_name = source_versions(settings, opened), dg.MetadataValue.text(settings.name)
    for (name, source), (key, version) in zip(opened.items(), versions.items(), strict=True):
        events = (
            record.asset_observation for record in instance.fetch_observations(key, LAST).records
        )
        # Pipelines without a prefix may share the key of a source, but not what they see of it.
        own_events = (
            event
            for event in events
            if event and event.metadata.get(PIPELINE, own_name) == own_name
        )
        last = next(own_events, None)
        is_known = last is not None and last.tags.get(VERSION_TAG) == version
        metadata: dict[str, Any] = dict(last.metadata) if last and is_known else {}
        metadata[PIPELINE] = own_name
        # A version that is known keeps the time at which it was first seen.
        metadata.setdefault(LAST_CHANGE, dg.MetadataValue.timestamp(time.time()))
        if source.sizes:
            metadata |= {"files": len(source.sizes), "file_bytes": sum(source.sizes.values())}
        metadata |= read.get(name, {})
        now = dg.DataVersion(version)
        yield dg.ObserveResult(key, metadata=metadata, data_version=now), is_known
        if not is_known:
            # Dagster decides by materializations alone whether an asset is fresh.
            materialization = dg.AssetMaterialization(
                key, metadata=metadata, tags={VERSION_TAG: version}
            )
            instance.report_runless_asset_event(materialization)
