"""What became of one document: merged, trained on, forgotten."""

from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact
from llm_assets.forgetting.erase import ForgottenDocument, read_list
from llm_assets.registry.state import RegistryState
from llm_assets.study.rows import DERIVATION_SCHEMA, DERIVATIONS_NAME
from llm_assets.tracing.passages import Exposure, exposures
from llm_assets.tracing.training_text import Lesson, all_runs, lessons_of
from spark_jobs.explain import DocumentStory, explain_document
from spark_jobs.read.document import DERIVED
from spark_jobs.runtime.parquet import read_table


@dataclass(frozen=True)
class DocumentHistory:
    """All that is on record of a document."""

    story: DocumentStory | None
    """None of one that is in no corpus any more."""
    exposure: Exposure | None
    """Which versions were trained on it, as far as is known; None without a story."""
    lessons: list[Lesson]
    forgotten: list[ForgottenDocument]
    """It, and others of its text, that were forgotten."""
    derivation: str | None = None
    """What it was made from and how, where it is a text of `study`."""

    def __str__(self) -> str:
        if self.story is None:
            lines = [f"{self.forgotten[0]}; it is in no corpus any more"]
            lines += [f"  before, it was trained on by {lesson}" for lesson in self.lessons]
            return "\n".join(lines)
        told = (self.story, self.derivation, self.exposure, *self.forgotten)
        return "\n  ".join(str(one) for one in told if one)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        if self.story is None:
            entry = self.forgotten[0].model_dump(mode="json")
            return {"forgotten": entry, "lessons": [asdict(lesson) for lesson in self.lessons]}
        assert self.exposure is not None
        told = asdict(self.story) | {"exposure": asdict(self.exposure)}
        return told | ({"derivation": self.derivation} if self.derivation else {})


def find_document(record: Pipeline, state: RegistryState, identifier: str) -> DocumentHistory:
    """Look a document up; raises UserError where nothing of that id is known."""
    listed = read_list(record.store, record.name).documents
    is_derived = DERIVED in identifier
    corpus = record.current("study" if is_derived else "clean_corpus")
    shards = record.find_current("tokenized_shards")
    stats = ShardStats.model_validate(shards.stats) if shards else None
    runs = all_runs(record.store, state)
    try:
        folder = str(shards.path) if shards else None
        story = explain_document(corpus.url, folder, stats, identifier)
    except UserError:
        entries = [one for one in listed if one.id == identifier]
        if not entries:
            raise
        text = entries[0].text_hash
        return DocumentHistory(None, None, lessons_of(runs, [text])[text] if text else [], entries)
    kept = {"id": story.survivor, "source": story.source, "split": story.split}
    (exposure,) = exposures(runs, [kept | {"text_hash": story.text_hash}])
    same = [one for one in listed if story.survivor == one.id or story.text_hash == one.text_hash]
    derivation = _derivation(corpus, story.survivor) if is_derived else None
    return DocumentHistory(story, exposure, exposure.lessons, same, derivation)


def _derivation(study: Artifact, identifier: str) -> str:
    rows = read_table(f"{study.url}/{DERIVATIONS_NAME}", DERIVATION_SCHEMA.names)
    (row,) = rows.filter(pc.equal(rows["id"], identifier)).to_pylist()
    by = "its facts in other forms"
    if row["generator"]:
        by = f"{row['generator']}, prompt {row['prompt']}, seed {row['seed']}"
    return f"made from {row['document']}: {by}"
