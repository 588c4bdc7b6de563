"""What is stated, and signed, about texts that were forgotten."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from artifacts.errors import UserError
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.forgetting.listed import ForgottenDocument
from llm_assets.registry.start import START_INPUT
from llm_assets.registry.state import RegistryState
from llm_assets.tracing.lessons import lessons_of, runs_behind
from recipes.spec import MODEL_FOLDER

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:llm-assets:forgetting:v1"
DIGEST = "llmAssetsTextHash"
"""Of a subject: the hash that a document's cleaned text is known by in corpora and shards."""
REPLACES = "replaces"
"""In the stats of a checkpoint that was made once more: the one without the mask."""


class Reading(BaseModel):
    """A version that was trained on one of the texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    checkpoint: str
    steps: dict[str, list[int]]
    """Checkpoint of each run behind it to the steps that were trained on a text."""


class Replacement(BaseModel):
    """A run that was made once more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: str
    after: str
    """Fingerprints of the checkpoints."""
    weights_before: dict[str, str]
    weights_after: dict[str, str]
    """File of the model to its SHA-256; empty where the manifest no longer lists files."""
    masked: list[str]
    """All texts that were masked in it."""


class Forgetting(BaseModel):
    """The predicate of the statement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: str
    at: datetime
    documents: list[ForgottenDocument]
    read_by: list[Reading]
    replaced: list[Replacement]
    """Oldest first; the last one is the version that takes the place of what served."""
    erased: bool
    """Whether the texts were taken out of what was made before."""
    memory: dict[str, Any] | None
    """Of `recipes.attribution.memory`, roles `before` and `after`; None where it was not asked."""
    verified_by: str = "llm-assets verify CERTIFICATE --retrain"


def replacements(store: Store, current: Artifact | None) -> list[Replacement]:
    """The runs behind a checkpoint that were made once more, oldest first."""
    found: list[Replacement] = []
    while current and REPLACES in current.stats:
        before = store.find_named("checkpoint", current.stats[REPLACES])
        found.append(
            Replacement(
                before=current.stats[REPLACES],
                after=current.fingerprint,
                weights_before=weights_of(before) if before else {},
                weights_after=weights_of(current),
                masked=current.stats["masked"],
            )
        )
        start = current.manifest.inputs.get(START_INPUT)
        current = store.find_named("checkpoint", start) if start else None
    return found[::-1]


def weights_of(checkpoint: Artifact) -> dict[str, str]:
    """File of a checkpoint's model to its checksum, as its manifest has it."""
    return {
        entry.path: entry.sha256 or str(entry.crc32c)
        for entry in checkpoint.manifest.files
        if entry.path.startswith(f"{MODEL_FOLDER}/")
    }


def readings(store: Store, state: RegistryState, texts: Sequence[str]) -> list[Reading]:
    """The versions that were trained on one of the texts, and when."""
    found = []
    for version in state.versions:
        lessons = lessons_of(runs_behind(store, state, version), texts)
        steps: dict[str, set[int]] = {}
        for lesson in (one for of_text in lessons.values() for one in of_text):
            steps.setdefault(lesson.run.checkpoint, set()).update(lesson.steps)
        if steps:
            found.append(
                Reading(
                    version=version.version,
                    checkpoint=version.model_fingerprint,
                    steps={run: sorted(of_run) for run, of_run in steps.items()},
                )
            )
    return found


def state_it(
    record: Pipeline,
    state: RegistryState,
    documents: Sequence[ForgottenDocument],
    erased: bool,
    memory: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The statement on some documents of the list, whose texts are its subjects."""
    texts = sorted({one.text_hash for one in documents if one.text_hash})
    read_by = readings(record.store, state, texts)
    replaced = replacements(record.store, record.find_current("checkpoint")) if read_by else []
    predicate = Forgetting(
        pipeline=record.name,
        at=datetime.now(UTC),
        documents=list(documents),
        read_by=read_by,
        replaced=[one for one in replaced if set(texts) <= set(one.masked)],
        erased=erased,
        memory=dict(memory) if memory else None,
    )
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "document", "digest": {DIGEST: text}} for text in texts],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate.model_dump(mode="json"),
    }


def read_statement(statement: Mapping[str, Any], where: object) -> Forgetting:
    """What a statement says; raises UserError where it is about something else."""
    if statement.get("predicateType") != PREDICATE_TYPE:
        raise UserError(f"{where} states {statement.get('predicateType')}, not {PREDICATE_TYPE}.")
    return Forgetting.model_validate(statement["predicate"])
