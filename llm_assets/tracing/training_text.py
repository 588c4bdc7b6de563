"""The text that a version was trained on, and when: shards, names of documents, licenses."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from artifacts.cache import cache_key, cached_file
from artifacts.errors import DamagedArtifact, MissingArtifact
from artifacts.numbers import sorted_unique
from artifacts.progress import Report, counted
from artifacts.shards import span_index
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import Shard, ShardFiles, text_numbers
from artifacts.shards.span_index import SpanIndex, first_places
from artifacts.storage import files
from artifacts.store.manifest import Manifest
from artifacts.store.store import Artifact, Store
from llm_assets.registry.start import START_INPUT, find_manifest, find_record, tell_removal
from llm_assets.registry.state import ModelVersion, RegistryState
from recipes.data.records import (
    TRAINED_NAME,
    TRAINED_SCHEMA,
    open_trained,
    read_trained,
    records_of,
    texts_of,
)
from recipes.spec import MODEL_FOLDER
from spark_jobs.read.document import document_of
from spark_jobs.runtime.parquet import open_parts

_TRAINED_SPLITS = ("train", "replay")


@dataclass(frozen=True)
class IndexedShard:
    """A shard and its index."""

    shard: Shard
    index: SpanIndex
    content: str
    """The same for all shards with the same content, in whichever artifact."""
    records: frozenset[str] = frozenset()
    """URLs of the records of runs that took rows of it (`recipes.data.records`)."""

    @cached_property
    def documents(self) -> pa.Table:
        """`id` and `source` of the shard's documents, read once."""
        return self.shard.documents(["id", "source"])


def open_indexed(artifact: Artifact, records: frozenset[str], report: Report) -> list[IndexedShard]:
    """The shards of a `tokenized_shards` artifact that the runs with these records may have read.

    Missing indexes are built first, by Spark on this machine, and cached under the shards' content:
    what an earlier corpus already had is not indexed again.
    """
    store, stats = artifact.store, ShardStats.model_validate(artifact.stats)
    keys = index_keys(artifact, stats)
    indexes = {name: _open_index(store, key) for name, key in keys.items()}
    missing = {name: key for name, key in keys.items() if indexes[name] is None}
    if missing:
        _build(artifact, stats, missing, report)
        indexes |= {name: _open_index(store, key) for name, key in missing.items()}
    files = ShardFiles(artifact.path)
    entries = {entry.name: entry for entry in stats.shards}
    return [
        IndexedShard(Shard(files, entries[name], stats), index, keys[name], records)
        for name, index in sorted(indexes.items())
        if index
    ]


def index_keys(artifact: Artifact, stats: ShardStats) -> dict[str, str]:
    """Shard to the cache's key of its index, by the content of its files."""
    contents = {entry.path: entry.sha256 or entry.crc32c for entry in artifact.manifest.files}
    return {
        entry.name: cache_key(
            "span index",
            span_index.__name__,
            ["numpy", "scipy"],
            vocab_size=stats.vocab_size,
            sequence_length=stats.sequence_length,
            files=[contents[f"{entry.name}.{end}"] for end in ("tokens", "segments", "rows")],
            documents=contents[f"{entry.name}.documents.parquet"],
        )
        for entry in stats.shards
        if entry.split in _TRAINED_SPLITS and entry.rows
    }


def _open_index(store: Store, key: str) -> SpanIndex | None:
    file = cached_file(store.machine_cache, key)
    if file is None:
        return None
    try:
        return SpanIndex(*file)
    except DamagedArtifact:
        # Removed, so that it is built again.
        file[0].unlink(missing_ok=True)
        return None


def _build(artifact: Artifact, stats: ShardStats, keys: dict[str, str], report: Report) -> None:
    from spark_jobs.runtime.session import end_local_session, local_session
    from spark_jobs.trace_index import build_indexes

    store = artifact.store
    # Checked here once: each of Spark's tasks would report the same fault.
    files.need_writable(Path(store.machine_cache), "`store`: " if store.is_local else "")
    report(f"Indexing {len(keys):,} shards; this is done once for a shard.")
    shards = ShardFiles(artifact.path)
    build_indexes(local_session(), shards, stats, keys, store.machine_cache, report)
    end_local_session()


Reader = Callable[[str, Sequence[int] | np.ndarray], pa.Table]
"""Returns the records of some texts from a run's `trained.parquet` at a URL: `read_trained`, or
from what was read before."""
_STEPS_SHOWN = 8
_STRETCH_SCHEMA = pa.schema(
    [("record", pa.int64()), *(TRAINED_SCHEMA.field(name) for name in ("text", "start", "end"))]
)


@dataclass(frozen=True)
class TrainingRun:
    """A training run behind a version."""

    checkpoint: str
    """Fingerprint."""
    version: int | None
    """The version whose weights it made; None where these were never registered."""
    record: str | None
    """URL of `trained.parquet`; None where it is gone, so that nobody knows."""

    @property
    def name(self) -> str:
        return (
            f"checkpoint {self.checkpoint}" if self.version is None else f"version {self.version}"
        )


@dataclass(frozen=True)
class Lesson:
    """How a run was trained on a text."""

    run: TrainingRun
    steps: list[int]
    """The steps whose update of the weights it was part of, in order, counted from 1."""
    rows: list[int]
    """Numbers among the rows of the run, in order."""
    tokens: int
    """How many of its tokens were read, each as often as it was."""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.steps[:_STEPS_SHOWN]))
        remaining = len(self.steps) - _STEPS_SHOWN
        more = f" and {remaining} more" if remaining > 0 else ""
        noun = "step" if len(self.steps) == 1 else "steps"
        return f"{self.run.name} at {noun} {shown}{more} ({counted(self.tokens, 'token')})"


def runs_behind(store: Store, state: RegistryState, version: ModelVersion) -> list[TrainingRun]:
    """The runs that a version's weights went through, oldest first; none for a base model."""
    bases = {entry.model_fingerprint for entry in state.versions if entry.is_base}
    # A base model may have been registered again under another fingerprint, so those that versions
    # were made from count, too.
    bases |= {entry.lineage.get("base_model", "") for entry in state.versions}
    # Of versions with equal weights, the first one counts.
    version_of = {entry.model_fingerprint: entry.version for entry in reversed(state.versions)}
    runs = []
    fingerprint: str | None = version.model_fingerprint
    while fingerprint and fingerprint not in bases:
        record = find_record(store, fingerprint, TRAINED_NAME)
        runs.append(TrainingRun(fingerprint, version_of.get(fingerprint), record))
        manifest = find_manifest(store, "checkpoint", fingerprint)
        # If a model's manifest is gone, what it was trained from is unknown.
        fingerprint = manifest.inputs.get(START_INPUT) if manifest else None
    return runs[::-1]


def all_runs(store: Store, state: RegistryState) -> list[TrainingRun]:
    """The runs behind all registered versions, each once, those of older versions first."""
    runs = (run for version in state.versions for run in runs_behind(store, state, version))
    return list({run.checkpoint: run for run in runs}.values())


def lessons_of(runs: Sequence[TrainingRun], text_hashes: Sequence[str]) -> dict[str, list[Lesson]]:
    """What the runs were trained on of each text, those that were not left out.

    Args:
        text_hashes: of the texts, as the clean corpus and the shards have them.
    """
    numbers = text_numbers(text_hashes).tolist()
    lessons = lessons_by_text(runs, numbers)
    return {
        text_hash: lessons[number] for text_hash, number in zip(text_hashes, numbers, strict=True)
    }


def lessons_by_text(
    runs: Sequence[TrainingRun], texts: Sequence[int], read: Reader = read_trained
) -> dict[int, list[Lesson]]:
    """The same of texts as `artifacts.shards.shard_set` numbers them."""
    lessons: dict[int, list[Lesson]] = {text: [] for text in texts}
    for run in runs:
        table = read(run.record, texts) if run.record else TRAINED_SCHEMA.empty_table()
        for text in table["text"].unique().to_pylist():
            of_text = rows_of(table, text)
            tokens = pc.sum(pc.subtract(of_text["end"], of_text["start"])).as_py()
            steps, rows = (np.unique(of_text[name].to_numpy()).tolist() for name in ("step", "row"))
            lessons[text].append(Lesson(run, steps, rows, tokens))
    return lessons


def stretches_of(
    records: Sequence[str], texts: Sequence[int] | np.ndarray, read: Reader = read_trained
) -> pa.Table:
    """The stretches that were trained on of some texts, each once.

    Args:
        records: URLs of `trained.parquet`.
        texts: as `artifacts.shards.shard_set` numbers them.

    Returns:
        `record` (its place among them), `text`, `start` and `end`.
    """
    tables = [_STRETCH_SCHEMA.empty_table()]
    for number, url in enumerate(records):
        table = read(url, texts).select(_STRETCH_SCHEMA.names[1:])
        tables.append(table.add_column(0, "record", pa.repeat(number, table.num_rows)))
    return pa.concat_tables(tables).group_by(_STRETCH_SCHEMA.names).aggregate([])


def rows_of(table: pa.Table, text: int) -> pa.Table:
    """The rows of a table of stretches that are of one text."""
    return table.filter(pc.equal(table["text"], pa.scalar(text, pa.uint64())))


TEXT_KINDS = ("clean_corpus", "study")
"""Artifacts with the text that shards are made of."""
NEIGHBORHOOD = 48
"""Tokens that are shown on either side of a stretch."""
BEGINNING = 64
"""Tokens that are shown of a document that is only similar."""
UNKNOWN = "unknown"
KEEP = "`retention.keep` in the pipeline file keeps all of a version."


class RowPart(NamedTuple):
    """A part of a document, within one row."""

    shard: IndexedShard
    segment: int
    place: int
    """Of its first token, among all tokens of the shard."""
    tokens: int


@dataclass(frozen=True)
class Source:
    """A document that the version was trained on, and the part of it that is meant."""

    document: str
    source: str
    license: str
    shard: str
    row: int
    """Of the shard."""
    before: str
    text: str
    after: str
    lessons: list[Lesson]
    """When the document was trained on, oldest first."""


@dataclass(frozen=True)
class TrainingText:
    """What the runs behind a version read; each part is opened when needed, and stays open.

    Two instances are equal if nothing has changed between their creation.
    """

    version: ModelVersion
    artifacts: list[Artifact]
    """The `tokenized_shards` that are still there, the version's own first."""
    runs: list[TrainingRun]
    readers: dict[str, frozenset[str]]
    """Artifact to the URLs of what the runs that read it were trained on."""
    missing: list[str]
    """What was read and cannot be looked at, since its text or the record is gone, in words."""
    report: Report = field(compare=False)
    _opened: dict[str, pa.Table] = field(default_factory=dict, compare=False)
    """URL to the records of a run."""

    @classmethod
    def find(
        cls, store: Store, version: ModelVersion, runs: Sequence[TrainingRun], report: Report
    ) -> "TrainingText":
        """What is still in the store; raises MissingArtifact where nothing is."""
        artifacts: dict[str, Artifact] = {}
        readers: dict[str, frozenset[str]] = {}
        missing: list[str] = []
        # The newest first, whose shards and licenses come before those of earlier ones.
        for run in reversed(runs):
            name = shards_of(store, run)
            artifact = store.find_named("tokenized_shards", name)
            if artifact is None:
                # Without the checkpoint's manifest, its shards are unknown.
                lost = ("tokenized_shards", name) if name else ("checkpoint", run.checkpoint)
                missing.append(f"{run.name}: {tell_removal(store, *lost)}")
                continue
            artifacts[name] = artifact
            if run.record is None:
                missing.append(f"{run.name}: which rows it read is no longer on record")
            else:
                readers[name] = readers.get(name, frozenset()) | {run.record}
        if not artifacts:
            raise MissingArtifact(
                f"No text that version {version.version} was trained on is left: "
                f"{'; '.join(missing)}. {KEEP}"
            )
        return cls(version, list(artifacts.values()), list(runs), readers, missing, report)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The one that made the tokens; raises MissingArtifact where it was removed."""
        store = self.artifacts[0].store
        tokenizer = find_tokenizer(store, self.version)
        if tokenizer is None:
            removal = tell_removal(store, "checkpoint", self.version.model_fingerprint)
            raise MissingArtifact(f"No tokenizer is left to read the text by: {removal}. {KEEP}")
        return tokenizer

    @cached_property
    def shards(self) -> list[IndexedShard]:
        """The shards, each content once; indexes that are missing are built first."""
        by_content: dict[str, IndexedShard] = {}
        for artifact in self.artifacts:
            readers = self.readers.get(artifact.fingerprint, frozenset())
            for shard in open_indexed(artifact, readers, self.report):
                # A corpus that grew shares most shards with the one before; each is searched once.
                existing = by_content.get(shard.content, shard)
                by_content[shard.content] = replace(
                    existing, records=existing.records | shard.records
                )
        return list(by_content.values())

    @property
    def records(self) -> list[str]:
        """URLs of what the runs were trained on."""
        return [run.record for run in self.runs if run.record]

    @cached_property
    def texts(self) -> np.ndarray:
        """The texts trained on, each once, in order: uint64."""
        arrays = [texts_of(self._open(url)) for url in self.records]
        # The texts of one record are sorted already, each once.
        if len(arrays) == 1:
            return arrays[0]
        return sorted_unique(np.concatenate(arrays)) if arrays else np.empty(0, np.uint64)

    def read(self, url: str, texts: Sequence[int] | np.ndarray) -> pa.Table:
        """The records of some texts, as `read_trained` gives them."""
        return records_of(self._open(url), texts)

    def _open(self, url: str) -> pa.Table:
        """The records of a run, read once: an answer needs texts from all over the file."""
        if url not in self._opened:
            self._opened[url] = open_trained(url)
        return self._opened[url]

    def beginnings(self, texts: Sequence[int]) -> list[RowPart]:
        """The first words of each text that were trained on, in a row that still exists if
        possible."""
        lessons = stretches_of(self.records, texts, self.read)
        return [self._beginning(text, rows_of(lessons, text).to_pylist()) for text in texts]

    def _beginning(self, text: int, lessons: list[dict[str, int]]) -> RowPart:
        parts: list[tuple[tuple[bool, int], RowPart]] = []
        for shard in self.shards:
            documents = np.flatnonzero(shard.index.texts == np.uint64(text))
            if not len(documents):
                # Its segments are not looked at, which would read the whole file.
                continue
            segments = shard.shard.segments
            for segment in np.flatnonzero(np.isin(segments["document"], documents)).tolist():
                first = int(segments["offset"][segment])
                last = first + int(segments["length"][segment])
                for lesson in lessons:
                    start, end = max(first, lesson["start"]), min(last, lesson["end"])
                    if start < end:
                        is_elsewhere = self.records[lesson["record"]] not in shard.records
                        place = int(first_places(shard.shard, np.array(segment))) + start - first
                        part = RowPart(shard, segment, place, min(BEGINNING, end - start))
                        # False sorts first: a row that a run really took is preferred, then the
                        # earliest token.
                        parts.append(((is_elsewhere, start), part))
        return min(parts, key=lambda part: part[0])[1]

    def describe(self, parts: Sequence[RowPart]) -> list[Source]:
        """Parts of documents in words, in their order."""
        places = [
            (part.shard, int(part.shard.shard.segments["document"][part.segment])) for part in parts
        ]
        records = [shard.documents.slice(number, 1).to_pylist()[0] for shard, number in places]
        texts = [int(shard.index.texts[number]) for shard, number in places]
        lessons = lessons_by_text(self.runs, texts, self.read)
        # A derived text has the license of its document.
        documents = [document_of(record["id"]) for record in records]
        licenses = self._licenses(
            {
                origin: record["source"] if origin == record["id"] else None
                for origin, record in zip(documents, records, strict=True)
            }
        )
        return [
            Source(
                record["id"],
                record["source"],
                licenses.get(document, UNKNOWN),
                part.shard.shard.entry.name,
                part.place // part.shard.shard.tokens.shape[1],
                *self._in_context(part),
                lessons[text],
            )
            for part, record, document, text in zip(parts, records, documents, texts, strict=True)
        ]

    def _in_context(self, part: RowPart) -> tuple[str, str, str]:
        """What stands before a part in its row, the part itself, and what stands after it."""
        shard, last = part.shard.shard, part.place + part.tokens
        begin = int(first_places(shard, np.array(part.segment)))
        end = begin + int(shard.segments["length"][part.segment])
        # Never beyond the segment: what stands beside it in the row is another document.
        first, end = max(begin, part.place - NEIGHBORHOOD), min(end, last + NEIGHBORHOOD)
        tokens = shard.tokens.reshape(-1)
        before, text, after = (
            self.tokenizer.decode(tokens[left:right].tolist())
            for left, right in ((first, part.place), (part.place, last), (last, end))
        )
        return before, text, after

    def _licenses(self, sources: dict[str, str | None]) -> dict[str, str]:
        """The licenses of documents, given by id and source if known, from the newest text."""
        licenses: dict[str, str] = {}
        for shards in self.artifacts:
            store = shards.store
            clean = find_manifest(store, "clean_corpus", shards.manifest.inputs["clean_corpus"])
            raw = store.find_named("raw_corpus", clean.inputs["raw_corpus"]) if clean else None
            if raw:
                # The newest text comes first, and what it says is not replaced by older text.
                licenses = find_licenses(raw, sources) | licenses
        return licenses


def find_licenses(raw_corpus: Artifact, documents: Mapping[str, str | None]) -> dict[str, str]:
    """The licenses of those documents that have one.

    Most sources order their documents by id, so about one row group is read for each document.

    Args:
        documents: id to source, where that is known.
    """
    condition = pc.field("id").isin(pa.array(documents, pa.string()))
    sources = set(documents.values())
    if None not in sources:
        condition &= pc.field("source").isin(pa.array(sources, pa.string()))
    snapshot = open_parts([raw_corpus.url], ["id", "source", "license"])
    table = snapshot.to_table(["id", "license"], filter=condition).drop_null()
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


def shards_of(store: Store, run: TrainingRun) -> str:
    """Fingerprint of the shards that a run took rows from; empty where its manifest is gone."""
    manifest = find_manifest(store, "checkpoint", run.checkpoint)
    return manifest.inputs["tokenized_shards"] if manifest else ""


def in_forms_of(store: Store, behind: Iterable[Mapping[str, str]], text: str) -> list[str]:
    """A text in the Unicode form of each corpus behind a version, each form once.

    Args:
        behind: asset to fingerprint of what the version and its runs were made from, newest first.
    """
    names = dict.fromkeys(inputs.get("clean_corpus", "") for inputs in behind)
    manifests = (find_manifest(store, "clean_corpus", name) for name in names)
    return list(dict.fromkeys(in_unicode_form(manifest, text) for manifest in manifests))


def in_unicode_form(manifest: Manifest | None, text: str) -> str:
    """A text in the form that all text of a clean corpus is in."""
    is_nfkc = manifest and manifest.settings.get("unicode_form") == "NFKC"
    return unicodedata.normalize("NFKC" if is_nfkc else "NFC", text)


def find_tokenizer(store: Store, version: ModelVersion) -> Tokenizer | None:
    """A version's tokenizer: with its weights, or else with the base model that has the same."""
    places = (
        ("checkpoint", version.model_fingerprint, f"/{MODEL_FOLDER}"),
        ("base_model", version.lineage.get("base_model", ""), ""),
    )
    for kind, fingerprint, folder in places:
        artifact = store.find_named(kind, fingerprint)
        path = f"{artifact.path}{folder}/tokenizer.json" if artifact else ""
        if path and files.exists(path):
            tokenizer = Tokenizer.from_file(path)
            # As in the shards, where the name of a special token in a document is plain text.
            tokenizer.encode_special_tokens = True
            return tokenizer
    return None
