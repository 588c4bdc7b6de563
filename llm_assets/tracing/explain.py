"""What is behind a version, down to the text, and where a passage stands in that.

`llm-assets explain` and `llm-assets trace` search for text in the same way, so their answers agree.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from artifacts.errors import UserError, shown_in_line
from artifacts.examples import TARGETS, Form, read_example, texts_of
from artifacts.shards.shard_set import text_numbers
from artifacts.store.manifest import Manifest
from artifacts.store.store import Artifact, Store
from llm_assets.registry.card import describe_cost, describe_coverage, number, tell_story
from llm_assets.registry.start import REMOVED, find_manifest, tell_removal
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.training_text import (
    TEXT_KINDS,
    Lesson,
    TrainingRun,
    find_tokenizer,
    in_forms_of,
    lessons_of,
    rows_of,
    runs_behind,
    shards_of,
    stretches_of,
)
from recipes.evaluation.settings import SAMPLES_NAME
from spark_jobs.runtime.parquet import open_parts

ORDER = ("checkpoint", "base_model", "tokenized_shards", "study", "clean_corpus", "raw_corpus")


def explain(store: Store, state: RegistryState, version: ModelVersion) -> str:
    """Everything behind a version as text: verdicts, figures, artifacts down to the text.

    An artifact that retention removed is described by its manifest; one deleted by hand only by its
    fingerprint.
    """
    lines = [
        f"version {version.version}, registered {version.created_at:%Y-%m-%d %H:%M} UTC",
        f"model: {version.model_url} (license {version.license})",
        f"trained on {describe_coverage(version)}",
        f"cost: {describe_cost(version)}",
        *tell_story(state, version),
    ]
    for metric, by_role in version.evaluation.get("metrics", {}).items():
        figures = ", ".join(
            f"{role} {number(figure.get('value'))}" for role, figure in by_role.items()
        )
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
    removal = [tell_removal(store, name, fingerprint)] if REMOVED in manifest.provenance else []
    lines = [
        *removal,
        f"{name} {fingerprint}, made {manifest.created_at:%Y-%m-%d %H:%M} UTC by code version "
        f"{manifest.code_version}, revision {manifest.provenance.get('revision', 'unknown')}",
        *(f"  {key}: {value}" for key, value in listed(manifest.settings)),
        *(f"  library {name}: {version}" for name, version in manifest.libraries.items()),
    ]
    # Tables of figures, as of each split or model, are left to programs (`--json`).
    figures = {
        key: value
        for key, value in manifest.stats.items()
        for figures_of in [value.values() if isinstance(value, dict) else [value]]
        if not any(isinstance(figure, dict | list) for figure in figures_of)
    }
    return lines + [f"  {key}: {value}" for key, value in listed(figures)]


def listed(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every value as text, with its key; keys of inner mappings are joined by a dot."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from listed(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


_COLUMNS = ["id", "source", "split", "text_hash", "text"]


@dataclass(frozen=True)
class Exposure:
    """What runs were trained on of a document."""

    document: str
    source: str
    split: str
    lessons: list[Lesson]
    unknown: list[TrainingRun]
    """Runs whose record is gone."""
    passage: bool | None = None
    """Whether the passage that was looked for was trained on in it; None if nobody knows, or if the
    document itself was asked about."""

    @property
    def is_trained(self) -> bool:
        """Whether what was asked for was trained on, as far as is known."""
        return bool(self.lessons) and self.passage is not False

    def __str__(self) -> str:
        return f"{shown_in_line(self.document)} {self.without_id}"

    @property
    def without_id(self) -> str:
        """The same, to be shown beside the document's id."""
        note = "; no record of " + ", ".join(run.name for run in self.unknown)
        return f"({shown_in_line(self.source)}): {self._fate()}" + (note if self.unknown else "")

    def _fate(self) -> str:
        if self.lessons:
            fate = "trained on by " + "; by ".join(map(str, self.lessons))
            return fate if self.is_trained else f"{fate}, but not in this place"
        aside = self.split.replace("_", " ") if self.split in ("validation", "held_out") else ""
        trained = "not known whether trained on" if self.unknown else "never trained on"
        return f"{aside} text, {trained}" if aside else trained


@dataclass(frozen=True)
class Passages:
    """Where a text stands, in all corpora that a version was made from."""

    documents: list[Exposure]
    """Those that contain all of it, ignoring white space, with those trained on first."""
    searched: int
    """Corpora."""
    missing: list[str]
    """The others, and what became of them, in words."""


class TooLong(UserError):
    """A text has more words than can be looked for as a whole."""


def find_passages(store: Store, state: RegistryState, version: ModelVersion, text: str) -> Passages:
    """Look for a text in the clean corpora behind a version and the models that it continues.

    Raises:
        UserError: the text is empty, or the version is a base model.
        TooLong: the text has too many words to be looked for as a whole.
    """
    if not text.split():
        raise UserError("Give a piece of text to look for.")
    runs = runs_behind(store, state, version)
    shard_names = (shards_of(store, run) for run in reversed(runs))
    manifests = (find_manifest(store, "tokenized_shards", name) for name in shard_names)
    # Newest first, as far as their manifests are known.
    shards = [manifest for manifest in manifests if manifest]
    behind = (version.lineage, *(manifest.inputs for manifest in shards))
    names = [(kind, lineage[kind]) for lineage in behind for kind in TEXT_KINDS if kind in lineage]
    corpora = {name: store.find_named(*name) for name in names}
    if not corpora and not runs:
        raise UserError(f"Version {version.version} is the base model: it has no text here.")
    urls = [corpus.url for corpus in corpora.values() if corpus]
    forms = [form.split() for form in in_forms_of(store, behind, text)]
    # In Arrow's expressions (RE2), `\s` matches only ASCII white space.
    pattern = "|".join(r"[\s\p{Z}]+".join(map(re.escape, words)) for words in forms)
    has_text = pc.match_substring_regex(pc.field("text"), pattern)
    try:
        matches = open_parts(urls, _COLUMNS).to_table(filter=has_text).to_pylist() if urls else []
    except (pa.ArrowInvalid, OSError) as error:
        # RE2 compiles an expression within a fixed amount of memory, which a text of very many
        # words exceeds. Arrow has no error of its own for that.
        if "pattern too large" not in str(error):
            raise
        raise TooLong(
            f"A text of {len(forms[0]):,} words is too long to be looked for. Give a part of it."
        ) from None
    # A text in several corpora is described as in the first one.
    rows = {row["text_hash"]: row for row in reversed(matches)}
    tokenizer = find_tokenizer(store, version) if rows and shards else None
    passages: dict[str, bool] = {}
    # For examples, the tokens are not those of the text alone.
    if tokenizer and shards[0].stats.get("form", "pretraining") == "pretraining":
        records = [run.record for run in runs if run.record]
        first = 0 if shards[0].stats["start_token_id"] is None else 1
        passages = _trained_passages(records, tokenizer, first, rows, forms)
    results = exposures(runs, list(rows.values()), passages)
    return Passages(
        sorted(results, key=lambda exposure: (not exposure.is_trained, exposure.document)),
        searched=len(urls),
        missing=[tell_removal(store, *name) for name, corpus in corpora.items() if corpus is None],
    )


def exposures(
    runs: Sequence[TrainingRun],
    documents: Sequence[dict[str, Any]],
    passages: dict[str, bool] | None = None,
) -> list[Exposure]:
    """What runs were trained on of documents.

    Args:
        documents: `id`, `source`, `split` and `text_hash` of each.
        passages: text to whether the passage that was looked for was trained on, where known.
    """
    lessons = lessons_of(runs, [record["text_hash"] for record in documents])
    unrecorded = [run for run in runs if run.record is None]
    by_text = passages or {}
    return [
        Exposure(
            document["id"],
            document["source"],
            document["split"],
            lessons[document["text_hash"]],
            unrecorded,
            by_text.get(document["text_hash"]),
        )
        for document in documents
    ]


def _trained_passages(
    records: Sequence[str],
    tokenizer: Tokenizer,
    first: int,
    rows: dict[str, dict[str, Any]],
    forms: Sequence[Sequence[str]],
) -> dict[str, bool]:
    """Text to whether all tokens of a passage were trained on, anywhere that it stands in the text.

    Texts that were not trained on at all are left out.

    Args:
        records: URLs of what the runs were trained on (`recipes.data.records`).
        first: number of a text's own first token.
        forms: the words of the passage, as texts may have them.
    """
    pattern = re.compile("|".join(r"\s+".join(map(re.escape, words)) for words in forms))
    numbers = text_numbers(list(rows))
    stretches = stretches_of(records, numbers)
    trained = {}
    for known_by, (text, row) in zip(numbers.tolist(), rows.items(), strict=True):
        of_text = rows_of(stretches, known_by).to_pylist()
        if of_text:
            # As long as what was read: a passage that reaches beyond it was not read whole.
            was_read = np.zeros(max(stretch["end"] for stretch in of_text), bool)
            for stretch in of_text:
                was_read[stretch["start"] : stretch["end"]] = True
            starts, ends = np.array(
                tokenizer.encode(row["text"], add_special_tokens=False).offsets
            ).T
            trained[text] = False
            for match in pattern.finditer(row["text"]):
                # The first token that ends after the passage begins, up to the first that begins at
                # its end or later: tokens need not end where words do.
                begin = first + int(np.searchsorted(ends, match.start(), side="right"))
                end = first + int(np.searchsorted(starts, match.end()))
                trained[text] |= end <= len(was_read) and bool(was_read[begin:end].all())
    return trained


def read_texts(corpus: str, ids: Collection[str], column: str = "text") -> dict[str, str]:
    """Id to text, or to another column, for ids in the corpus; reading stops once all are found."""
    condition = pc.field("id").isin(pa.array(sorted(ids), pa.string()))
    texts: dict[str, str] = {}
    parts = open_parts([corpus], ["id", column])
    for part in parts.get_fragments():
        # Ids are small; texts are read only where there is one.
        try:
            if len(texts) < len(ids) and part.count_rows(filter=condition):
                rows = part.to_table(parts.schema, filter=condition).to_pylist()
                texts |= {row["id"]: row[column] or "" for row in rows}
        except (pa.ArrowInvalid, OSError) as error:
            # Of damaged pages, Arrow does not say which file has them.
            raise OSError(f"{part.path}: {error}") from error
    return texts


Samples = dict[str, list[dict[str, str]]]


def read_samples(evaluation: Artifact) -> Samples:
    """Role to what that model wrote, from an `eval_metrics` artifact.

    Of chats by a template, `prompt` is what was asked in the clean corpus, without the template,
    and `answer` what was answered, as long as the store has that corpus; so it is of pairs and of
    texts with a class.
    """
    samples: Samples = json.loads((evaluation.path / SAMPLES_NAME).read_text())
    form, name = form_shown(evaluation)
    if form != "pretraining" and (corpus := evaluation.store.find_named("clean_corpus", name)):
        both = [*chain.from_iterable(samples.values())]
        examples = read_texts(corpus.url, {sample["document"] for sample in both}, "example")
        for sample in both:
            if line := examples.get(sample["document"]):
                # Of a chat, the first of each role.
                texts = dict(reversed(texts_of(read_example(line))))
                (asked,) = texts.keys() & {"user", "input", "text"}
                (answered,) = texts.keys() & set(TARGETS)
                sample |= {"prompt": texts[asked], "answer": texts[answered]}
    return samples


def form_shown(evaluation: Artifact) -> tuple[Form, str]:
    """The form of the examples that models are shown how to answer, with the name of the clean
    corpus; `pretraining` where they continue text, as they do chats without a template."""
    name = evaluation.manifest.inputs.get("tokenized_shards", "")
    shards = evaluation.store.find_named("tokenized_shards", name)
    form = shards.stats.get("form") if shards else None
    # A template is empty where conversations were rendered plainly; what is judged otherwise than
    # in bits is shown as it was rendered, too.
    is_chat = shards and form == "conversations" and shards.stats.get("chat_template") != ""
    is_shown = is_chat and evaluation.stats["metric"].get("is_bits")
    if shards is None or not (is_shown or form in ("pairs", "labeled")):
        return "pretraining", ""
    return shards.stats["form"], shards.manifest.inputs["clean_corpus"]
