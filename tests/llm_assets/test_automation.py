"""The schedule and the sensor."""

from pathlib import Path

import pytest
from dagster import DagsterInstance, RunRequest, SkipReason, build_sensor_context

from artifacts.store.identity import Identity
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from llm_assets.sources.snapshot.snapshot import source_fingerprints
from tests.conftest import Project


def evaluate_sensor(project: Project) -> RunRequest | SkipReason:
    defs = build_definitions(load_settings(project.config), str(project.config))
    with DagsterInstance.ephemeral() as instance:
        resources = {"pipeline": defs.resources["pipeline"]}
        context = build_sensor_context(instance=instance, definitions=defs, resources=resources)
        sensor = defs.resolve_sensor_def("source_text_changed")
        data = sensor.evaluate_tick(context)
    return data.run_requests[0] if data.run_requests else SkipReason(data.skip_message)


@pytest.fixture
def with_raw_corpus(project: Project) -> Project:
    settings = load_settings(project.config).raw_corpus
    identity = Identity(kind="raw_corpus", code_version="1", inputs=source_fingerprints(settings))
    store = project.record.store
    artifact, _ = store.make(identity, lambda draft: draft.stats.update(documents=1))
    project.record.advance(artifact)
    return project


def test_changed_text_asks_for_a_run(with_raw_corpus: Project) -> None:
    assert isinstance(evaluate_sensor(with_raw_corpus), SkipReason)

    (with_raw_corpus.folder / "text" / "new.txt").write_text("Something new to learn.")

    request = evaluate_sensor(with_raw_corpus)
    assert isinstance(request, RunRequest)
    assert request.tags["changed_sources"] == "manual"


def test_the_same_change_asks_only_once(with_raw_corpus: Project) -> None:
    (with_raw_corpus.folder / "text" / "new.txt").write_text("Something new to learn.")
    first, second = evaluate_sensor(with_raw_corpus), evaluate_sensor(with_raw_corpus)
    assert isinstance(first, RunRequest) and isinstance(second, RunRequest)
    assert first.run_key == second.run_key


def test_unreadable_sources_skip_with_the_reason(with_raw_corpus: Project) -> None:
    for path in (with_raw_corpus.folder / "text").iterdir():
        path.unlink()
    (with_raw_corpus.folder / "text").rmdir()
    reason = evaluate_sensor(with_raw_corpus)
    assert isinstance(reason, SkipReason) and "text" in (reason.skip_message or "")


def test_the_schedule_retrains_weekly(project: Project) -> None:
    defs = build_definitions(load_settings(project.config), str(project.config))
    assert defs.resolve_schedule_def("weekly_retraining").cron_schedule == "0 3 * * 1"


def test_a_second_pipeline_lives_under_its_prefix(project: Project, tmp_path: Path) -> None:
    project.config.write_text(project.config.read_text() + "\nkey_prefix: manual\n")
    defs = build_definitions(load_settings(project.config), str(project.config))
    keys = {key.to_user_string() for key in defs.resolve_all_asset_keys()}
    assert "manual/checkpoint" in keys and "checkpoint" not in keys
