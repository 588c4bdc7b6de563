"""From source text to packed token rows."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

import recipes.evaluation
from artifacts.libraries import changes, installed
from artifacts.progress import counted
from artifacts.shards.format import DOCUMENT_SCHEMA, ShardStats
from artifacts.shards.shard_set import find_shared_clusters
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.assets import figures
from llm_assets.assets.model import training_estimate
from llm_assets.assets.sources import observe, source_access, source_key, source_versions
from llm_assets.assets.stage import BuildPlan, check_files, stage, table
from llm_assets.forgetting.forgotten_list import forgotten_folder, read_list
from llm_assets.pipeline import Comparison, PipelineResource
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner
from recipes.model.base_model import check_row_length
from spark_jobs.clean import job as clean
from spark_jobs.clean.classify import read_model
from spark_jobs.clean.prepare import libraries_of as clean_libraries
from spark_jobs.clean.write import CLEAN_SCHEMA
from spark_jobs.read import job as read
from spark_jobs.read import snapshot
from spark_jobs.read.document import SCHEMA as RAW_SCHEMA
from spark_jobs.read.files.streams import SourceChanged
from spark_jobs.read.opened import SkippedFiles
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.settings import CleanCorpusSettings, TokenizedShardsSettings
from spark_jobs.tokenize import job as tokenize

GROUP = "corpus"
GENERAL_ENGLISH = Path(recipes.evaluation.__file__).with_name("general_english.txt")
"""The text that forgetting is measured on; what overlaps with it is not trained on."""
EARLIER_INPUT = "earlier"
"""Name of the earlier clean corpus among a clean corpus's inputs."""


def raw_view(artifact: Artifact) -> dict[str, Any]:
    stats = artifact.stats
    examples = stats["unread_examples"]
    unread = [(kind, count, ", ".join(examples[kind])) for kind, count in stats["unread"].items()]
    sources = [
        (name, source["documents"], source["bytes"]) for name, source in stats["sources"].items()
    ]
    return _text_view(stats) | {
        "not_read": sum(stats["unread"].values()),
        "not_read_by_kind": table(["kind", "files", "examples"], unread),
        "set_aside": table(["document and fault"], [(fault,) for fault in stats["faults"]]),
        "repeated_ids": stats["repeated_ids"],
        "sources": table(["source", "documents", "bytes"], sources),
    }


def _text_view(stats: Mapping[str, Any]) -> dict[str, Any]:
    dropped = stats.get("dropped", {})
    return {
        "summary": f"{counted(stats['documents'], 'document')}, {stats['bytes'] / 1e6:.1f} MB",
        "documents": stats["documents"],
        "bytes": stats["bytes"],
        "dropped_documents": sum(dropped.values()),
        "dropped": table(["reason", "documents"], dropped.items()),
    }


def every_file_was_read(raw_corpus: Artifact) -> dg.AssetCheckResult:
    """Every file and row found in the sources was read; those left out are counted by kind."""
    stats = raw_corpus.stats
    kinds = Counter(stats["unread"]) + Counter(stats["dropped"])
    left_out = kinds.total()
    counts = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in kinds.items())
    return dg.AssetCheckResult(
        passed=not left_out,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"Files or documents left out: {left_out:,} ({counts}); the asset's metadata "
        "names the first of each kind."
        if left_out
        else None,
        metadata={"left_out": left_out, "documents": stats["documents"]},
    )


@stage(
    code_version=snapshot.CODE_VERSION,
    group=GROUP,
    kinds={"python", "parquet"},
    pool="sources",
    view=raw_view,
    columns=RAW_SCHEMA,
    checks=[every_file_was_read],
    planned_again_on=SourceChanged,
    outside=lambda settings: [
        source_key(settings, entry.name) for entry in settings.raw_corpus.sources
    ],
)
def raw_corpus(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    spark: SparkRunner,
    identity: Identity,
    settings: RawCorpusSettings,
) -> BuildPlan:
    """A pinned snapshot of the source text, as Parquet rows `(id, text, source, ...)`.

    Everything downstream reads this copy, so text that changes during a run has no effect on it.
    Files that were found but not read are counted by kind.
    """
    store = pipeline.store
    with source_access(pipeline, settings):
        opened = snapshot.open_sources(settings, context.log.info, store.root)
    # Only opened sources tell which libraries read them, and these are part of the identity.
    identity = identity.extend(
        inputs=snapshot.fingerprints_of(opened), libraries=snapshot.libraries_of(opened)
    )

    def build(draft: Draft) -> None:
        megabytes = read.bytes_in_buckets(opened) / 1e6
        with source_access(pipeline, settings):
            # Both ways give the same bytes, so the limit is not part of the fingerprint. Up to it
            # no JVM is started.
            if megabytes <= pipeline.settings.spark.copied_by_process:
                draft.stats |= snapshot.write_snapshot(
                    settings, draft.path, context.log.info, store.machine_cache, opened
                )
                return
            context.log.info(f"Spark tasks copy {megabytes:,.1f} MB of files in buckets")
            spec = read.plan_tasks(settings, opened, draft.path, draft.url, store.cache)
        # The job refuses other versions of these libraries; the other sources were read here
        # already.
        by_tasks = {name: source for name, source in opened.items() if source.chunks.files}
        spec.libraries = installed(snapshot.libraries_of(by_tasks))
        stats = spark.run(context, read, spec)
        # A task found a file that had changed since it was fingerprinted; the stage is then planned
        # again.
        if read.CHANGED in stats:
            raise SourceChanged(stats[read.CHANGED])
        draft.stats |= stats

    def compare(artifact: Artifact) -> Comparison:
        changed = set(changes(artifact.manifest.libraries, identity.libraries))
        with source_access(pipeline, settings):
            yield from snapshot.compare_texts(opened, artifact.url, changed)

    def tell(artifact: Artifact) -> None:
        stats = artifact.stats
        if context.asset_key.path[-1] == artifact.manifest.kind:  # Not a trial of other settings.
            observe(context.instance, pipeline.settings, opened, stats["sources"])
        if unread := stats["unread"]:
            context.log.warning(f"Not read: {SkippedFiles(unread, stats['unread_examples'])}")
        if encodings := stats["decoded"]:
            skipped = SkippedFiles(encodings, stats["decoded_examples"])
            context.log.warning(f"Not in UTF-8, and decoded: {skipped}")
        for fault in stats["faults"]:
            context.log.warning(f"Set aside: {fault}")

    return BuildPlan(identity, build, compare, tell, source_versions(pipeline.settings, opened))


def clean_view(artifact: Artifact) -> dict[str, Any]:
    stats = artifact.stats
    sizes = {int(size): count for size, count in stats["cluster_sizes"].items()}
    lengths = {int(length): count for length, count in stats["length_histogram"].items()}
    looked_for = {}
    if similar := stats.get("similar_to_forgotten"):
        rows = [(row["id"], row["forgotten"], f"{row['similarity']:.0%}") for row in similar]
        looked_for["similar_to_forgotten"] = table(["document", "contains text of", "share"], rows)
    if labels := stats.get("labels"):
        rows = [(name, *row) for name, counts in labels.items() for row in counts.items()]
        looked_for["labels"] = table(["classifier", "label", "documents"], rows)
    splits = ("held_out", "validation", "train")
    arrived = (
        (n, *(by_split.get(split, 0) for split in splits))
        for n, by_split in stats["slices"].items()
    )
    return {
        **_text_view(stats),
        **looked_for,
        "repaired_documents": stats["repaired"],
        "splits": table(["split", "documents"], stats["splits"].items()),
        "arrived": table(["slice", "held out", "validation", "training"], arrived),
        "cluster_sizes": figures.bars(
            "Duplicate clusters by size", "documents in the cluster", "clusters", sizes
        ),
        "lengths": figures.bars(
            "Documents by length", "characters, at least", "documents", lengths
        ),
    }


def corpus_is_not_empty(clean_corpus: Artifact) -> dg.AssetCheckResult:
    """At least one document is left after cleaning."""
    documents = clean_corpus.stats["documents"]
    return dg.AssetCheckResult(passed=documents > 0, metadata={"documents": documents})


@stage(
    code_version=clean.CODE_VERSION,
    group=GROUP,
    kinds={"spark"},
    pool="spark",
    view=clean_view,
    columns=CLEAN_SCHEMA,
    blocking_checks=[corpus_is_not_empty],
)
def clean_corpus(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    spark: SparkRunner,
    identity: Identity,
    settings: CleanCorpusSettings,
    raw_corpus: Artifact,
) -> BuildPlan:
    """Normalized, filtered and deduplicated text; every document names its duplicate cluster.

    Of duplicates and near-duplicates one is kept. Whole clusters go to one split, so that
    near-duplicates of evaluation text are not trained on.
    """
    inputs, specify = plan_cleaning(pipeline, settings)
    corpus_identity = identity.extend(inputs=inputs, libraries=clean_libraries(settings))

    def spec(output: str, earlier: str | None = None) -> clean.CleanSpec:
        return specify(
            raw_corpus=raw_corpus.url,
            output=output,
            earlier=pipeline.store.load("clean_corpus", earlier).url if earlier else None,
            libraries=corpus_identity.libraries,
        )

    def build(draft: Draft) -> None:
        if earlier is None and (warning := tell_lost_splits(pipeline.record, corpus_identity)):
            context.log.warning(warning)
        draft.stats |= spark.run(context, clean, spec(draft.url, earlier))

    def compare(artifact: Artifact) -> Comparison:
        return clean.compare_documents(spec(artifact.url), artifact.url)

    # `build` above uses this, too: it is called only after the plan has been returned.
    earlier = find_earlier(
        pipeline.record, corpus_identity, lambda identity: pipeline.find(context, identity, compare)
    )
    return BuildPlan(_with_earlier(corpus_identity, earlier), build, compare)


def plan_cleaning(
    pipeline: PipelineResource, settings: CleanCorpusSettings
) -> tuple[dict[str, str], Callable[..., clean.CleanSpec]]:
    """What decides, besides the settings, how text is cleaned, and the job's specification, still
    without the text, the output and the libraries."""
    store, name = pipeline.store, pipeline.settings.name
    settings, models = _share_models(store, settings)
    general_url, general_digest = _share_general_english(store)
    forgotten = read_list(store, name)
    specify = partial(
        clean.CleanSpec,
        settings=settings,
        numbered_sources=tuple(pipeline.settings.raw_corpus.numbered_sources),
        forgotten=forgotten.for_cleaning(forgotten_folder(store, name)),
        evaluation_texts=[general_url],
        cache=store.cache,
        documents_in_memory=pipeline.settings.spark.documents_in_memory,
    )
    # All of this decides which text is kept, so a change of it makes another corpus.
    return {"general_english": general_digest} | models | forgotten.inputs(), specify


def find_earlier(
    record: Pipeline, wanted: Identity, find: Callable[[Identity], Artifact | None]
) -> str | None:
    """Fingerprint of the clean corpus whose splits the wanted one continues: what was last trained
    on.

    None before anything was trained. A corpus that exists, or existed until it was deleted, keeps
    the predecessor that its fingerprint names. If that predecessor is gone too, the newest corpus
    in the store replaces it, because every corpus carries all splits before it.

    Args:
        wanted: identity of the clean corpus about to be made, without an earlier one.
        find: gives the artifact of an identity.
    """
    store = record.store
    fingerprints = record.known(wanted.kind)
    # The splits that matter are those that a model has seen: held-out text must stay so.
    trained_on = _last_trained(record, wanted.kind)
    for earlier in (None, *fingerprints):
        identity = _with_earlier(wanted, earlier)
        # Only what is current or was trained on: an older corpus of the same settings and text has
        # the splits of its time, without what came since.
        was_made = not {*fingerprints[:1], trained_on}.isdisjoint(store.names(identity))
        if was_made and (earlier is None or find(identity) or store.exists(wanted.kind, earlier)):
            return earlier
    return trained_on


def tell_lost_splits(record: Pipeline, wanted: Identity) -> str:
    """A warning that the splits which models were trained on are lost; empty if nothing was
    trained, or if the corpus is an existing one that is rebuilt."""
    store, kind, recorded = record.store, wanted.kind, record.known(wanted.kind)
    was_trained = record.recorded("checkpoint") is not None and bool(recorded)
    if not was_trained or not set(recorded).isdisjoint(store.names(wanted)):
        return ""
    return (
        f"The clean corpora of this pipeline are gone from {store.root}: models were trained on "
        f"one of them, and it alone knew which text was held out. All splits are drawn again, so "
        "text that a model was trained on may be held out, and later models may seem better than "
        f"they are. To keep the splits, stop this run, bring the folder {kind}/{recorded[0]} back "
        f"from a backup of the store (what was found damaged is in {layout.damaged(kind)}/), then "
        "check it with `llm-assets doctor` and run again."
    )


def _last_trained(record: Pipeline, kind: str) -> str | None:
    """The corpus behind the current checkpoint; where it is gone, the newest that is there."""
    if record.recorded("checkpoint") is None:
        return None
    checkpoint = record.find_current("checkpoint")
    shards = (
        record.store.find_named("tokenized_shards", checkpoint.manifest.inputs["tokenized_shards"])
        if checkpoint
        else record.find_current("tokenized_shards")
    )
    trained_on = [shards.manifest.inputs[kind]] if shards else []
    existing = (
        name for name in (*trained_on, *record.known(kind)) if record.store.exists(kind, name)
    )
    return next(existing, None)


def _share_models(
    store: Store, settings: CleanCorpusSettings
) -> tuple[CleanCorpusSettings, dict[str, str]]:
    """The settings, with classifiers' models where jobs can read them, and the models' hashes."""
    shared, inputs = [], {}
    for classifier in settings.classifiers:
        suffix = Path(classifier.model).suffix
        url, digest = _share(store, read_model(classifier), "classifiers", suffix)
        shared.append(classifier.model_copy(update={"model": url}))
        inputs[f"classifier_{classifier.name}"] = digest
    return settings.model_copy(update={"classifiers": shared}), inputs


def _with_earlier(identity: Identity, earlier: str | None) -> Identity:
    """The identity with the earlier corpus among its inputs."""
    return identity.extend(inputs={EARLIER_INPUT: earlier}) if earlier else identity


def _share_general_english(store: Store) -> tuple[str, str]:
    return _share(store, GENERAL_ENGLISH.read_bytes(), "evaluation_texts", ".txt")


def _share(store: Store, content: bytes, folder: str, suffix: str) -> tuple[str, str]:
    """Put a file where jobs can read it, named by its content: `(url, content hash)`."""
    digest = hashlib.sha256(content).hexdigest()[:20]
    # By its content, so a job that runs keeps the file that it was given.
    name = f"{folder}/{digest}{suffix}"
    if store.read_bytes(name) != content:
        store.write_bytes(name, content)
    return f"{store.root}/{name}", digest


def shards_view(artifact: Artifact) -> dict[str, Any]:
    stats = artifact.stats
    tokens = sum(stats["tokens"].values())
    units = ("documents", "tokens", "rows")
    rows = [(split, *(stats[unit][split] for unit in units)) for split in stats["documents"]]
    left_out = dict(stats["left_out"])
    if overlapping := sum(stats["removed_as_overlapping_held_out"].values()):
        left_out["shares text with what is held out"] = overlapping
    unused = f", {sum(left_out.values()):,} documents left out" if left_out else ""
    return {
        "summary": f"{counted(tokens, 'token')}, {counted(stats['rows']['train'], 'row')} to "
        f"train on{unused}",
        "tokens": tokens,
        "padding_fraction": stats["padding_fraction"],
        "cut_documents": stats["cut_documents"],
        "cut_examples": stats["cut_examples"],
        "left_out": table(["reason", "documents"], left_out.items()),
        "tokenizer_engine": stats["tokenizer_engine"],
        "splits": table(["split", *units], rows),
        "tokens_by_source": table(["source", "tokens"], stats["tokens_by_source"].items()),
    }


def no_cluster_in_two_splits(tokenized_shards: Artifact) -> dg.AssetCheckResult:
    """No duplicate cluster has documents in two splits."""
    stats = ShardStats.model_validate(tokenized_shards.stats)
    shared = find_shared_clusters(tokenized_shards.url, stats)
    return dg.AssetCheckResult(
        passed=not shared,
        metadata={"shared_clusters": len(shared), "examples": ", ".join(shared[:5])},
    )


def shards_match_their_checksums(tokenized_shards: Artifact) -> dg.AssetCheckResult:
    """Every file has the size and the checksum of its manifest."""
    return check_files(tokenized_shards)


@stage(
    code_version=tokenize.CODE_VERSION,
    group=GROUP,
    kinds={"spark"},
    pool="spark",
    view=shards_view,
    columns=DOCUMENT_SCHEMA,
    blocking_checks=[no_cluster_in_two_splits, shards_match_their_checksums],
)
def tokenized_shards(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    spark: SparkRunner,
    training: TrainingRunner,
    identity: Identity,
    settings: TokenizedShardsSettings,
    clean_corpus: Artifact,
    study: Artifact | None,
    base_model: Artifact,
) -> BuildPlan:
    """Token rows in splits, with one manifest.

    Plain text is packed: a long document continues in the next row, and no document attends to
    another. Training reads `train` and, if sources are assigned to it, `replay`; settings are
    chosen on `validation`, and `held_out` is for evaluation alone.
    """
    store, form = pipeline.store, pipeline.settings.form
    # Spark would find out only after it has tokenized everything.
    if config := store.read_bytes(f"base_model/{base_model.fingerprint}/config.json"):
        check_row_length(settings.input_length(form), json.loads(config))
    recipe = training.place(pipeline.settings.checkpoint)
    identity = identity.extend(libraries=tokenize.libraries_of(settings, form))
    evaluation_texts = []
    # No replayed text may overlap with the text that forgetting is measured on.
    if pipeline.settings.clean_corpus.split.replayed:
        general_url, general_digest = _share_general_english(store)
        identity = identity.extend(inputs={"general_english": general_digest})
        evaluation_texts.append(general_url)

    # Those that this very text was divided by, whatever the pipeline file has now.
    divided = clean_corpus.manifest.settings["split"]["sources"]

    def spec(output: str) -> tokenize.TokenizeSpec:
        return tokenize.TokenizeSpec(
            clean_corpus=clean_corpus.url,
            study=study.url if study else None,
            base_model=base_model.url,
            output=output,
            settings=settings,
            form=form,
            libraries=identity.libraries,
            evaluation_texts=evaluation_texts,
            evaluation_sources=tuple(
                name for name, split in divided.items() if split == "held_out"
            ),
            cache=store.cache,
            held_out_in_memory=pipeline.settings.spark.held_out_in_memory,
        )

    def build(draft: Draft) -> None:
        draft.stats |= spark.run(context, tokenize, spec(draft.url))
        # The last Spark stage: what follows, training above all, needs the memory.
        spark.end()

    def compare(artifact: Artifact) -> Comparison:
        return tokenize.compare_tokens(spec(artifact.url), artifact.url, artifact.stats)

    def estimate(artifact: Artifact) -> dict[str, str]:
        expected = training_estimate(training, recipe, artifact, base_model)
        return {"training_estimate": expected} if expected else {}

    return BuildPlan(identity, build, compare, estimate)
