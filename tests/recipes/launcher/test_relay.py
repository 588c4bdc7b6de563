"""A program that knows nothing of buckets reports to Dagster through the launcher."""

import sys
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetExecutionContext,
    DagsterInstance,
    ExecuteInProcessResult,
    MaterializeResult,
    asset,
    materialize,
)
from google.cloud.aiplatform_v1 import JobServiceClient

from llm_assets.pipes import Limits, PipesGCSLiveMessageReader, PipesVertexCustomJobClient
from tests.stand_ins.google import BUCKET, CUDA_IMAGE, PROJECT, REGION, LocalGoogle

PROGRAM = str(Path(__file__).parent / "own_program.py")


def run(google: LocalGoogle, *arguments: str) -> tuple[ExecuteInProcessResult, str]:
    """Run the program under the launcher in an asset; `(result, the run's log)`."""
    client = PipesVertexCustomJobClient(
        PipesGCSLiveMessageReader(bucket=BUCKET),
        JobServiceClient(client_options={"api_endpoint": google.endpoint}),
        limits=Limits(poll_seconds=0.5),
    )
    command = [sys.executable, "-m", "recipes.launcher", "--launcher", "command", "--"]
    pool: dict[str, Any] = {
        "replica_count": 1,
        "machine_spec": {"machine_type": "n1-standard-4"},
        "container_spec": {
            "image_uri": CUDA_IMAGE,
            "command": [*command, sys.executable, PROGRAM, *arguments],
        },
    }
    output = {"output_uri_prefix": f"gs://{BUCKET}/own"}
    job = {"job_spec": {"worker_pool_specs": [pool], "base_output_directory": output}}

    @asset
    def own(context: AssetExecutionContext) -> MaterializeResult:
        return client.run(
            context=context, parent=f"projects/{PROJECT}/locations/{REGION}", job=job
        ).get_materialize_result(implicit_materialization=False)

    instance = DagsterInstance.ephemeral()
    result = materialize([own], instance=instance, raise_on_error=False)
    log = "\n".join(record.user_message for record in instance.all_logs(result.run_id))
    return result, log


def test_own_program_reports_to_the_run(google: LocalGoogle) -> None:
    result, log = run(google)
    assert result.success
    assert "writing to" in log and f"{BUCKET}/own/model" in log
    event = result.asset_materializations_for_node("own")[0]
    assert event.metadata["answer"].value == 42


@pytest.mark.soak
def test_what_a_killed_program_had_said_arrives(google: LocalGoogle) -> None:
    result, log = run(google, "die")
    assert not result.success
    assert "writing to" in log
    assert "non-zero status of 137" in str(result.get_step_failure_events()[0])
