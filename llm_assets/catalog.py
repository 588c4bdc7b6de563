"""How the assets present themselves in the UI, beyond what each says of itself."""

from datetime import timedelta

import pyarrow as pa
from dagster import AssetSpec, AutomationCondition, FreshnessPolicy, TableColumn, TableSchema

from artifacts.shards.format import DOCUMENT_SCHEMA
from llm_assets.config import PipelineSettings
from llm_assets.experiments.job import ASSET as EXPERIMENTS
from spark_jobs.clean.write import CLEAN_SCHEMA
from spark_jobs.read.document import SCHEMA as RAW_SCHEMA

COLUMNS = {
    "raw_corpus": RAW_SCHEMA,
    "clean_corpus": CLEAN_SCHEMA,
    "tokenized_shards": DOCUMENT_SCHEMA,
}
"""Asset to the columns of its tables: of documents, for the shards beside their tokens."""
MEANINGS = {
    "id": "Names the document; `llm-assets document ID` tells its story.",
    "text": "What is learnt.",
    "source": "The source of the pipeline file that it came from.",
    "package": "The Python package that it documents.",
    "version": "Of that package.",
    "license": "As the package states it.",
    "path": "The file, relative to the source.",
    "language": "Of code, by the file's name.",
    "example": "A conversation, a pair or a labeled text as JSON, where a recipe learns those.",
    "cluster": "Documents with one value are copies or near-copies of each other.",
    "bytes": "Of the text in UTF-8.",
    "tokens": "Of the text, start and end included.",
    "text_hash": "Of the normalized text.",
    "split": "Training, validation or held-out text, for ever.",
    "slice": "In which corpus of the pipeline's life it came first, from 1.",
    "label": "The class, for classification.",
}
"""Column to what it holds."""
FOLLOWED = ("raw_corpus", "endpoint")
"""What `automation.fresh_days` is about: the text that was read, and what serves."""


def present(spec: AssetSpec, settings: PipelineSettings) -> AssetSpec:
    """A spec with owners, tags and columns, in its pipeline's group: so the graph opens whole."""
    name = spec.key.path[-1]
    metadata = dict(spec.metadata)
    if name in COLUMNS:
        metadata["dagster/column_schema"] = _columns(COLUMNS[name])
    days = settings.automation.fresh_days
    followed = days is not None and name in FOLLOWED
    declares = settings.automation.way == "declarative" and name != EXPERIMENTS
    return spec.replace_attributes(
        owners=list(settings.owners),
        group_name=settings.name,
        tags={**spec.tags, "pipeline": settings.name, "stage": str(spec.group_name)},
        metadata=metadata,
        freshness_policy=FreshnessPolicy.time_window(fail_window=timedelta(days=days))
        if followed and days
        else None,
        automation_condition=_condition(name, settings) if declares else None,
    )


def _columns(schema: pa.Schema) -> TableSchema:
    return TableSchema(
        [TableColumn(field.name, str(field.type), MEANINGS.get(field.name)) for field in schema],
    )


def _condition(name: str, settings: PipelineSettings) -> AutomationCondition:
    """When an asset is made where automation is declarative.

    Text is read by the clock, since Dagster does not see it change. Every other asset follows when
    the data version of one before it is another, once all those are made and sound.
    """
    if name == "raw_corpus":
        zone = settings.automation.time_zone
        return AutomationCondition.on_cron(settings.retrain_cron, zone)
    if name == "base_model":
        return AutomationCondition.on_missing() | AutomationCondition.code_version_changed()
    changed = AutomationCondition.any_deps_match(AutomationCondition.data_version_changed())
    return (
        changed.since_last_handled()
        & ~AutomationCondition.any_deps_missing()
        & ~AutomationCondition.any_deps_in_progress()
        & ~AutomationCondition.in_progress()
        & AutomationCondition.all_deps_blocking_checks_passed()
    ).with_label("an asset before it has changed")
