"""Pipelines in the code location of a team's Dagster project, among its own definitions."""

import pyarrow as pa
import yaml
from dagster import (
    AssetKey,
    ComponentTree,
    ConfigurableResource,
    DagsterInstance,
    DailyPartitionsDefinition,
    Definitions,
    StaticPartitionsDefinition,
    asset,
    in_process_executor,
)

from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from llm_assets.assets.stage import failure_reason
from llm_assets.component import LanguageModel
from spark_jobs.runtime.parquet import write_table
from tests.conftest import Project


def component(project: Project, **settings: str) -> Definitions:
    """What Dagster gets from the component whose file is the project's, with other settings."""
    path = project.folder / f"{settings.get('name', 'defs')}.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(project.config.read_text()) | settings))
    return LanguageModel(path).build_defs(ComponentTree.for_test().load_context)


class Spark(ConfigurableResource):
    master: str


@asset
def reports(spark: Spark) -> None: ...


@asset(partitions_def=StaticPartitionsDefinition(["a", "b"]))
def by_letter() -> None: ...


@asset(partitions_def=DailyPartitionsDefinition("2026-01-01"))
def by_day() -> None: ...


TEAM = Definitions(
    [reports, by_letter, by_day],
    resources={name: Spark(master="yarn") for name in ("spark", "pipeline", "registry")},
    executor=in_process_executor,
)


def test_a_team_keeps_its_assets_resources_and_executor(project: Project) -> None:
    alone = component(project)
    merged = Definitions.merge(alone, TEAM)
    Definitions.validate_loadable(merged)
    assert merged.executor is in_process_executor and merged.resources["spark"].master == "yarn"
    retraining = merged.resolve_job_def("retraining")
    graph = alone.resolve_asset_graph()
    own = graph.materializable_asset_keys & graph.unpartitioned_asset_keys
    assert retraining.asset_layer.selected_asset_keys == own
    assert retraining.partitions_def is None


def test_an_asset_of_the_team_takes_an_artifact_as_its_input(project: Project) -> None:
    @asset
    def mine(checkpoint: Artifact, clean_corpus: pa.Table) -> int:
        assert clean_corpus.to_pylist() == [{"text": "part-00000.parquet"}]
        return int(checkpoint.stats["steps"])

    def build(draft: Draft) -> None:
        draft.stats["steps"] = 7
        # Beside the documents of a corpus lie lists of what has left it and of copies.
        for name in ("duplicates-00000.parquet", "part-00000.parquet", "past/part-00000.parquet"):
            column = "id" if "duplicates" in name else "text"
            write_table(f"{draft.url}/{name}", pa.table({column: [name]}))

    for kind in ("checkpoint", "clean_corpus"):
        identity = Identity(kind=kind, code_version="1")
        project.record.advance(project.record.store.make(identity, build)[0])
    merged = Definitions.merge(component(project), Definitions([mine]))
    with DagsterInstance.ephemeral() as instance:
        job = merged.resolve_implicit_global_asset_job_def()
        done = job.execute_in_process(instance=instance, asset_selection=[mine.key])
    assert done.output_for_node("mine") == 7


def test_a_code_location_holds_several_pipelines(project: Project) -> None:
    second = {"name": "letters", "key_prefix": "letters"}
    merged = Definitions.merge(component(project), component(project, **second), TEAM)
    Definitions.validate_loadable(merged)
    jobs = [job.name for job in merged.resolve_all_job_defs()]
    assert {"retraining", "letters__retraining", "cleaning", "letters__cleaning"} <= {*jobs}
    made = merged.resolve_job_def("letters__retraining").asset_layer.selected_asset_keys
    assert AssetKey(["letters", "checkpoint"]) in made and AssetKey("checkpoint") not in made

    # What a run's config says of the one is not said of the other.
    wrong = {"optimizer": {"learning_rate": -1}}
    with DagsterInstance.ephemeral() as instance:
        done = merged.resolve_implicit_global_asset_job_def().execute_in_process(
            {"ops": {"letters__checkpoint": {"config": wrong}}},
            instance=instance,
            asset_selection=[AssetKey(["letters", "checkpoint"]), AssetKey("checkpoint")],
            raise_on_error=False,
        )
    failed = done.filter_events(lambda event: event.is_step_failure)
    told = {one.step_key: failure_reason(one.step_failure_data) for one in failed}
    assert "learning_rate: must be greater than 0" in told["letters__checkpoint"]
    assert "`checkpoint` needs `tokenized_shards`" in told["checkpoint"]
