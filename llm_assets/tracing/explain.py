"""What stands behind a version, down to the text, and what cleaning dropped on the way."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.store.manifest import Manifest
from artifacts.store.store import Artifact, Store
from llm_assets.registry.card import describe_cost, describe_coverage, number, tell_story
from llm_assets.registry.start import REMOVED, find_manifest, tell_removal
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.training_text import runs_behind
from spark_jobs.clean.decide.decider import DUPLICATE_SCHEMA, EXACT, NEAR
from spark_jobs.clean.forgotten import read_similar
from spark_jobs.runtime.parquet import RAW_COLUMNS, find_parts, list_files, read_table

ORDER = ("checkpoint", "base_model", "tokenized_shards", "study", "clean_corpus", "raw_corpus")


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
        figures = ", ".join(f"{role} {number(of.get('value'))}" for role, of in by_role.items())
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


def _manifests(store: Store, version: ModelVersion) -> Iterator[tuple[str, Manifest | None]]:
    for name in [*ORDER, *sorted(set(version.lineage) - set(ORDER))]:
        if name in version.lineage:
            yield name, find_manifest(store, name, version.lineage[name])


def _describe(store: Store, name: str, fingerprint: str, manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return [f"{name} {fingerprint} (no longer in {store.root})"]
    gone = [tell_removal(store, name, fingerprint)] if REMOVED in manifest.provenance else []
    lines = [
        *gone,
        f"{name} {fingerprint}, made {manifest.created_at:%Y-%m-%d %H:%M} UTC by code version "
        f"{manifest.code_version}, revision {manifest.provenance.get('revision', 'unknown')}",
        *(f"  {line}" for line in listed(manifest.settings)),
        *(f"  library {name}: {version}" for name, version in manifest.libraries.items()),
    ]
    figures = {key: value for key, value in manifest.stats.items() if _is_small(value)}
    return lines + [f"  {line}" for line in listed(figures)]


def listed(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """`key: value` for every value, keys of inner mappings joined by a dot."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from listed(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {value if isinstance(value, str) else json.dumps(value)}"


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float | str) or (
        isinstance(value, dict)
        and len(value) <= 5
        and not any(isinstance(item, dict | list) for item in value.values())
    )


DUPLICATE_FILES = "duplicates*.parquet"
MOST_CLUSTERS = 10
MOST_WORDS = 400
"""Of a text, that are shown beside another."""
_WORD = re.compile(r"\s*\S+")

Side = list[tuple[str, bool]]
"""A text in stretches, each with whether it stands in the other text, too."""


@dataclass(frozen=True)
class Copy:
    """A document that was dropped as a copy."""

    id: str
    reason: str
    similarity: float
    neighbor: str
    """The document that it was found a copy of."""
    survivor: str
    """The document that is kept in its place: the neighbor, or another of the cluster."""
    text: Side | None
    """The text's beginning; None where the raw corpus holds it no more."""
    neighbor_text: Side | None


@dataclass(frozen=True)
class DroppedDocuments:
    """What a clean corpus left out."""

    counts: dict[str, int]
    """Reason to documents."""
    copies: list[Copy]
    """Some of them: the near-copies that are least like what they copy, then exact ones."""
    examples: dict[str, list[dict[str, str]]]
    """Every other reason to a few documents: `id`, and how their `text` begins."""
    clusters: list[tuple[str, int]]
    """Documents that are kept of the largest clusters of copies, and how many these hold."""
    similar: list[dict[str, Any]]
    """Rows of `forgotten.SIMILAR_SCHEMA`: what holds forgotten text, which is not shown."""


def find_dropped(
    clean: Artifact, raw: Artifact | None, hidden: Collection[str], most: int
) -> DroppedDocuments:
    """Look up what was dropped.

    Args:
        raw: that the clean corpus was made of, where it is still there.
        hidden: ids that are not shown, nor what was dropped for them.
        most: near-copies; of exact ones, a fifth of that.
    """
    found = _chosen(clean.url, NEAR, hidden, most) + _chosen(clean.url, EXACT, hidden, most // 5)
    wanted = {identifier for row in found for identifier in (row["id"], row["neighbor"])}
    texts = _texts(raw.url, wanted) if raw else {}
    copies = []
    for row in found:
        text, neighbor_text = compare(texts.get(row["id"]), texts.get(row["neighbor"]))
        shown = {name: row[name] for name in DUPLICATE_SCHEMA.names if name != "cluster"}
        copies.append(Copy(**shown, text=text, neighbor_text=neighbor_text))
    examples = {
        reason: [one for one in of_reason if one["id"] not in hidden]
        for reason, of_reason in clean.stats["dropped_examples"].items()
        if reason not in (EXACT, NEAR)
    }
    similar = read_similar(clean.url)
    clusters = _largest_clusters(clean.url, hidden)
    return DroppedDocuments(clean.stats["dropped"], copies, examples, clusters, similar.to_pylist())


def compare(text: str | None, neighbor: str | None) -> tuple[Side | None, Side | None]:
    """The beginnings of two texts, marked by the words that both have in order."""
    if text is None or neighbor is None:
        return _begin(text), _begin(neighbor)
    here, there = _words(text), _words(neighbor)
    folded = [[word.strip().casefold() for word in words] for words in (here, there)]
    matcher = difflib.SequenceMatcher(None, folded[0], folded[1], autojunk=False)
    sides: tuple[Side, Side] = ([], [])
    for kind, first, last, other_first, other_last in matcher.get_opcodes():
        for side, stretch in zip(
            sides, (here[first:last], there[other_first:other_last]), strict=True
        ):
            if stretch:
                side.append(("".join(stretch), kind == "equal"))
    return sides


def _begin(text: str | None) -> Side | None:
    return None if text is None else [("".join(_words(text)), True)]


def _words(text: str) -> list[str]:
    """The text's first words, each with the blanks before it."""
    return _WORD.findall(text)[:MOST_WORDS]


def _chosen(
    clean_corpus: str, reason: str, hidden: Collection[str], most: int
) -> list[dict[str, Any]]:
    """Rows of `DUPLICATE_SCHEMA`, the least similar first; one file of them is held at a time."""
    chosen = DUPLICATE_SCHEMA.empty_table()
    not_shown = pa.array(sorted(hidden), pa.string())
    for url in list_files(clean_corpus, DUPLICATE_FILES):
        copies = read_table(url, DUPLICATE_SCHEMA.names)
        copies = copies.filter(pc.equal(copies["reason"], reason))
        for column in ("id", "neighbor", "survivor"):
            copies = copies.filter(pc.invert(pc.is_in(copies[column], not_shown)))
        together = pa.concat_tables([chosen, copies.cast(DUPLICATE_SCHEMA)])
        order = [("similarity", "ascending"), ("id", "ascending")]
        chosen = together.sort_by(order).slice(0, most)
    return chosen.to_pylist()


def _largest_clusters(clean_corpus: str, hidden: Collection[str]) -> list[tuple[str, int]]:
    counted = pa.table({"survivor": pa.array([], pa.string()), "copies": pa.array([], pa.int64())})
    for url in list_files(clean_corpus, DUPLICATE_FILES):
        survivors = read_table(url, ["survivor"])["survivor"].value_counts()
        columns = [survivors.field("values"), survivors.field("counts")]
        counted = pa.concat_tables([counted, pa.table(columns, names=counted.column_names)])
    sums = counted.group_by("survivor").aggregate([("copies", "sum")])
    sums = sums.filter(pc.invert(pc.is_in(sums["survivor"], pa.array(sorted(hidden), pa.string()))))
    order = [("copies_sum", "descending"), ("survivor", "ascending")]
    largest = sums.sort_by(order).slice(0, MOST_CLUSTERS)
    return [(row["survivor"], row["copies_sum"] + 1) for row in largest.to_pylist()]


def _texts(raw_corpus: str, ids: Iterable[str]) -> dict[str, str]:
    """Ids to texts, of those that the raw corpus has; parts are read until all are found."""
    wanted = pa.array(sorted(ids), pa.string())
    found: dict[str, str] = {}
    for part in find_parts(raw_corpus, RAW_COLUMNS, "raw_corpus"):
        if len(found) == len(wanted):
            break
        if pc.any(pc.is_in(part.read(["id"])["id"], wanted)).as_py():
            rows = part.read(["id", "text"])
            rows = rows.filter(pc.is_in(rows["id"], wanted))
            found |= {row["id"]: row["text"] or "" for row in rows.to_pylist()}
    return found
