"""From source text to packed token rows."""

import json
from pathlib import Path

from dagster import AssetExecutionContext, AssetKey, MaterializeResult

import recipes.evaluation
from artifacts.errors import UserError
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.assets import held_out
from llm_assets.assets.corpus_metadata import (
    clean_metadata,
    corpus_metadata,
    passed_over,
    shard_metadata,
    source_metadata,
)
from llm_assets.assets.stage import materialization, stage
from llm_assets.assets.training_plan import training_estimate
from llm_assets.forgetting.listed import read_list
from llm_assets.pipeline import PipelineResource
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner
from recipes.model.row_length import check_row_length
from spark_jobs.clean import job as clean
from spark_jobs.clean.classify import read_model
from spark_jobs.read.files.source_file import SourceChanged
from spark_jobs.read.job import CHANGED
from spark_jobs.read.plan import bytes_in_buckets, plan_tasks
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
def raw_corpus(
    context: AssetExecutionContext, pipeline: PipelineResource, spark: SparkRunner
) -> MaterializeResult:
    """A pinned snapshot of the source text, as Parquet rows `(id, text, source, ...)`.

    All that follows reads this copy, so text that changes meanwhile changes nothing; of files that
    are pinned in place of copied, a change is noticed. What was found and not read is counted by
    kind.
    """
    for attempt in range(READINGS):
        try:
            return _raw_corpus(context, pipeline, spark)
        except SourceChanged as error:
            if attempt == READINGS - 1:
                raise UserError(
                    f"Each of {READINGS} times, {error}. Materialize `raw_corpus` when nothing "
                    "writes there, or point the source at a copy."
                ) from error
            context.log.info(f"{error}; reading it again")
    raise AssertionError("the last attempt returns or raises")


def _raw_corpus(
    context: AssetExecutionContext, pipeline: PipelineResource, spark: SparkRunner
) -> MaterializeResult:
    settings, store = pipeline.settings.raw_corpus, pipeline.store
    opened = snapshot.open_sources(settings, context.log.info, store.root)
    identity = Identity(
        kind="raw_corpus",
        code_version=snapshot.CODE_VERSION,
        settings=settings.content(),
        inputs=snapshot.fingerprints_of(opened),
    )

    def build(draft: Draft) -> None:
        megabytes = bytes_in_buckets(opened) / 1e6
        if megabytes > pipeline.settings.spark.copied_by_process:
            context.log.info(f"Tasks of Spark copy {megabytes:,.1f} MB of files in buckets")
            spec = plan_tasks(settings, opened, draft.path, draft.url, store.cache)
            found = spark.read(context, spec)
            if CHANGED in found:
                raise SourceChanged(found[CHANGED])
            draft.stats |= found
        else:
            draft.stats |= snapshot.write_snapshot(
                settings, draft.path, context.log.info, store.machine_cache, opened
            )

    artifact = pipeline.make(context, identity, build)
    for line in passed_over(artifact.stats):
        context.log.warning(line)
    return materialization(artifact, corpus_metadata(artifact.stats) | source_metadata(artifact))


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
    return materialization(artifact, clean_metadata(artifact.stats))


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
    return materialization(artifact, shard_metadata(artifact.stats) | expected)


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
