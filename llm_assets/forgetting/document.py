"""What became of one document: merged, edited, trained on, forgotten."""

import unicodedata
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.forgetting.erase import made_by
from llm_assets.forgetting.forgotten_list import ForgottenDocument, read_list
from llm_assets.registry.state import RegistryState
from llm_assets.study.rows import DERIVATION_SCHEMA, DERIVATIONS_NAME
from llm_assets.tracing.explain import Exposure, exposures
from llm_assets.tracing.training_text import Lesson, TrainingRun, all_runs, lessons_of
from spark_jobs.clean.decide.decider import DROPPED_SCHEMA, read_dropped
from spark_jobs.clean.history import PAST_FOLDER
from spark_jobs.explain import DocumentStory, UnknownDocument, explain_document
from spark_jobs.read.document import DERIVED
from spark_jobs.runtime.parquet import open_parts, read_table
from spark_jobs.settings import DecontaminationSettings

_composed = partial(unicodedata.normalize, "NFC")


@dataclass(frozen=True)
class EarlierText:
    """What a document said before it was edited or removed."""

    text_hash: str
    text: str
    exposure: Exposure
    """Which versions were trained on it, as far as is known."""


@dataclass(frozen=True)
class DocumentHistory:
    """All that is on record of a document."""

    story: DocumentStory | None
    """None if no corpus contains it any more."""
    exposure: Exposure | None
    """Which versions were trained on it, as far as is known; None without a story."""
    lessons: list[Lesson]
    forgotten: list[ForgottenDocument]
    """It, and others of its text, that were forgotten."""
    derivation: str | None = None
    """What it was made from and how, where it is a text of `study`."""
    earlier: Sequence[EarlierText] = ()
    """Its other texts, newest first, as far as they are still in the store."""
    absence: str = ""
    """Why it is not in the current corpus, in words, if nobody forgot it."""

    def __str__(self) -> str:
        earlier = [f"before, {text.exposure}" for text in self.earlier]
        if self.story is None and self.forgotten:
            lines = [f"{self.forgotten[0]}; it is in no corpus any more"]
            lines += [f"before, it was trained on by {lesson}" for lesson in self.lessons]
            return "\n  ".join([*lines, *earlier])
        parts = (self.story, self.absence, self.derivation, self.exposure, *self.forgotten)
        return "\n  ".join([*(str(part) for part in parts if part), *earlier])

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        values: dict[str, Any] = {}
        if self.story and self.exposure:
            values = asdict(self.story) | {"exposure": asdict(self.exposure)}
        elif self.forgotten:
            entry = self.forgotten[0].model_dump(mode="json")
            values = {"forgotten": entry, "lessons": [asdict(lesson) for lesson in self.lessons]}
        if self.derivation:
            values["derivation"] = self.derivation
        earlier = [
            {"text_hash": text.text_hash, "exposure": asdict(text.exposure)}
            for text in self.earlier
        ]
        return values | ({"earlier": earlier} if earlier else {})


def ids_as_stored(record: Pipeline, identifiers: Sequence[str]) -> list[str]:
    """Ids as documents have them: where none has the very id, those of the same letters.

    In names of files, macOS keeps accents apart from their letters; people type both as one.
    """
    named = {_composed(one) for one in identifiers if not one.isascii()}
    if not named:
        return list(identifiers)
    known = [entry.id for entry in read_list(record.store, record.name).documents]
    kinds = ("clean_corpus", "study", "raw_corpus")
    names = [(kind, name) for kind in kinds for name in record.known(kind)]
    urls = [corpus.url for name in names if (corpus := record.store.find_named(*name))]
    if urls:
        parts = open_parts([*urls, *(f"{url}/{PAST_FOLDER}" for url in urls)], ["id"])
        has_letters = pc.utf8_normalize(pc.field("id"), form="NFC").isin(pa.array(sorted(named)))
        known += parts.to_table(filter=has_letters)["id"].to_pylist()
    stored: dict[str, dict[str, None]] = defaultdict(dict)
    for one in known:
        stored[_composed(one)][one] = None
    spellings = ((one, stored[_composed(one)] or [one]) for one in identifiers)
    return [found for one, alike in spellings for found in ([one] if one in alike else alike)]


def find_document(record: Pipeline, state: RegistryState, identifier: str) -> DocumentHistory:
    """Look a document up; raises UserError where nothing of that id is known."""
    identifier = ids_as_stored(record, [identifier])[0]
    forgotten = read_list(record.store, record.name).documents
    is_derived = DERIVED in identifier
    corpus = record.current("study" if is_derived else "clean_corpus")
    shards = record.find_current("tokenized_shards")
    shards = shards if shards and corpus.fingerprint in shards.manifest.inputs.values() else None
    stats = ShardStats.model_validate(shards.stats) if shards else None
    runs = all_runs(record.store, state)
    try:
        folder = str(shards.path) if shards else None
        settings = shards.manifest.settings if shards else {}
        limits = DecontaminationSettings.model_validate(settings.get("decontamination", {}))
        story = explain_document(corpus.url, folder, stats, identifier, limits.ngram_size)
    except UserError as error:
        entries = [entry for entry in forgotten if entry.id == identifier]
        earlier = _earlier_texts(record, state, runs, identifier)
        if not entries and not earlier:
            if not isinstance(error, UnknownDocument):
                raise
            listing = f"{error} `llm-assets check --all` lists files and rows that are not read."
            raise UserError(_left_out(record.store, corpus, identifier) or listing) from None
        texts = list(dict.fromkeys(entry.text_hash for entry in entries if entry.text_hash))
        lessons = [lesson for of_text in lessons_of(runs, texts).values() for lesson in of_text]
        absence = "" if entries else str(error)
        return DocumentHistory(None, None, lessons, entries, None, earlier, absence)
    row = {"id": story.survivor, "source": story.source, "split": story.split}
    (exposure,) = exposures(runs, [row | {"text_hash": story.text_hash}])
    matching = [
        entry
        for entry in forgotten
        if story.text_hash == entry.text_hash or (story.survivor == entry.id and not entry.numbered)
    ]
    derivation = None
    if is_derived:
        table = read_table(f"{corpus.url}/{DERIVATIONS_NAME}", DERIVATION_SCHEMA.names)
        (made,) = table.filter(pc.equal(table["id"], story.survivor)).to_pylist()
        method = "its facts in other forms"
        if made["generator"]:
            method = f"{made['generator']}, prompt {made['prompt']}, seed {made['seed']}"
        derivation = f"made from {made['document']}: {method}"
    earlier = _earlier_texts(record, state, runs, identifier, story.text_hash)
    return DocumentHistory(story, exposure, exposure.lessons, matching, derivation, earlier)


def _left_out(store: Store, clean: Artifact, identifier: str) -> str:
    """Why no clean corpus has a document of this id; empty where the stages do not tell."""
    for row in read_dropped(clean.url, DROPPED_SCHEMA, "id", pa.array([identifier])).to_pylist():
        reason = row["reason"]
        told = f"{reason.replace('_', ' ')} ({clean.stats['dropped'][reason]:,} in all)"
        return f"{identifier!r} was read and left out by cleaning: {told}."
    raw = store.find_named("raw_corpus", clean.manifest.inputs.get("raw_corpus", ""))
    if raw is None:
        return ""
    faults = [fault for fault in raw.stats.get("faults", ()) if is_about(fault, [identifier])]
    typed, unread = _composed(identifier), raw.stats.get("unread_examples", {}).items()
    told = f"{identifier!r} was not read"
    faults += [f"{told} ({kind})." for kind, names in unread if typed in map(_composed, names)]
    return " ".join(faults)


def is_about(fault: str, ids: Collection[str]) -> bool:
    """Whether what is said of something that was set aside names a file or document of these."""
    ways = ("/{} ", "/{}:", "/{},", "'{}'")
    said = _composed(f"/{fault}")
    return any(way.format(one) in said for one in map(_composed, ids) for way in ways)


def _earlier_texts(
    record: Pipeline,
    state: RegistryState,
    runs: Sequence[TrainingRun],
    identifier: str,
    now: str = "",
) -> list[EarlierText]:
    """Other texts of an id than `now` in the corpora that still exist: each once, newest first."""
    kind = "study" if DERIVED in identifier else "clean_corpus"
    urls = [corpus.url for corpus in made_by(record, state, kind, with_trials=False)]
    folders = [folder for url in urls for folder in (url, f"{url}/{PAST_FOLDER}")]
    columns, condition = ["id", "source", "split", "text_hash"], pc.field("id") == identifier
    parts = open_parts(folders, [*columns, "text"])
    versions = parts.to_table(
        columns, filter=condition & (pc.field("text_hash") != now)
    ).to_pylist()
    # Read only if needed: texts are long, and most documents have just one.
    texts = parts.to_table(["text_hash", "text"], filter=condition).to_pylist() if versions else []
    text_by_hash = {row["text_hash"]: row["text"] or "" for row in texts}
    # Of equal texts, a dictionary keeps the last row: reversed, that of the newest corpus.
    rows = list({row["text_hash"]: row for row in reversed(versions)}.values())[::-1]
    return [
        EarlierText(row["text_hash"], text_by_hash[row["text_hash"]], exposure)
        for row, exposure in zip(rows, exposures(runs, rows), strict=True)
    ]
