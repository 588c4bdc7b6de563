"""The text that a version was trained on: its shards, its documents' names and their licenses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from artifacts.errors import MissingArtifact
from artifacts.numbers.arrays import sorted_unique
from artifacts.progress import Report
from artifacts.shards.span_index import first_places
from artifacts.store.store import Artifact, Store
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.retired import find_manifest
from llm_assets.tracing.indexed import IndexedShard, open_indexed
from llm_assets.tracing.lessons import Lesson, Run, lessons_by_text, stretches_of
from llm_assets.tracing.licenses import find_licenses
from recipes.data.trained import open_trained, records_of, texts_of
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
    readers: dict[str, frozenset[str]]
    """Artifact to the URLs of what the runs that read it were trained on."""
    unknown: list[Run]
    """Runs whose record or whose text is gone."""
    report: Report = field(compare=False)
    _licenses: dict[str, str] = field(default_factory=dict, compare=False)
    """Of the documents that were asked for."""
    _opened: dict[str, pa.Table] = field(default_factory=dict, compare=False)
    """URL to the records of a run."""

    @classmethod
    def find(
        cls, store: Store, version: ModelVersion, runs: Sequence[Run], report: Report
    ) -> "TrainingText":
        """What is still in the store; raises MissingArtifact where nothing is."""
        artifacts: dict[str, Artifact] = {}
        readers: dict[str, frozenset[str]] = {}
        unknown = []
        for run in reversed(runs):
            manifest = find_manifest(store, "checkpoint", run.checkpoint)
            name = manifest.inputs["tokenized_shards"] if manifest else ""
            artifact = store.find_named("tokenized_shards", name) if name else None
            if artifact:
                artifacts[name] = artifact
            if artifact is None or run.record is None:
                unknown.append(run)
            else:
                readers[name] = readers.get(name, frozenset()) | {run.record}
        if not artifacts:
            raise MissingArtifact(
                f"No text that version {version.version} was trained on is in {store.root} any "
                "more: `retention.keep` in the pipeline file keeps that of a version."
            )
        return cls(version, list(artifacts.values()), list(runs), readers, unknown, report)

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
            readers = self.readers.get(artifact.fingerprint, frozenset())
            for shard in open_indexed(artifact.store, artifact, readers, self.report):
                known = found.get(shard.content, shard)
                found[shard.content] = replace(known, records=known.records | shard.records)
        return list(found.values())

    @property
    def records(self) -> list[str]:
        """URLs of what the runs were trained on."""
        return [run.record for run in self.runs if run.record]

    @cached_property
    def texts(self) -> np.ndarray:
        """The texts trained on, each once, in order: uint64."""
        found = [texts_of(self._open(url)) for url in self.records]
        if len(found) == 1:
            return found[0]
        return sorted_unique(np.concatenate(found)) if found else np.empty(0, np.uint64)

    def read(self, url: str, texts: Sequence[int] | np.ndarray) -> pa.Table:
        """The records of some texts, as `read_trained` gives them."""
        return records_of(self._open(url), texts)

    def _open(self, url: str) -> pa.Table:
        """The records of a run, read once: an answer has to do with texts all over the file."""
        if url not in self._opened:
            self._opened[url] = open_trained(url)
        return self._opened[url]

    def beginnings(self, texts: Sequence[int]) -> list[Part]:
        """The first words that were trained on of each text, in a row that was, if still there."""
        lessons = stretches_of(self.records, texts, self.read)
        found = [
            min(self._parts(text, _of_text(lessons, text)), key=lambda part: part[0])
            for text in texts
        ]
        return [part for _, part in found]

    def _parts(
        self, text: int, lessons: list[dict[str, int]]
    ) -> Iterator[tuple[tuple[bool, int], Part]]:
        """What was trained on of a text: whether in a row of another shard, and the first token."""
        for shard in self.shards:
            documents = np.flatnonzero(shard.index.texts == np.uint64(text))
            if not len(documents):
                continue
            segments = shard.shard.segments
            for segment in np.flatnonzero(np.isin(segments["document"], documents)).tolist():
                begin = int(segments["offset"][segment])
                last = begin + int(segments["length"][segment])
                for one in lessons:
                    start, end = max(begin, one["start"]), min(last, one["end"])
                    if start < end:
                        is_elsewhere = self.records[one["record"]] not in shard.records
                        place = int(first_places(shard.shard, np.array(segment))) + start - begin
                        part = shard, segment, place, min(BEGINNING, end - start)
                        yield (is_elsewhere, start), part

    def describe(self, parts: Sequence[Part]) -> list[Source]:
        """Parts of documents in words, in their order."""
        records = [self._record(shard, segment) for shard, segment, _, _ in parts]
        texts = [_text_of(shard, segment) for shard, segment, _, _ in parts]
        lessons = lessons_by_text(self.runs, texts, self.read)
        self._look_up_licenses({record["id"]: record["source"] for record in records})
        return [
            self._describe(part, record, lessons[text])
            for part, record, text in zip(parts, records, texts, strict=True)
        ]

    def _describe(self, part: Part, record: dict[str, str], lessons: list[Lesson]) -> Source:
        shard, segment, place, length = part
        begin = int(first_places(shard.shard, np.array(segment)))
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

    def _look_up_licenses(self, sources: dict[str, str]) -> None:
        """Note the licenses of documents, given by id and source; where none is known, that."""
        new = {one: source for one, source in sources.items() if one not in self._licenses}
        for shards in self.artifacts if new else ():
            store = shards.store
            clean = find_manifest(store, "clean_corpus", shards.manifest.inputs["clean_corpus"])
            raw = store.find_named("raw_corpus", clean.inputs["raw_corpus"]) if clean else None
            if raw:
                self._licenses.update(find_licenses(raw, new) | self._licenses)
        for one in new:
            self._licenses.setdefault(one, UNKNOWN)


def _text_of(shard: IndexedShard, segment: int) -> int:
    """What the text of a segment is known by."""
    return int(shard.index.texts[shard.shard.segments["document"][segment]])


def _of_text(lessons: pa.Table, text: int) -> list[dict[str, int]]:
    found: list[dict[str, int]] = lessons.filter(
        pc.equal(lessons["text"], pa.scalar(text, pa.uint64()))
    ).to_pylist()
    return found
