"""What all clients do when all goes well, and when asked again."""

import dataclasses
import json
import threading
import time
from typing import Any

import pytest
from dagster import DagsterInstance
from google.cloud import storage

from tests.llm_assets.pipes.runner import QUICK, Runner, failure_text, log_text
from tests.stand_ins.google import BUCKET, REGION
from tests.waiting import wait_until


def test_messages_results_and_console_link_reach_all_who_follow_the_job(
    each_runner: Runner,
) -> None:
    instance = DagsterInstance.ephemeral()
    result = each_runner.run(["log:hello", "materialize"], instance)
    assert result.success
    event = result.asset_materializations_for_node("figures")[0]
    (job,) = each_runner.jobs()
    assert event.metadata["job"].value == job.name
    assert event.metadata["start"].value == 1
    assert event.metadata["adopted"].value is False
    log = log_text(instance, result)
    assert "hello (start 1)" in log
    assert f"https://console.cloud.google.com/{console_path(each_runner, job.name)}" in log
    assert log.index("console.cloud.google.com") < log.index("hello")
    assert job.labels["dagster-run-id"].removeprefix("x-") == result.run_id
    assert job.labels["dagster-asset"] == "figures"
    assert job.labels["pipeskey"] == "figures-f1"
    again = each_runner.run(["log:hello", "materialize"], instance)
    assert len(each_runner.jobs()) == 1
    assert "hello (start 1)" in log_text(instance, again)
    assert again.asset_materializations_for_node("figures")[0].metadata["adopted"].value is True


def console_path(runner: Runner, name: str) -> str:
    job_id = name.rsplit("/", 1)[1]
    if runner.service == "vertex":
        return f"vertex-ai/locations/{REGION}/training/{job_id}"
    if runner.service == "batch":
        return f"batch/jobsDetail/regions/{REGION}/jobs/{job_id}/details"
    return f"dataproc/batches/{REGION}/{job_id}"


@pytest.mark.parametrize("changes", [{"fingerprint": None}, {"accept_succeeded": lambda: False}])
def test_what_succeeded_is_done_again_where_it_has_no_name_or_its_output_is_gone(
    vertex_runner: Runner, changes: dict[str, Any]
) -> None:
    runner = vertex_runner.changed(**changes)
    assert runner.run(["materialize"]).success
    assert runner.run(["materialize"]).success
    assert len(runner.jobs()) == 2


def test_job_that_fails_after_its_last_message_has_failed(vertex_runner: Runner) -> None:
    result = vertex_runner.run(["materialize", "die:3"])
    assert not result.success
    assert not result.get_asset_materialization_events()


def test_success_without_a_closing_message_is_a_failure_and_not_adopted(
    vertex_runner: Runner,
) -> None:
    result = vertex_runner.run(["materialize", "die:0"])
    assert "without its closing message" in failure_text(result)
    assert vertex_runner.run(["materialize"]).success
    assert len(vertex_runner.jobs()) == 2


def test_closing_message_that_comes_after_the_jobs_end_is_waited_for(
    vertex_runner: Runner,
) -> None:
    def close_late() -> None:
        states = ["JOB_STATE_SUCCEEDED"]
        wait_until(lambda: [job.state.name for job in vertex_runner.jobs()] == states)
        time.sleep(10 * QUICK.poll_seconds)
        bucket = storage.Client().bucket(BUCKET)
        *_, last = sorted(bucket.list_blobs(prefix="messages/"), key=lambda blob: blob.generation)
        folder, number = last.name.removesuffix(".json").rsplit("/", 1)
        closing = json.dumps({"method": "closed", "params": None})
        bucket.blob(f"{folder}/{int(number) + 1}.json").upload_from_string(closing)

    threading.Thread(target=close_late, daemon=True).start()
    runner = vertex_runner.changed(limits=dataclasses.replace(QUICK, drain_seconds=60.0))
    assert runner.run(["materialize", "die:0"]).success
