"""Erases what a pipeline has forgotten from all that it made before.

That is snapshots, corpora, shards, evaluations and caches. An artifact keeps its name, its other
documents and their order; of a forgotten document, its id and the hash of its text remain. So runs
can still be repeated over the same rows.
"""

import io
import json
import shutil
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts import checkpoints
from artifacts.errors import DamagedArtifact
from artifacts.leases import local_lease
from artifacts.numbers import spans
from artifacts.progress import Report
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import open_shards
from artifacts.shards.span_index import first_places
from artifacts.storage import files
from artifacts.storage.files import cache_folder
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from artifacts.store.rewrite import BEFORE_NAME, find_rewritable, rewrite
from artifacts.store.store import Artifact, Store
from llm_assets.forgetting.forgotten_list import ForgottenList
from llm_assets.registry.card import page_path
from llm_assets.registry.start import EXAMPLES, drop_retired_examples
from llm_assets.registry.state import RegistryState
from recipes.evaluation.exam import QUESTIONS_NAME
from recipes.evaluation.settings import SAMPLES_NAME
from recipes.spec import BEST_NAME, SPEC_NAME
from serving.state import Desired, StateFolder
from spark_jobs.clean.decide.decider import DUPLICATE_SCHEMA, read_dropped
from spark_jobs.clean.history import read_history
from spark_jobs.read.document import DERIVED, document_of
from spark_jobs.runtime.parquet import RAW_COLUMNS, find_parts

KINDS = ("raw_corpus", "clean_corpus", "tokenized_shards", "study", "exam", "eval_metrics")
"""Kinds of artifacts that hold text."""
REASON = "texts were forgotten"
LEASE = "erasing"
"""Of whoever takes text out of a store's artifacts."""


def erase(record: Pipeline, state: RegistryState, listed: ForgottenList, report: Report) -> None:
    """Take the texts of a pipeline's list out of all that it made, and drop the caches.

    Killed and called again, it goes on.

    Raises:
        DamagedArtifact: a manifest or a file cannot be read.
    """
    # Two at once would each write manifests by what it had read before the other rewrote files.
    with record.store.lease(LEASE, lambda who: report(f"waiting for {who}")):
        for artifact, contents, stats in _without_texts(record, state, listed):
            # Clean corpora, which come first, are rewritten before the next artifact is looked at;
            # `_without_texts` has read from them what the others need.
            if rewritten := rewrite(artifact, contents, stats, REASON):
                name = f"{artifact.manifest.kind} {artifact.fingerprint}"
                report(f"{name}: {len(rewritten):,} file(s) rewritten without the text.")
    for kind in KINDS:
        for fingerprint in _names(record, state, kind):
            try:
                drop_retired_examples(record.store, kind, fingerprint)
            except DamagedArtifact:
                # A damaged manifest explains nothing, and may hold the first words of documents.
                files.remove(f"{record.store.root}/{layout.retired(kind, fingerprint)}")
    # A version's page quotes text in its HTML, so the whole page is removed.
    for version in state.versions:
        files.remove(f"{record.store.root}/{page_path(record.name, version.version)}")
    if listed.active:
        _drop_leftovers(record, state)
    _drop_caches(record)
    report("The caches of text were emptied; they are filled again when needed.")
    _drop_states(record.store, report)
    # Last, since a rollout may be waited for, which can take hours.
    _drop_judged(record.store, listed, report)


def find_holders(record: Pipeline, state: RegistryState, listed: ForgottenList) -> list[Artifact]:
    """The artifacts of a pipeline that still hold a text of a list."""
    return [
        artifact
        for artifact, contents, stats in _without_texts(record, state, listed)
        if next(contents, None) or stats != artifact.stats
    ]


def find_brought_back(
    record: Pipeline, state: RegistryState, listed: ForgottenList
) -> list[Artifact]:
    """Holders that existed when their texts were erased: restored from a backup, or missed because
    erasure was interrupted.

    A later snapshot contains what its sources still do, but no corpus is made from those documents.
    """
    if not listed.active:
        return []
    last = max(document.at for document in listed.active)
    holders = find_holders(record, state, listed)
    return [artifact for artifact in holders if artifact.manifest.created_at < last]


def _without_texts(
    record: Pipeline, state: RegistryState, listed: ForgottenList
) -> Iterator[tuple[Artifact, Iterator[tuple[str, bytes]], dict[str, Any]]]:
    """All artifacts of a pipeline, each with its files that hold a text, rewritten without it, and
    its stats afterwards.

    Clean corpora come first: they alone know which other documents of their snapshot had the
    texts, and still know it after the rows are gone.
    """
    ids = set(listed.ids)
    raw_ids: dict[str, set[str]] = {}

    def numbers(artifact: Artifact, are_later: bool) -> set[str]:
        # Either rows that had the number when it was forgotten, or others that have had it since.
        created = artifact.manifest.created_at
        return {n.id for n in listed.active if n.numbered and (n.at <= created) is are_later}

    for corpus in made_by(record, state, "clean_corpus"):
        gone = ids | _ids_of(corpus, ids, set(listed.texts))
        raw_ids.setdefault(corpus.manifest.inputs.get("raw_corpus", ""), set()).update(gone)
        dropped = gone | numbers(corpus, are_later=False)
        yield corpus, _without_rows(corpus, gone), _without_examples(corpus, dropped)
    for raw in made_by(record, state, "raw_corpus"):
        gone = ids | numbers(raw, are_later=False) | raw_ids.get(raw.fingerprint, set())
        yield raw, _without_rows(raw, gone), raw.stats
    for shards in made_by(record, state, "tokenized_shards"):
        erased = sorted({*shards.stats.get("erased", []), *_held(shards, listed.texts)})
        stats = shards.stats | ({"erased": erased} if erased else {})
        yield shards, _without_tokens(shards, erased), stats
    everywhere = ids.union(*raw_ids.values())

    def gone_from(artifact: Artifact) -> set[str]:
        # By row numbers too: rewritten corpora no longer tell which rows had the texts.
        before = everywhere | numbers(artifact, are_later=False)
        return before - numbers(artifact, are_later=True)

    for study in made_by(record, state, "study"):
        gone = gone_from(study)
        yield study, _without_rows(study, gone), _without_examples(study, gone)
    for exam in made_by(record, state, "exam"):
        yield exam, _without_questions(exam, gone_from(exam)), exam.stats
    for evaluation in made_by(record, state, "eval_metrics"):
        yield evaluation, _without_samples(evaluation, gone_from(evaluation)), evaluation.stats


def made_by(
    record: Pipeline, state: RegistryState, kind: str, with_trials: bool = True
) -> Iterator[Artifact]:
    """The existing artifacts of a kind that the pipeline and its trials have made."""
    for fingerprint in _names(record, state, kind, with_trials):
        artifact = find_rewritable(record.store, kind, fingerprint)
        if artifact:
            yield artifact


def _names(
    record: Pipeline, state: RegistryState, kind: str, with_trials: bool = True
) -> list[str]:
    """Fingerprints of everything of this kind that they have ever made."""
    versions = (version.lineage.get(kind) for version in state.versions)
    tried = [name for trial in record.trials() for name in trial.known(kind)] if with_trials else []
    return list(dict.fromkeys([*record.known(kind), *filter(None, versions), *tried]))


def find_derived(
    record: Pipeline, state: RegistryState, documents: Collection[str]
) -> dict[str, list[dict[str, str]]]:
    """Document to `id`, `source`, `text_hash` and `text` of each text that was made from it."""
    derived: dict[str, dict[str, dict[str, str]]] = {document: {} for document in documents}
    document_ids, columns = pa.array(sorted(documents), pa.string()), [*RAW_COLUMNS, "text_hash"]
    for study in made_by(record, state, "study"):
        for part in find_parts(study.url, columns, "study"):
            rows = part.read(columns)
            for row in rows.filter(_are_of(rows["id"], document_ids)).to_pylist():
                derived[document_of(row["id"])][row["text_hash"]] = row
    return {document: list(rows.values()) for document, rows in derived.items()}


def _ids_of(corpus: Artifact, ids: Collection[str], texts: Collection[str]) -> set[str]:
    """Ids of a clean corpus that have the texts, and of the copies dropped in their favor."""
    matches: set[str] = set()
    history = read_history(corpus.url)
    if history:
        has_text = pc.is_in(history.documents["text_hash"], pa.array(sorted(texts), pa.string()))
        matches.update(history.documents.filter(has_text)["id"].to_pylist())
    # Copies have no row of text here, but the raw corpus still has theirs.
    survivors = pa.array(sorted(matches | set(ids)), pa.string())
    copies = read_dropped(corpus.url, DUPLICATE_SCHEMA, "survivor", survivors)
    return matches | set(copies["id"].to_pylist())


def _without_rows(corpus: Artifact, ids: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Parquet files of a corpus, with earlier texts, that hold one of these ids: without it."""
    erased_ids = pa.array(sorted(ids), pa.string())
    for entry in corpus.manifest.files:
        if not entry.path.endswith(".parquet"):
            continue
        with files.open_file(f"{corpus.url}/{entry.path}") as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            if not {"id", "text"} <= set(parquet.schema_arrow.names):
                continue
            if not pc.any(_are_of(parquet.read(["id"])["id"], erased_ids)).as_py():
                continue
            yield entry.path, _filtered(parquet, erased_ids)


def _filtered(parquet: pq.ParquetFile, ids: pa.Array) -> bytes:
    """A Parquet file without some ids, with its row groups and its metadata."""
    buffer = io.BytesIO()
    with pq.ParquetWriter(
        buffer, parquet.schema_arrow, compression="zstd", write_page_checksum=True
    ) as writer:
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            writer.write_table(table.filter(pc.invert(_are_of(table["id"], ids))))
    return buffer.getvalue()


def _are_of(ids: pa.ChunkedArray, documents: pa.Array) -> pa.ChunkedArray:
    """Which ids are those of some documents, or of texts made from one."""
    split = pc.split_pattern(ids, DERIVED, max_splits=1)
    return pc.is_in(pc.list_element(split, 0), documents)


def _without_examples(corpus: Artifact, ids: Collection[str]) -> dict[str, Any]:
    """The stats of a clean corpus without the first words of these dropped documents."""
    examples = corpus.stats.get(EXAMPLES, {})
    remaining = {
        reason: [row for row in rows if document_of(row["id"]) not in ids]
        for reason, rows in examples.items()
    }
    return corpus.stats | ({EXAMPLES: remaining} if examples else {})


def _held(shards: Artifact, texts: Collection[str]) -> set[str]:
    """Which of the texts the shards contain."""
    sought = pa.array(sorted(texts), pa.string())
    present: set[str] = set()
    for shard in open_shards(shards.url, ShardStats.model_validate(shards.stats)):
        hashes = shard.documents(["text_hash"])["text_hash"]
        present.update(hashes.filter(pc.is_in(hashes, sought)).to_pylist())
    return present


def _without_tokens(shards: Artifact, texts: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Files of shards that hold one of the texts, with its tokens replaced by the end token."""
    stats = ShardStats.model_validate(shards.stats)
    sought = pa.array(sorted(texts), pa.string())
    for shard in open_shards(shards.url, stats):
        hashes = shard.documents(["text_hash"])["text_hash"]
        documents = np.flatnonzero(pc.is_in(hashes, sought).to_numpy())
        segments = np.flatnonzero(np.isin(shard.segments["document"], documents))
        if not len(segments):
            continue
        places = spans(first_places(shard, segments), shard.segments["length"][segments])
        for end_of_name, values, blank in (
            ("tokens", shard.tokens, stats.end_token_id),
            # A target of 0 counts in no loss.
            ("targets", shard.targets, 0),
        ):
            if values is not None and (values.reshape(-1)[places] != blank).any():
                copy = values.reshape(-1).copy()
                copy[places] = blank
                # Overwritten and not cut out: all other tokens keep their places, so a run can be
                # repeated over the same rows.
                yield f"{shard.entry.name}.{end_of_name}", copy.tobytes()


def _without_samples(evaluation: Artifact, ids: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """What models wrote after the beginnings of held-out documents, without the forgotten ones."""
    content = files.find(f"{evaluation.url}/{SAMPLES_NAME}")
    samples = json.loads(content) if content else {}
    exam = evaluation.manifest.inputs.get("exam", "")
    _, lines = _questions(evaluation.store.folder_url("exam", exam), ids)
    still_asked = {json.loads(line)["id"] for line in lines}

    def is_kept(sample: dict[str, Any]) -> bool:
        # With an exam, samples name a question, not a document; if it is gone, none is kept.
        name = sample["document"]
        return name in still_asked if exam else name not in ids

    remaining = {
        role: list(filter(is_kept, role_samples)) for role, role_samples in samples.items()
    }
    if remaining != samples:
        yield SAMPLES_NAME, json.dumps(remaining, indent=2).encode()


def _without_questions(exam: Artifact, ids: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """The questions of an exam whose passages are of other documents than the forgotten ones."""
    lines, remaining = _questions(exam.url, ids)
    if remaining != lines:
        yield QUESTIONS_NAME, b"".join(remaining)


def _questions(exam: str, ids: Collection[str]) -> tuple[list[bytes], list[bytes]]:
    """All lines of an exam's questions, and those that are of none of the documents."""
    lines = (files.find(f"{exam}/{QUESTIONS_NAME}") or b"").splitlines(keepends=True)
    return lines, [line for line in lines if not _documents_of(json.loads(line)).intersection(ids)]


def _documents_of(question: dict[str, Any]) -> set[str]:
    return {
        passage["document"] for passage in (question["passage"], question["retrieved"]) if passage
    }


def _drop_states(store: Store, report: Report) -> None:
    """Remove the saved state of unfinished trainings that may have read a text erased by now.

    They start over. Their records say that nothing was learned from such a text.
    """
    for run in store.list_folder(layout.RUNS_FOLDER):
        is_made = store.is_leased(layout.artifact_lease("checkpoint", run))
        if is_made or store.exists("checkpoint", run):
            continue
        try:
            spec = json.loads(store.read_bytes(f"{layout.run(run)}/{SPEC_NAME}") or b"{}")
        except ValueError:
            continue
        shards_name = spec.get("inputs", {}).get("tokenized_shards", "")
        shards = find_rewritable(store, "tokenized_shards", shards_name)
        hidden = {*spec.get("masked", ()), *spec.get("shards", {}).get("erased", ())}
        if shards is None or hidden.issuperset(shards.stats.get("erased", ())):
            continue
        folder = f"{store.root}/{layout.run(run)}"
        files.remove(f"{folder}/{BEST_NAME}")
        if checkpoints.remove_all(spec.get("checkpoints_url") or folder):
            report(f"Training run {run}, which is not finished, begins again without the text.")


def _drop_leftovers(record: Pipeline, state: RegistryState) -> None:
    """Remove text in what was set aside as damaged, or begun and never finished."""
    store = record.store
    for kind in KINDS:
        for fingerprint in _names(record, state, kind):
            for place in (layout.artifact(kind, fingerprint), layout.retired(kind, fingerprint)):
                files.remove(f"{store.root}/{layout.damaged(place)}")
    drafts = store.machine_root / layout.DRAFTS_FOLDER
    for name in files.list_names(drafts):
        # A draft begins with the name of the lease that its maker holds.
        if name.startswith(KINDS) and not store.is_leased(name.rpartition("-")[0]):
            files.remove(drafts / name)
    if store.is_local:
        return
    # A job in the cloud writes into its artifact's own folder, and its scratch files beside it.
    for kind in KINDS:
        for name in store.list_folder(kind):
            fingerprint = name.removesuffix(layout.SCRATCH_SUFFIX)
            # The lease first: it is released only after the manifest is written.
            if store.is_leased(layout.artifact_lease(kind, fingerprint)):
                continue
            manifests = (layout.MANIFEST_NAME, BEFORE_NAME)
            if not any(store.has_file(f"{kind}/{name}/{manifest}") for manifest in manifests):
                files.remove(f"{store.root}/{kind}/{name}")


def _drop_judged(store: Store, listed: ForgottenList, report: Report) -> None:
    """Take documents out of what endpoints compare the version with that they serve."""
    ids = {document.id for document in listed.active}

    def without(desired: Desired) -> Desired:
        judged = [entry for entry in desired.judged if document_of(entry.id) not in ids]
        return desired.model_copy(update={"judged": judged})

    for folder in (store.machine_root / layout.ENDPOINT_FOLDER).glob("*/"):
        state = StateFolder(folder)
        with local_lease(folder / "start.lock", lambda who: report(f"waiting for {who}")):
            served, wanted = state.good.read(), state.desired.read()
            if all(one is None or without(one) == one for one in (served, wanted)):
                continue
            # Nothing has served yet, so there is nothing to go back to; whoever starts the endpoint
            # writes what is wanted again.
            if served is None:
                state.desired.path.unlink()
                continue
            # Wanted, too: an endpoint that runs takes it over, and does not try another again.
            for file in (state.good, state.desired):
                file.write(without(served))


def _drop_caches(record: Pipeline) -> None:
    """Remove text from the caches; models converted for an engine are removed with the model."""
    store = record.store
    if not store.is_local:
        # Copies that this machine has of what lies in the cloud.
        for folder in ("artifacts", "shards"):
            shutil.rmtree(cache_folder() / folder, ignore_errors=True)
    # For a store in the cloud, these folders of this machine lie beside its caches.
    kept_names = {layout.CONVERSIONS_FOLDER, layout.ENDPOINT_FOLDER, layout.DRAFTS_FOLDER}
    # A set, since both are the same folder for a store on this machine.
    for cache in {store.cache, store.machine_cache}:
        for name in files.list_names(cache):
            if name not in kept_names:
                files.remove(f"{cache}/{name}")
