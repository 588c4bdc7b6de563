"""From source text to packed token rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, AssetKey, MaterializeResult

import recipes.evaluation
from artifacts.identity import Identity
from artifacts.store import Draft
from llm_assets import figures, held_out
from llm_assets.assets.estimate import training_estimate
from llm_assets.assets.stage import materialization, stage, table
from llm_assets.resources.pipeline import PipelineResource
from llm_assets.resources.spark import SparkRunner
from llm_assets.resources.training import TrainingRunner
from llm_assets.sources import snapshot
from spark_jobs import clean, tokenize

GROUP = "corpus"
GENERAL_ENGLISH = Path(recipes.evaluation.__file__).with_name("general_english.txt")
"""The text that forgetting is measured on; what overlaps with it is not trained on."""


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
        cache = pipeline.store.machine_folder(f"{pipeline.settings.name}/raw_corpus")
        draft.stats |= snapshot.write_snapshot(settings, draft.path, context.log.info, cache)

    artifact = pipeline.make(context, identity, build)
    return materialization(artifact, _corpus_metadata(artifact.stats))


@stage(deps=[raw_corpus], group_name=GROUP, kinds={"spark"}, code_version=clean.CODE_VERSION)
def clean_corpus(
    context: AssetExecutionContext, pipeline: PipelineResource, spark: SparkRunner
) -> MaterializeResult:
    """Normalised, filtered and deduplicated text; every document carries its duplicate cluster."""
    settings = pipeline.settings.clean_corpus
    store = pipeline.store
    raw = pipeline.record.current("raw_corpus", needed_by="clean_corpus")
    general_url, general_digest = held_out.share_text(store, GENERAL_ENGLISH)
    unpinned = Identity(
        kind="clean_corpus",
        code_version=clean.CODE_VERSION,
        settings=settings.content(),
        inputs={"raw_corpus": raw.fingerprint, "general_english": general_digest},
    )
    pin = held_out.find_pin(pipeline.record, unpinned)

    def build(draft: Draft) -> None:
        spec = clean.CleanSpec(
            raw_corpus=raw.url,
            output=draft.url,
            settings=settings,
            pinned_held_out=pin.url if pin else None,
            evaluation_texts=[general_url],
            cache=f"{store.root}/cache/{pipeline.settings.name}/clean_corpus",
        )
        draft.stats |= spark.clean(context, spec)

    artifact = pipeline.make(context, held_out.with_pin(unpinned, pin), build)
    return materialization(artifact, _clean_metadata(artifact.stats))


@stage(
    deps=[clean_corpus, AssetKey("base_model")],
    group_name=GROUP,
    kinds={"spark"},
    code_version=tokenize.CODE_VERSION,
)
def tokenized_shards(
    context: AssetExecutionContext,
    pipeline: PipelineResource,
    spark: SparkRunner,
    training: TrainingRunner,
) -> MaterializeResult:
    """Packed token rows in three splits (train, validation, held-out) with one manifest."""
    settings = pipeline.settings.tokenized_shards
    clean_text = pipeline.record.current("clean_corpus", needed_by="tokenized_shards")
    base_model = pipeline.record.current("base_model", needed_by="tokenized_shards")
    inputs = {"clean_corpus": clean_text.fingerprint, "base_model": base_model.fingerprint}
    evaluation_texts = []
    if settings.replay:
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
        spec = tokenize.TokenizeSpec(
            clean_corpus=clean_text.url,
            base_model=base_model.url,
            output=draft.url,
            settings=settings,
            evaluation_texts=evaluation_texts,
            cache=f"{pipeline.store.root}/cache/{pipeline.settings.name}/tokenized_shards",
        )
        draft.stats |= spark.tokenize(context, spec)

    artifact = pipeline.make(context, identity, build)
    estimate = training_estimate(training, pipeline.settings.checkpoint, artifact, base_model)
    expected = {"training_estimate": estimate} if estimate else {}
    return materialization(artifact, _shard_metadata(artifact.stats) | expected)


def _corpus_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    dropped = stats.get("dropped", {})
    return {
        "summary": f"{stats['documents']:,} documents, {stats['bytes'] / 1e6:.1f} MB",
        "documents": stats["documents"],
        "bytes": stats["bytes"],
        "dropped_documents": sum(dropped.values()),
        "dropped": table(["reason", "documents"], dropped.items()),
    }


def _clean_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    examples = [
        (reason, example["id"], " ".join(example["text"].split()))
        for reason, found in stats["dropped_examples"].items()
        for example in found
    ]
    sizes = {int(size): count for size, count in stats["cluster_sizes"].items()}
    lengths = {int(length): count for length, count in stats["length_histogram"].items()}
    return _corpus_metadata(stats) | {
        "held_out_pinned": stats["pinned"],
        "dropped_examples": table(["reason", "document", "begins with"], examples),
        "cluster_sizes": figures.bars(
            "Duplicate clusters by size", "documents in the cluster", "clusters", sizes
        ),
        "lengths": figures.bars(
            "Documents by length", "characters, from this many on", "documents", lengths
        ),
    }


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
        "tokenizer_engine": stats["tokenizer_engine"],
        "splits": table(["split", "documents", "tokens", "rows"], rows),
        "tokens_by_source": table(["source", "tokens"], stats["tokens_by_source"].items()),
    }
