"""From source text to packed token rows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, AssetKey, MaterializeResult

import recipes.evaluation
from artifacts.errors import UserError
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.assets import figures, held_out
from llm_assets.assets.stage import materialization, stage, table
from llm_assets.assets.training_plan import training_estimate
from llm_assets.forgetting.listed import read_list
from llm_assets.pipeline import PipelineResource
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner
from recipes.model.row_length import check_row_length
from spark_jobs.clean import job as clean
from spark_jobs.clean.classify import read_model
from spark_jobs.read.files.source_file import SourceChanged
from spark_jobs.read.opened import Unread
from spark_jobs.read.snapshot import snapshot
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.tokenize import job as tokenize

GROUP = "corpus"
READINGS = 3
"""Times that a source which changes while it is read is begun again."""
GENERAL_ENGLISH = Path(recipes.evaluation.__file__).with_name("general_english.txt")
"""The text that forgetting is measured on; what overlaps with it is not trained on."""


@stage(
    group_name=GROUP,
    kinds={"python", "parquet"},
    code_version=snapshot.CODE_VERSION,
    pool="sources",
)
def raw_corpus(context: AssetExecutionContext, pipeline: PipelineResource) -> MaterializeResult:
    """A pinned snapshot of the source text, as Parquet rows `(id, text, source, ...)`.

    All that follows reads this copy, so text that changes meanwhile changes nothing; of files that
    are pinned in place of copied, a change is noticed. What was found and not read is counted by
    kind.
    """
    for attempt in range(READINGS):
        try:
            return _raw_corpus(context, pipeline)
        except SourceChanged as error:
            if attempt == READINGS - 1:
                raise UserError(
                    f"Each of {READINGS} times, {error}. Materialize `raw_corpus` when nothing "
                    "writes there, or point the source at a copy."
                ) from error
            context.log.info(f"{error}; reading it again")
    raise AssertionError("the last attempt returns or raises")


def _raw_corpus(context: AssetExecutionContext, pipeline: PipelineResource) -> MaterializeResult:
    settings = pipeline.settings.raw_corpus
    opened = snapshot.open_sources(settings, context.log.info, pipeline.store.root)
    identity = Identity(
        kind="raw_corpus",
        code_version=snapshot.CODE_VERSION,
        settings=settings.content(),
        inputs=snapshot.fingerprints_of(opened),
    )

    def build(draft: Draft) -> None:
        draft.stats |= snapshot.write_snapshot(
            settings, draft.path, context.log.info, pipeline.store.machine_cache, opened
        )

    artifact = pipeline.make(context, identity, build)
    for line in _passed_over(artifact.stats):
        context.log.warning(line)
    return materialization(artifact, _corpus_metadata(artifact.stats) | _source_metadata(artifact))


@stage(
    deps=[raw_corpus],
    group_name=GROUP,
    kinds={"spark"},
    code_version=clean.CODE_VERSION,
    pool="spark",
)
def clean_corpus(
    context: AssetExecutionContext, pipeline: PipelineResource, spark: SparkRunner
) -> MaterializeResult:
    """Normalized, filtered and deduplicated text; every document carries its duplicate cluster.

    Of copies and near-copies one stays. Whole clusters go to one split, so no near-copy of text
    that models are judged on is ever trained on.
    """
    store = pipeline.store
    settings, models = _share_models(store, pipeline.settings.clean_corpus)
    raw = pipeline.record.current("raw_corpus", needed_by="clean_corpus")
    general_url, general_digest = held_out.share_text(store, GENERAL_ENGLISH)
    forgotten = read_list(store, pipeline.settings.name)
    wanted = Identity(
        kind="clean_corpus",
        code_version=clean.CODE_VERSION,
        settings=settings.content(),
        inputs={"raw_corpus": raw.fingerprint, "general_english": general_digest}
        | models
        | forgotten.inputs(),
    )
    earlier = held_out.find_earlier(pipeline.record, wanted)

    def build(draft: Draft) -> None:
        raw.verify()
        spec = clean.CleanSpec(
            raw_corpus=raw.url,
            output=draft.url,
            settings=settings,
            earlier=store.load("clean_corpus", earlier).url if earlier else None,
            forgotten=forgotten.for_cleaning(),
            evaluation_texts=[general_url],
            cache=store.cache,
            documents_in_memory=pipeline.settings.spark.documents_in_memory,
        )
        draft.stats |= spark.clean(context, spec)

    artifact = pipeline.make(context, held_out.with_earlier(wanted, earlier), build)
    return materialization(artifact, _clean_metadata(artifact.stats))


@stage(
    deps=[clean_corpus, AssetKey("base_model")],
    group_name=GROUP,
    kinds={"spark"},
    code_version=tokenize.CODE_VERSION,
    pool="spark",
)
def tokenized_shards(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    spark: SparkRunner,
    training: TrainingRunner,
) -> MaterializeResult:
    """Packed token rows in three splits (train, validation, held-out) with one manifest.

    A long document goes on in the next row, and no document sees another. Training reads `train`;
    settings are chosen by `validation`; the gate alone looks at `held_out`.
    """
    settings, form = pipeline.settings.tokenized_shards, pipeline.settings.form
    clean_text = pipeline.record.current("clean_corpus", needed_by="tokenized_shards")
    base_model = pipeline.record.current("base_model", needed_by="tokenized_shards")
    _check_row_length(pipeline, base_model)
    inputs = {"clean_corpus": clean_text.fingerprint, "base_model": base_model.fingerprint}
    evaluation_texts = []
    if pipeline.settings.clean_corpus.split.replayed:
        general_url, inputs["general_english"] = held_out.share_text(
            pipeline.store, GENERAL_ENGLISH
        )
        evaluation_texts.append(general_url)
    identity = Identity(
        kind="tokenized_shards",
        code_version=tokenize.CODE_VERSION,
        settings=settings.content(),
        inputs=inputs,
    )

    def build(draft: Draft) -> None:
        clean_text.verify()
        base_model.verify()
        spec = tokenize.TokenizeSpec(
            clean_corpus=clean_text.url,
            base_model=base_model.url,
            output=draft.url,
            settings=settings,
            form=form,
            evaluation_texts=evaluation_texts,
            cache=pipeline.store.cache,
            held_out_in_memory=pipeline.settings.spark.held_out_in_memory,
        )
        draft.stats |= spark.tokenize(context, spec)

    artifact = pipeline.make(context, identity, build)
    estimate = training_estimate(training, pipeline.settings.checkpoint, artifact, base_model)
    expected = {"training_estimate": estimate} if estimate else {}
    return materialization(artifact, _shard_metadata(artifact.stats) | expected)


def _check_row_length(pipeline: PipelineResource, base_model: Artifact) -> None:
    """Raise UserError where rows are longer than the model reads, before they are made."""
    settings = pipeline.settings
    config = pipeline.store.read_bytes(f"base_model/{base_model.fingerprint}/config.json")
    if config is not None:
        check_row_length(settings.tokenized_shards.input_length(settings.form), json.loads(config))


def _share_models(
    store: Store, settings: CleanCorpusSettings
) -> tuple[CleanCorpusSettings, dict[str, str]]:
    """The settings with classifiers' models where jobs read them, and what is in these models."""
    shared, inputs = [], {}
    for one in settings.classifiers:
        suffix = Path(one.model).suffix
        url, digest = held_out.share(store, read_model(one), "classifiers", suffix)
        shared.append(one.model_copy(update={"model": url}))
        inputs[f"classifier_{one.name}"] = digest
    return settings.model_copy(update={"classifiers": shared}), inputs


def _corpus_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    dropped = stats.get("dropped", {})
    return {
        "summary": f"{stats['documents']:,} documents, {stats['bytes'] / 1e6:.1f} MB",
        "documents": stats["documents"],
        "bytes": stats["bytes"],
        "dropped_documents": sum(dropped.values()),
        "dropped": table(["reason", "documents"], dropped.items()),
    }


def _passed_over(stats: Mapping[str, Any]) -> list[str]:
    """What was found and is not in the corpus, in words; nothing where there is none."""
    lines = [f"Set aside: {fault}" for fault in stats["faults"]]
    if stats["unread"]:
        lines.insert(0, f"Not read: {Unread(stats['unread'], stats['unread_examples'])}")
    return lines


def _source_metadata(artifact: Artifact) -> dict[str, Any]:
    stats = artifact.stats
    examples = stats["unread_examples"]
    unread = [(kind, count, ", ".join(examples[kind])) for kind, count in stats["unread"].items()]
    sources = [(name, one["documents"], one["bytes"]) for name, one in stats["sources"].items()]
    return {
        "not_read": sum(stats["unread"].values()),
        "not_read_by_kind": table(["kind", "files", "such as"], unread),
        "set_aside": table(["document", ""], [(fault, "") for fault in stats["faults"]]),
        "repeated_ids": stats["repeated_ids"],
        "pinned_files": stats.get("pinned_files", 0),
        "sources": table(["source", "documents", "bytes"], sources),
    }


def _clean_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    examples = [
        (reason, example["id"], " ".join(example["text"].split()))
        for reason, found in stats["dropped_examples"].items()
        for example in found
    ]
    sizes = {int(size): count for size, count in stats["cluster_sizes"].items()}
    lengths = {int(length): count for length, count in stats["length_histogram"].items()}
    repeated = stats.get("repeated_spans")
    looked_for = {"repeated_spans": table(["in all", ""], repeated.items())} if repeated else {}
    if labels := stats.get("labels"):
        rows = [(name, *row) for name, found in labels.items() for row in found.items()]
        looked_for["labels"] = table(["classifier", "label", "documents"], rows)
    return (
        _corpus_metadata(stats)
        | looked_for
        | {
            "splits": table(["split", "documents"], stats["splits"].items()),
            "arrived": table(
                ["slice", "held out", "validation", "training"],
                (
                    (
                        number,
                        *(found.get(split, 0) for split in ("held_out", "validation", "train")),
                    )
                    for number, found in stats["slices"].items()
                ),
            ),
            "dropped_examples": table(["reason", "document", "begins with"], examples),
            "cluster_sizes": figures.bars(
                "Duplicate clusters by size", "documents in the cluster", "clusters", sizes
            ),
            "lengths": figures.bars(
                "Documents by length", "characters, from this many on", "documents", lengths
            ),
        }
    )


def _shard_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        (split, stats["documents"][split], stats["tokens"][split], stats["rows"][split])
        for split in stats["documents"]
    ]
    return {
        "summary": f"{sum(stats['tokens'].values()):,} tokens, {stats['rows']['train']:,} rows to "
        f"train on",
        "tokens": sum(stats["tokens"].values()),
        "padding_fraction": stats["padding_fraction"],
        "cut_documents": stats["cut_documents"],
        "cut_examples": stats["cut_examples"],
        "left_out": table(["reason", "documents"], stats["left_out"].items()),
        "tokenizer_engine": stats["tokenizer_engine"],
        "splits": table(["split", "documents", "tokens", "rows"], rows),
        "tokens_by_source": table(["source", "tokens"], stats["tokens_by_source"].items()),
    }
