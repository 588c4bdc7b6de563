"""Every setting of a stage may be another for one run, by Dagster's own run config."""

from collections.abc import Iterator
from typing import Any

import pytest
from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterInvalidConfigError,
    Field,
    JobDefinition,
    Shape,
    validate_run_config,
)
from pyspark.sql import SparkSession

from llm_assets.config import changed_settings, load_settings
from llm_assets.definitions import build_definitions
from llm_assets.launchpad import config_fields, overrides
from tests.conftest import Project
from tests.llm_assets.in_process import ask

SECTIONS = ("raw_corpus", "clean_corpus", "tokenized_shards", "base_model", "checkpoint")
SECTIONS += ("eval_metrics", "model_version", "endpoint")
PYSPARK = "llm_assets__pyspark"


def retraining(project: Project) -> JobDefinition:
    defs = build_definitions(load_settings(project.config), str(project.config))
    return defs.resolve_job_def("retraining")


def leaves(fields: dict[str, Field], path: str) -> Iterator[tuple[str, Field]]:
    for name, field in fields.items():
        if isinstance(field.config_type, Shape):
            yield from leaves(field.config_type.fields, f"{path}.{name}")
        else:
            yield f"{path}.{name}", field


def test_each_setting_has_its_meaning_and_the_files_value(project: Project) -> None:
    settings, job = load_settings(project.config), retraining(project)

    def filled(fields: dict[str, Field]) -> dict[str, Any]:
        return {
            key: filled(field.config_type.fields)
            if isinstance(field.config_type, Shape)
            else field.default_value
            for key, field in fields.items()
        }

    for name in SECTIONS:
        section = getattr(settings, name)
        fields = config_fields(section, name)
        unexplained = [key for key, field in leaves(fields, name) if not field.description]
        assert not unexplained
        as_shown = filled(fields)
        assert as_shown == section.model_dump(mode="json")
        assert overrides(section, as_shown, name) == {}
        # What the launchpad is filled in with can be launched.
        assert validate_run_config(job, {"ops": {name: {"config": as_shown}}})


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("tokenized_shards", {"mixing": {"manual": {"share": 0.5}}}, {"mixing": {"manual": 0.5}}),
        ("checkpoint", {"optimizer": {"betas": [0.9, 0.95]}}, {"optimizer": {"betas": ["a", 1]}}),
        ("checkpoint", {"lora": {"rank": 8}}, {"lora": {"rank": "eight"}}),
        ("checkpoint", {"lora": None}, {"lora": 8}),
        ("eval_metrics", {"tasks": [{"name": "piqa"}]}, {"tasks": [{"shots": 3}]}),
        ("model_version", {"gate": {"floors": {"exam": 0.5}}}, {"gate": {"floors": {"exam": "a"}}}),
    ],
)
def test_mappings_and_lists_of_settings_have_types(
    project: Project, name: str, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    job = retraining(project)
    assert validate_run_config(job, {"ops": {name: {"config": right}}})
    with pytest.raises(DagsterInvalidConfigError):
        validate_run_config(job, {"ops": {name: {"config": wrong}}})


def test_sparks_own_settings_are_shown_and_may_be_others_for_one_run(project: Project) -> None:
    schema: Any = retraining(project).run_config_schema.config_type
    resources = schema.fields["resources"].config_type.fields
    shown = resources[PYSPARK].config_type.fields["config"].config_type.fields["spark_config"]
    by_file = shown.default_value
    assert by_file["spark.sql.shuffle.partitions"] == "2" and not shown.is_required

    given = {"spark_config": by_file | {"spark.sql.shuffle.partitions": "3"}}
    with DagsterInstance.ephemeral() as instance:
        config = {"resources": {PYSPARK: {"config": given}}}
        assert ask(project, "*clean_corpus", config, instance=instance) == ""
        (made,) = instance.fetch_materializations(AssetKey("clean_corpus"), limit=1).records
    session = SparkSession.getActiveSession()
    assert session and session.conf.get("spark.sql.shuffle.partitions") == "3"
    pages = made.asset_materialization.metadata.get("spark_ui")
    assert (pages and pages.value) == session.sparkContext.uiWebUrl


def test_a_section_of_the_file_may_be_left_out_of_one_run(project: Project) -> None:
    text = project.config.read_text()
    project.config.write_text(text.replace("checkpoint:\n", "checkpoint:\n  lora: {rank: 8}\n"))
    settings, job = load_settings(project.config), retraining(project)

    def changed(given: dict[str, Any]) -> dict[str, Any]:
        config = validate_run_config(job, {"ops": {"checkpoint": {"config": given}}})
        return overrides(settings.checkpoint, config["ops"]["checkpoint"]["config"], "checkpoint")

    assert changed({"lora": None}) == {"checkpoint.lora": None}
    assert changed({"lora": {"rank": 4}}) == {"checkpoint.lora.rank": 4}
    assert changed({"seed": settings.checkpoint.seed}) == {}


@pytest.mark.parametrize(
    ("written", "given", "stage"),
    [
        ({"deepspeed": {"stage": 2}}, {"stage": 3}, 3),
        ({"deepspeed": {"stage": 2}}, None, None),
        ({"device": "tpu"}, None, None),
        ({"strategy": {"name": "deepspeed", "stage": 2}}, {"stage": 3}, 3),
        ({}, {"name": "deepspeed", "stage": 3}, 3),
    ],
)
def test_a_strategy_in_whatever_form_of_the_file_may_be_another_in_one_run(
    project: Project, written: dict[str, Any], given: Any, stage: int | None
) -> None:
    project.configure(checkpoint={"placement": {"device_batch_size": 2, **written}})
    of_the_file = load_settings(project.config)
    run_config = {"placement": {"strategy": given}}
    changes = overrides(of_the_file.checkpoint, run_config, "checkpoint")
    placement = changed_settings(project.config, changes).checkpoint.placement
    assert placement.device_batch_size == 2
    assert getattr(placement.strategy, "stage", None) == stage
    assert (placement.strategy is None) == (given is None)


def test_what_a_run_has_otherwise_is_shown_with_the_artifact(project: Project) -> None:
    (source,) = load_settings(project.config).raw_corpus.model_dump(mode="json")["sources"]
    changed = {"sources": [source | {"maximum_document_megabytes": 3}]}
    with DagsterInstance.ephemeral() as instance:
        for config in ({"ops": {"raw_corpus": {"config": changed}}}, None):
            assert ask(project, "raw_corpus", config, instance=instance) == ""
        made = instance.fetch_materializations(AssetKey("raw_corpus"), limit=2).records
        by_file, otherwise = (record.asset_materialization.metadata for record in made)
    assert "changed_for_this_run" not in by_file
    header, _, row = str(otherwise["changed_for_this_run"].value).splitlines()
    assert header == "| setting | this run | the file |"
    assert row.startswith("| raw_corpus.sources | ")
    assert "'maximum_document_megabytes': 3.0" in row and ": 64.0" in row


@pytest.mark.parametrize(
    ("asset", "config", "told"),
    [
        (
            "clean_corpus",
            {"minimum_charakters": 3},
            'unexpected config entry "minimum_charakters" at path root:ops:clean_corpus:config',
        ),
        (
            "clean_corpus",
            {"minimum_characters": "many"},
            "at path root:ops:clean_corpus:config:minimum_characters",
        ),
        (
            "checkpoint",
            {"optimizer": {"learning_rate": -1}},
            "checkpoint.optimizer.learning_rate: must be greater than 0 (got -1)",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_before_anything_is_made(
    project: Project, asset: str, config: dict[str, object], told: str
) -> None:
    refused = project.materialize(asset, ops={asset: {"config": config}})
    printed = refused.stdout + refused.stderr
    assert refused.returncode != 0 and told in printed, printed
    assert not (project.folder / "store" / asset).exists()


def test_steps_run_in_processes_of_their_own_where_run_config_says_so(project: Project) -> None:
    processes = {"multiprocess": {"max_concurrent": 1}}
    done = project.materialize("raw_corpus", execution={"config": processes})
    assert done.returncode == 0 and "Launching subprocess" in done.stderr, done.stderr
