"""The text that a version was trained on: its shards, its documents' names and their licenses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from artifacts.arrays import sorted_unique
from artifacts.errors import MissingArtifact
from artifacts.progress import Report
from artifacts.store.store import Artifact, Store
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.retired import find_manifest
from llm_assets.tracing.indexed import IndexedShard, open_indexed
from llm_assets.tracing.lessons import Lesson, Run, lessons_of
from recipes.data.trained import trained_texts
from recipes.spec import MODEL_FOLDER

NEIGHBORHOOD = 48
"""Tokens that are shown on either side of a stretch."""
BEGINNING = 64
"""Tokens that are shown of a document that is only near."""
UNKNOWN = "unknown"

Part = tuple[IndexedShard, int, int, int]
"""Shard, segment, place of the first token in the shard, and tokens: a part of one row."""


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
    """What the runs behind a version read; each part is opened when it is needed, and stays open.

    Two that were found one after the other are equal where nothing of it changed meanwhile.
    """

    version: ModelVersion
    artifacts: list[Artifact]
    """The `tokenized_shards` that are still there, the version's own first."""
    runs: list[Run]
    unknown: list[Run]
    """Runs whose record or whose text is gone."""
    report: Report = field(compare=False)
    _licenses: dict[str, str] = field(default_factory=dict, compare=False)
    """Of the documents that were asked for."""

    @classmethod
    def find(
        cls, store: Store, version: ModelVersion, runs: Sequence[Run], report: Report
    ) -> "TrainingText":
        """What is still in the store; raises MissingArtifact where nothing is."""
        artifacts: dict[str, Artifact] = {}
        unknown = []
        for run in reversed(runs):
            manifest = find_manifest(store, "checkpoint", run.checkpoint)
            name = manifest.inputs["tokenized_shards"] if manifest else ""
            artifact = store.find_named("tokenized_shards", name) if name else None
            if artifact:
                artifacts[name] = artifact
            if artifact is None or run.record is None:
                unknown.append(run)
        if not artifacts:
            raise MissingArtifact(
                f"No text that version {version.version} was trained on is in {store.root} any "
                "more: `retention.keep` in the pipeline file keeps that of a version."
            )
        return cls(version, list(artifacts.values()), list(runs), unknown, report)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The version's; raises MissingArtifact where its weights were removed."""
        model = self.artifacts[0].store.load("checkpoint", self.version.model_fingerprint)
        return Tokenizer.from_file(str(model.path / MODEL_FOLDER / "tokenizer.json"))

    @cached_property
    def shards(self) -> list[IndexedShard]:
        """The shards, each content once; indexes that are missing are built first."""
        found: dict[str, IndexedShard] = {}
        for artifact in self.artifacts:
            for shard in open_indexed(artifact.store, artifact, self.report):
                found.setdefault(shard.content, shard)
        return list(found.values())

    @property
    def records(self) -> list[str]:
        """URLs of what the runs were trained on."""
        return [run.record for run in self.runs if run.record]

    @cached_property
    def texts(self) -> np.ndarray:
        """The texts trained on, each once, in order: uint64."""
        found = [trained_texts(url) for url in self.records]
        return sorted_unique(np.concatenate(found)) if found else np.empty(0, np.uint64)

    def beginning(self, shard: IndexedShard, document: int) -> Part:
        """The first words of a document."""
        segments = shard.shard.segments
        held = np.flatnonzero(segments["document"] == document)
        segment = int(held[np.argmin(segments["offset"][held])])
        length = min(BEGINNING, int(segments["length"][segment]))
        return shard, segment, int(shard.first_places[segment]), length

    def describe(self, parts: Sequence[Part]) -> list[Source]:
        """Parts of documents in words, in their order."""
        records = [self._record(shard, segment) for shard, segment, _, _ in parts]
        lessons = lessons_of(self.runs, [record["text_hash"] for record in records])
        self._look_up_licenses({record["id"] for record in records})
        return [
            self._describe(part, record, lessons[record["text_hash"]])
            for part, record in zip(parts, records, strict=True)
        ]

    def _describe(self, part: Part, record: dict[str, str], lessons: list[Lesson]) -> Source:
        shard, segment, place, length = part
        begin = int(shard.first_places[segment])
        end = begin + int(shard.shard.segments["length"][segment])
        tokens = shard.shard.tokens.reshape(-1)
        last = place + length
        first, end = max(begin, place - NEIGHBORHOOD), min(end, last + NEIGHBORHOOD)
        before, text, after = (
            self.tokenizer.decode(tokens[one:other].tolist())
            for one, other in ((first, place), (place, last), (last, end))
        )
        row = place // shard.shard.tokens.shape[1]
        name = shard.shard.entry.name
        license = self._licenses[record["id"]]
        return Source(
            record["id"], record["source"], license, name, row, before, text, after, lessons
        )

    def _record(self, shard: IndexedShard, segment: int) -> dict[str, str]:
        number = int(shard.shard.segments["document"][segment])
        found: dict[str, str] = shard.documents.slice(number, 1).to_pylist()[0]
        return found

    def _look_up_licenses(self, documents: set[str]) -> None:
        """Note the licenses of documents, of those that have one and whose raw corpus is there."""
        new = documents - self._licenses.keys()
        if not new:
            return
        wanted = pa.array(sorted(new), pa.string())
        found: dict[str, str] = {}
        for shards in self.artifacts:
            store = shards.store
            clean = find_manifest(store, "clean_corpus", shards.manifest.inputs["clean_corpus"])
            raw = store.find_named("raw_corpus", clean.inputs["raw_corpus"]) if clean else None
            for path in sorted(raw.path.glob("part-*.parquet")) if raw else ():
                if "license" not in pq.read_schema(path).names:
                    continue
                table = pq.read_table(path, columns=["id", "license"])
                table = table.filter(pc.is_in(table["id"], wanted)).drop_null()
                found = dict(zip(*(c.to_pylist() for c in table.columns), strict=True)) | found
        self._licenses.update({one: found.get(one) or UNKNOWN for one in new})
