"""What stands behind a version, down to the text, and what it was trained on of a piece of text."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.shown import shown_in_line
from artifacts.store.manifest import Manifest
from artifacts.store.store import Artifact, Store
from llm_assets.registry.card import describe_cost, describe_coverage, tell_story
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.retired import find_manifest
from llm_assets.registry.state import RegistryState
from llm_assets.tracing.lessons import Lesson, Run, lessons_of, runs_behind

ORDER = ("checkpoint", "base_model", "tokenized_shards", "clean_corpus", "raw_corpus")
_COLUMNS = ["id", "source", "split", "text_hash"]


@dataclass(frozen=True)
class Exposure:
    """What runs were trained on of a document."""

    document: str
    source: str
    split: str
    lessons: list[Lesson]
    unknown: list[Run]
    """Runs whose record is gone."""

    def __str__(self) -> str:
        return f"{shown_in_line(self.document)} ({shown_in_line(self.source)}): {self._fate()}"

    def _fate(self) -> str:
        gone = "; no record of " + ", ".join(run.name for run in self.unknown)
        known = self._known()
        return known + (gone if self.unknown else "")

    def _known(self) -> str:
        if self.lessons:
            return "trained on by " + "; by ".join(map(str, self.lessons))
        aside = self.split.replace("_", " ") if self.split in ("validation", "held_out") else ""
        return f"{aside} text, never trained on" if aside else "never trained on"


def explain(store: Store, state: RegistryState, version: ModelVersion) -> str:
    """Everything behind a version as text: verdicts, figures, artifacts down to the text.

    Of an artifact that retention removed, the manifest is still told; of one that was deleted by
    hand, the fingerprint alone.
    """
    lines = [
        f"version {version.version}, registered {version.created_at:%Y-%m-%d %H:%M} UTC",
        f"model: {version.model_url} (license {version.license})",
        f"trained on {describe_coverage(version)}",
        f"cost: {describe_cost(version)}",
        *tell_story(state, version),
    ]
    for metric, by_role in version.evaluation.get("metrics", {}).items():
        figures = ", ".join(f"{role} {_figure(f)}" for role, f in by_role.items())
        lines.append(f"{metric}: {figures}")
    for name, manifest in _manifests(store, version):
        lines += ["", *_describe(store, name, version.lineage[name], manifest)]
    return "\n".join(lines) + "\n"


def explain_as_json(store: Store, state: RegistryState, version: ModelVersion) -> dict[str, Any]:
    """The same as JSON values, whole: the version, what was decided, each artifact's manifest."""
    behind = {
        name: manifest.model_dump(mode="json", exclude={"files"}) if manifest else None
        for name, manifest in _manifests(store, version)
    }
    runs = [asdict(run) for run in runs_behind(store, state, version)]
    story = tell_story(state, version)
    return version.model_dump(mode="json") | {"story": story, "runs": runs, "artifacts": behind}


def find_text(
    store: Store, state: RegistryState, version: ModelVersion, text: str
) -> list[Exposure]:
    """Every document of a version's corpus that holds a piece of text, those trained on first.

    The text must match the cleaned corpus exactly, white space apart.

    Raises:
        UserError: the text is empty.
        MissingArtifact: the corpus is no longer in the store.
    """
    wanted = " ".join(text.split())
    if not wanted:
        raise UserError("Give a piece of text to look for.")
    if "clean_corpus" not in version.lineage:
        raise UserError(f"Version {version.version} is the base model: it has no text here.")
    corpus = store.load("clean_corpus", version.lineage["clean_corpus"])
    records = list(_documents_with(corpus, wanted))
    found = exposures(runs_behind(store, state, version), records)
    return sorted(found, key=lambda one: (not one.lessons, one.document))


def exposures(runs: list[Run], documents: list[dict[str, str]]) -> list[Exposure]:
    """What runs were trained on of documents.

    Args:
        documents: `id`, `source`, `split` and `text_hash` of each.
    """
    lessons = lessons_of(runs, [record["text_hash"] for record in documents])
    unknown = [run for run in runs if run.record is None]
    return [
        Exposure(one["id"], one["source"], one["split"], lessons[one["text_hash"]], unknown)
        for one in documents
    ]


def _documents_with(corpus: Artifact, wanted: str) -> Iterator[dict[str, str]]:
    for path in sorted(corpus.path.glob("part-*.parquet")):
        columns = [*_COLUMNS, "text"]
        for batch in pq.ParquetFile(path).iter_batches(columns=columns, batch_size=2_000):
            for record in batch.to_pylist():
                if wanted in " ".join(record["text"].split()):
                    yield {name: record[name] for name in _COLUMNS}


def _manifests(store: Store, version: ModelVersion) -> Iterator[tuple[str, Manifest | None]]:
    for name in [*ORDER, *sorted(set(version.lineage) - set(ORDER))]:
        if name in version.lineage:
            yield name, find_manifest(store, name, version.lineage[name])


def _describe(store: Store, name: str, fingerprint: str, manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return [f"{name} {fingerprint} (no longer in {store.root})"]
    lines = [
        f"{name} {fingerprint}, made {manifest.created_at:%Y-%m-%d %H:%M} UTC by code version "
        f"{manifest.code_version}, revision {manifest.provenance.get('revision', 'unknown')}",
        *(f"  {line}" for line in _listed(manifest.settings)),
    ]
    figures = {key: value for key, value in manifest.stats.items() if _is_small(value)}
    return lines + [f"  {line}" for line in _listed(figures)]


def _listed(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """`key: value` for every value, keys of inner mappings joined by a dot."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _listed(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {value if isinstance(value, str) else json.dumps(value)}"


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float | str) or (
        isinstance(value, dict)
        and len(value) <= 5
        and not any(isinstance(item, dict | list) for item in value.values())
    )


def _figure(figure: dict[str, float | None]) -> str:
    value = figure.get("value")
    return "not finite" if value is None else f"{value:.4f}"
