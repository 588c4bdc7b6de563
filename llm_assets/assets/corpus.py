"""From source text to packed token rows."""

from collections.abc import Mapping
from typing import Any

from dagster import AssetExecutionContext, AssetKey, MaterializeResult

from artifacts.identity import Identity
from artifacts.shards import SPLITS
from artifacts.store import Draft
from llm_assets.assets.stage import materialization, stage, table
from llm_assets.resources.pipeline import PipelineResource
from llm_assets.resources.spark import SparkRunner
from llm_assets.sources import snapshot
from spark_jobs import clean, tokenize

GROUP = "corpus"


@stage(group_name=GROUP, kinds={"python", "parquet"}, code_version=snapshot.CODE_VERSION)
def raw_corpus(context: AssetExecutionContext, pipeline: PipelineResource) -> MaterializeResult:
    """A pinned snapshot of the source text, as Parquet rows `(id, text, source, ...)`."""
    settings = pipeline.settings.raw_corpus
    identity = Identity(
        kind="raw_corpus",
        code_version=snapshot.CODE_VERSION,
        settings=settings.content(),
        inputs=snapshot.source_fingerprints(settings),
    )

    def build(draft: Draft) -> None:
        draft.stats |= snapshot.write_snapshot(settings, draft.path, context.log.info)

    artifact = pipeline.make(context, identity, build)
    return materialization(artifact, _corpus_metadata(artifact.stats))


@stage(deps=[raw_corpus], group_name=GROUP, kinds={"spark"}, code_version=clean.CODE_VERSION)
def clean_corpus(
    context: AssetExecutionContext, pipeline: PipelineResource, spark: SparkRunner
) -> MaterializeResult:
    """Normalised, filtered and deduplicated text; every document carries its duplicate cluster."""
    settings = pipeline.settings.clean_corpus
    raw = pipeline.record.current("raw_corpus", needed_by="clean_corpus")
    identity = Identity(
        kind="clean_corpus",
        code_version=clean.CODE_VERSION,
        settings=settings.content(),
        inputs={"raw_corpus": raw.fingerprint},
    )

    def build(draft: Draft) -> None:
        spec = clean.CleanSpec(raw_corpus=raw.url, output=draft.url, settings=settings)
        draft.stats |= spark.clean(context, spec)

    artifact = pipeline.make(context, identity, build)
    return materialization(artifact, _corpus_metadata(artifact.stats))


@stage(
    deps=[clean_corpus, AssetKey("base_model")],
    group_name=GROUP,
    kinds={"spark"},
    code_version=tokenize.CODE_VERSION,
)
def tokenized_shards(
    context: AssetExecutionContext, pipeline: PipelineResource, spark: SparkRunner
) -> MaterializeResult:
    """Packed token rows in three splits (train, validation, held-out) with one manifest."""
    settings = pipeline.settings.tokenized_shards
    clean_text = pipeline.record.current("clean_corpus", needed_by="tokenized_shards")
    base_model = pipeline.record.current("base_model", needed_by="tokenized_shards")
    identity = Identity(
        kind="tokenized_shards",
        code_version=tokenize.CODE_VERSION,
        settings=settings.content(),
        inputs={"clean_corpus": clean_text.fingerprint, "base_model": base_model.fingerprint},
    )

    def build(draft: Draft) -> None:
        spec = tokenize.TokenizeSpec(
            clean_corpus=clean_text.url,
            base_model=base_model.url,
            output=draft.url,
            settings=settings,
        )
        draft.stats |= spark.tokenize(context, spec)

    artifact = pipeline.make(context, identity, build)
    return materialization(artifact, _shard_metadata(artifact.stats))


def _corpus_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    dropped = stats.get("dropped", {})
    return {
        "summary": f"{stats['documents']:,} documents, {stats['bytes'] / 1e6:.1f} MB",
        "documents": stats["documents"],
        "bytes": stats["bytes"],
        "dropped_documents": sum(dropped.values()),
        "dropped": table(["reason", "documents"], dropped.items()),
    }


def _shard_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        (split, stats["documents"][split], stats["tokens"][split], stats["rows"][split])
        for split in SPLITS
    ]
    return {
        "summary": f"{sum(stats['tokens'].values()):,} tokens, {stats['rows']['train']:,} rows to "
        f"train on",
        "tokens": sum(stats["tokens"].values()),
        "padding_fraction": stats["padding_fraction"],
        "cut_documents": stats["cut_documents"],
        "tokenizer_engine": stats["tokenizer_engine"],
        "splits": table(["split", "documents", "tokens", "rows"], rows),
    }
