"""What `llm-assets check --smoke` runs: the smallest batch and jobs, and what they found."""

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from artifacts.program.entry import SmokeSpec
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.setup.rights import Finding
from llm_assets.config import TrainingPlace
from llm_assets.runners.google_cloud import (
    BatchTrainingRunner,
    DataprocSparkRunner,
    VertexTrainingRunner,
)
from spark_jobs import smoke as smallest_batch

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""Run config without Dagster's log: a failure is reported as a finding, without a traceback."""
Program = Callable[[dg.AssetExecutionContext, SmokeSpec], dict[str, Any]]


def smoke(
    settings: GoogleCloudSettings,
    cloud_config: Path,
    nodes: int = 1,
    runner: TrainingPlace = "google_cloud",
) -> Iterator[Finding]:
    """Run the smallest batch and the smallest jobs; yields what each found and what it cost.

    If they find anything, messages arrive and images start. The second job has the serve image
    parse the arguments that it would get, and answer once. The smallest training, on so many nodes,
    uses the evaluation's machines, on Google Batch if training has TPUs of its own. The serve image
    is always started by Vertex AI, like an endpoint's.
    """
    output = f"gs://{settings.bucket}/smoke/{uuid.uuid4().hex[:12]}"
    spec = SmokeSpec(output=output, model=f"{output}/model")
    spark = DataprocSparkRunner(cloud_config_path=str(cloud_config))
    kind = BatchTrainingRunner if runner in ("google_batch", "tpu_vm") else VertexTrainingRunner
    training = kind(cloud_config_path=str(cloud_config))

    def batch(context: dg.AssetExecutionContext, spec: SmokeSpec) -> dict[str, Any]:
        return spark.run(context, smallest_batch, spec)

    yield from _run("images.spark", batch, spec, settings)
    findings = list(_run("images.cuda", partial(training.smoke, nodes=nodes), spec, settings))
    yield from findings
    # The serve image answers with the model that this job has written.
    if all(finding.ok for finding in findings):
        yield from check_serving(spec, settings, cloud_config)


def check_serving(
    spec: SmokeSpec, settings: GoogleCloudSettings, cloud_config: Path
) -> Iterator[Finding]:
    """Have the serve image parse what an endpoint's container would get, and answer once."""
    job = VertexTrainingRunner(cloud_config_path=str(cloud_config)).smoke_serving
    yield from _run("images.serve", job, spec, settings)


def _run(
    key: str, program: Program, spec: SmokeSpec, settings: GoogleCloudSettings
) -> Iterator[Finding]:
    # Filled inside the asset, since Dagster's events hold values in classes of its own.
    values: dict[str, Any] = {}

    @dg.asset(name=f"smoke_{key.rpartition('.')[2]}")
    def smallest(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        values.update(program(context, spec))
        return dg.MaterializeResult(metadata=values)

    # A smoke test is no run of a pipeline, so it leaves no trace in the instance of its user.
    with dg.DagsterInstance.ephemeral() as instance:
        done = dg.materialize([smallest], instance=instance, run_config=QUIET, raise_on_error=False)
    if not done.success:
        (failure,) = [event.step_failure_data for event in done.get_step_failure_events()]
        description = failure.user_failure_data and failure.user_failure_data.description
        cause = failure.error and (failure.error.cause or failure.error)
        yield Finding(key, False, description or (cause.message if cause else "it failed").strip())
        return
    yield from describe(key, values, settings)
    metadata = done.asset_materializations_for_node(smallest.op.name)[0].metadata
    if "cost_dollars" in metadata:
        yield Finding("cost", True, f"it has cost {metadata['cost_dollars'].value:.4f} USD")


def describe(key: str, found: dict[str, Any], settings: GoogleCloudSettings) -> Iterator[Finding]:
    """What a program found, compared with what the settings ask for."""
    programs = ("pyspark", "torch", "cuda", "vllm")
    versions = [f"{name} {found[name]}" for name in programs if found.get(name)]
    yield Finding(key, True, ", ".join([f"starts, with Python {found['python']}", *versions]))
    if key == "images.serve":
        # vLLM needs accelerators; without them the image has another engine.
        if settings.endpoint.vllm and settings.endpoint.accelerator_type:
            yield _describe_arguments(found)
        if found.get("answer"):
            yield Finding(key, True, f"answers, by {found['engine']}")
        return
    if found.get("executor_python", found["python"]) != found["python"]:
        text = f"executors run Python {found['executor_python']}: build the image again"
        yield Finding(key, False, text)
    if "joined" in found:
        text = "`mapInArrow` and a join over a shuffle"
        text += " work" if found["joined"] else " lost rows: build the image again"
        yield Finding(key, found["joined"], text)
    if "trained" in found:
        text = f"a training step of {found['processes']} process(es)"
        text += " is right" if found["trained"] else " gives a wrong result"
        yield Finding("evaluation", found["trained"], text)
    writes = "can be written and read" if found["bucket"] else "lost what was just written to it"
    renames = {True: "; it renames folders", False: "; it renames no folders", None: ""}
    text = f"gs://{settings.bucket} {writes} from there{renames[found.get('renames_folders')]}"
    yield Finding("bucket", found["bucket"], text)
    if not found.get("shows_uploaded", True):
        text = "the mounted bucket hides what was uploaded into folders that have no object"
        yield Finding("bucket", False, f"{text} of their own: training could read nothing")
    for variable in found.get("secrets", []):
        yield Finding("secrets", True, f"the job has read the secret for {variable}")
    if found.get("secrets") == []:
        text = "the job reads no secret: no `weights_and_biases_key` is named"
        yield Finding("secrets", True, text)
    if "accelerators" in found:
        requested = settings.evaluation.accelerator_count
        text = f"{found['accelerators']} accelerators are seen, {requested} asked for"
        yield Finding("evaluation", found["accelerators"] >= requested, text)


def _describe_arguments(found: dict[str, Any]) -> Finding:
    if found["engine"] != "vllm":
        text = f"the image starts {found['engine']} instead of vLLM: set `vllm: null`"
        return Finding("endpoint.vllm", False, text)
    if found["refusal"]:
        text = f"vLLM {found['vllm']} refuses what it would be started with: {found['refusal']}"
        return Finding("endpoint.vllm", False, f"{text}. Correct `arguments` under this key.")
    return Finding("endpoint.vllm", True, f"vLLM {found['vllm']} takes its arguments")
