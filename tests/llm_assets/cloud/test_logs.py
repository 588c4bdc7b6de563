"""What steps print, kept in a bucket by the line that dagster.yaml has for it."""

import shutil

import pytest
import yaml
from dagster import DagsterEventType, DagsterInstance

from tests.conftest import Project
from tests.stand_ins.google import BUCKET, LocalGoogle


def test_what_a_step_printed_is_read_after_its_machine_is_gone(
    google: LocalGoogle, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project.folder / "dagster.yaml"
    lines = path.read_text().splitlines()
    said = next(line for line in lines if line.startswith("#   compute_logs:"))
    path.write_text(
        yaml.safe_dump(yaml.safe_load(path.read_text()) | yaml.safe_load(said.removeprefix("# ")))
    )
    monkeypatch.setenv("DAGSTER_LOGS_BUCKET", BUCKET)
    done = project.run("dagster", "asset", "materialize", "--select", "raw_corpus")
    assert done.returncode == 0, done.stdout + done.stderr

    monkeypatch.chdir(project.folder)
    shutil.rmtree(project.folder / ".llm_assets" / "dagster" / "compute_logs")
    with DagsterInstance.from_config(str(project.folder)) as instance:
        (run,) = instance.get_runs()
        (captured,) = instance.all_logs(run.run_id, of_type=DagsterEventType.LOGS_CAPTURED)
        key = captured.dagster_event.logs_captured_data.file_key
        printed = instance.compute_log_manager.get_log_data(
            [run.run_id, "compute_logs", key]
        ).stderr
        assert printed is not None and b"raw_corpus" in printed
