"""What stands behind a version, down to the text, and which training rows hold a piece of text."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.shards.occurrences import Occurrence, find_occurrences
from artifacts.shards.shard_set import ShardStats
from artifacts.store.store import Artifact, Store
from llm_assets.registry.card import tell_story
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.retired import find_manifest
from llm_assets.registry.state import RegistryState

ORDER = ("checkpoint", "base_model", "tokenized_shards", "clean_corpus", "raw_corpus")


def explain(store: Store, state: RegistryState, version: ModelVersion) -> str:
    """Everything behind a version as text: verdicts, figures, artifacts down to the text.

    Of an artifact that retention removed, the manifest is still told; of one that was deleted by
    hand, the fingerprint alone.
    """
    lines = [
        f"version {version.version}, registered {version.created_at:%Y-%m-%d %H:%M} UTC",
        f"model: {version.model_url} (license {version.license})",
        *tell_story(state, version),
    ]
    for metric, by_role in version.evaluation.get("metrics", {}).items():
        figures = ", ".join(f"{role} {_figure(f)}" for role, f in by_role.items())
        lines.append(f"{metric}: {figures}")
    names = [*ORDER, *sorted(set(version.lineage) - set(ORDER))]
    for name in names:
        if name in version.lineage:
            lines += ["", *_describe(store, name, version.lineage[name])]
    return "\n".join(lines) + "\n"


def find_text(store: Store, version: ModelVersion, text: str) -> list[Occurrence]:
    """Every row of a version's shards whose document holds a piece of text, training rows first.

    The text must match the cleaned corpus exactly, white space apart.

    Raises:
        UserError: the text is empty.
        MissingArtifact: corpus or shards are no longer in the store.
    """
    wanted = " ".join(text.split())
    if not wanted:
        raise UserError("Give a piece of text to look for.")
    corpus = store.load("clean_corpus", version.lineage["clean_corpus"])
    shards = store.load("tokenized_shards", version.lineage["tokenized_shards"])
    stats = ShardStats.model_validate(shards.stats)
    return find_occurrences(shards.path, stats, set(_documents_with(corpus, wanted)))


def _documents_with(corpus: Artifact, wanted: str) -> Iterator[str]:
    for path in sorted(corpus.path.glob("part-*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(columns=["id", "text"], batch_size=2_000):
            for record in batch.to_pylist():
                if wanted in " ".join(record["text"].split()):
                    yield record["id"]


def _describe(store: Store, name: str, fingerprint: str) -> list[str]:
    manifest = find_manifest(store, name, fingerprint)
    if manifest is None:
        return [f"{name} {fingerprint} (no longer in {store.root})"]
    lines = [
        f"{name} {fingerprint}, made {manifest.created_at:%Y-%m-%d %H:%M} UTC by code version "
        f"{manifest.code_version}, revision {manifest.provenance.get('revision', 'unknown')}",
        f"  settings: {json.dumps(manifest.settings, sort_keys=True)}",
    ]
    figures = {key: value for key, value in manifest.stats.items() if _is_small(value)}
    if figures:
        lines.append(f"  {json.dumps(figures, sort_keys=True)}")
    return lines


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float | str) or (
        isinstance(value, dict)
        and len(value) <= 5
        and not any(isinstance(item, dict | list) for item in value.values())
    )


def _figure(figure: dict[str, float | None]) -> str:
    value = figure.get("value")
    return "not finite" if value is None else f"{value:.4f}"
