"""The runners of Google Cloud: Spark on Dataproc Serverless, PyTorch on Vertex AI."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, PipesClientCompletedInvocation
from pydantic import BaseModel

from artifacts.errors import UserError
from artifacts.program.smoke import PROBE, UPLOADED, SmokeSpec
from artifacts.storage import files
from artifacts.store.identity import hash_json
from llm_assets.cloud.accelerators import ACCELERATORS, TPU_MACHINES
from llm_assets.cloud.config import load_cloud_settings
from llm_assets.cloud.estimate import estimate_training
from llm_assets.cloud.jobs import (
    custom_job,
    serving_check_job,
    serving_check_machine,
    spark_batch,
)
from llm_assets.cloud.prices import DCU, SPARK_DCUS, dcu_hourly, hourly
from llm_assets.cloud.settings import GoogleCloudSettings, MachineSettings
from llm_assets.cloud.spending import Spending
from llm_assets.pipes import (
    Limits,
    PipesDataprocServerlessClient,
    PipesGCSLiveMessageReader,
    PipesVertexCustomJobClient,
)
from llm_assets.runners.completeness import missing_of_evaluation, missing_of_training
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner
from recipes.evaluation.spec import EvaluationSpec
from recipes.settings.sections import DeviceChoice, Precision
from recipes.spec import RESULT_NAME, TrainingResult, TrainingSpec
from spark_jobs.clean import job as clean
from spark_jobs.read import job as read
from spark_jobs.runtime.usage import USAGE
from spark_jobs.tokenize import job as tokenize

HOUR = 3600
MESSAGES_FOLDER = "pipes"
MAIN_PROGRAM = 'import runpy\n\nrunpy.run_module("spark_jobs.{job}.job", run_name="__main__")\n'


class DataprocSparkRunner(SparkRunner):
    """Runs the Spark jobs as Dataproc Serverless batches."""

    cloud_config_path: str
    """The cloud project's file."""

    def read(self, context: AssetExecutionContext, spec: read.ReadSpec) -> dict[str, Any]:
        return self._run(context, "read", spec, spec.output)

    def clean(self, context: AssetExecutionContext, spec: clean.CleanSpec) -> dict[str, Any]:
        return self._run(context, "clean", spec, spec.output)

    def tokenize(
        self, context: AssetExecutionContext, spec: tokenize.TokenizeSpec
    ) -> dict[str, Any]:
        return self._run(context, "tokenize", spec, spec.output)

    def smoke(self, context: AssetExecutionContext, spec: SmokeSpec) -> dict[str, Any]:
        """Run the smallest batch; returns what it found."""
        return self._run(context, "smoke", spec, f"{spec.output}/spark")

    def _run(
        self, context: AssetExecutionContext, job: str, spec: BaseModel, output: str
    ) -> dict[str, Any]:
        settings = load_cloud_settings(Path(self.cloud_config_path))
        fingerprint, folder = _stage_spec(settings, job, spec)
        main = f"{folder}/main.py"
        files.write(main, MAIN_PROGRAM.format(job=job).encode())
        spending = Spending(settings, DCU, dcu_hourly(settings), SPARK_DCUS, context.run_id)
        client = PipesDataprocServerlessClient(
            message_reader=_reader(settings),
            client=_dataproc(settings),
            limits=_limits(settings, spending),
        )
        invocation = client.run(
            context=context,
            parent=settings.parent,
            batch=spark_batch(settings, main, ["--spec", f"{folder}/spec.json"]),
            fingerprint=fingerprint,
            accept_succeeded=partial(files.exists, output),
            before_submit=partial(_prepare, spending, output),
        )
        found = _stats(invocation)
        context.add_output_metadata(spending.metadata() | found.pop(USAGE, {}))
        return found


class VertexTrainingRunner(TrainingRunner):
    """Runs training and evaluation as Vertex AI custom jobs."""

    cloud_config_path: str
    """The cloud project's file."""

    def train(self, context: AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        result = f"{spec.run_folder}/{RESULT_NAME}"
        self._run(
            context,
            "recipes.continued_pretraining",
            spec,
            partial(missing_of_training, spec),
            spec.export_folder,
            "training",
        )
        return TrainingResult.model_validate_json(files.read(result))

    def evaluate(self, context: AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        output = str(spec.output)
        result = f"{output}/{RESULT_NAME}"
        missing = partial(missing_of_evaluation, spec)
        self._run(context, "recipes.evaluate", spec, missing, output, "evaluation")
        content: dict[str, Any] = json.loads(files.read(result))
        return content

    def smoke(self, context: AssetExecutionContext, spec: SmokeSpec) -> dict[str, Any]:
        """Run the smallest job on one of the evaluation's machines; returns what it found."""
        result = f"{spec.output}/{RESULT_NAME}"

        def missing() -> list[str]:
            return [] if files.exists(result) else [result]

        files.write(f"{spec.output}/{UPLOADED}", PROBE)
        self._run(context, "recipes.smoke", spec, missing, f"{spec.output}/mounted", "evaluation")
        content: dict[str, Any] = json.loads(files.read(result))
        return content

    def smoke_serving(self, context: AssetExecutionContext, spec: SmokeSpec) -> dict[str, Any]:
        """Have the serve image parse its engine's arguments; returns what was found."""
        settings = self._settings()
        fingerprint, folder = _stage_spec(settings, "serving", spec)
        job = serving_check_job(settings, f"{folder}/spec.json", f"{folder}/output")
        invocation = self._submit(
            context, settings, serving_check_machine(settings), job, fingerprint, f"{folder}/output"
        )
        return _stats(invocation)

    def check_device(self, device: DeviceChoice) -> None:
        machine = self._settings().training
        if (device == "tpu") == (machine.tpu is not None):
            return
        has = "TPUs" if machine.tpu else "none"
        raise UserError(
            f"`checkpoint.placement.device` is {device}, but `training.machine_type` in "
            f"{self.cloud_config_path} is {machine.machine_type}, which has {has}. Set the one to "
            f"{'tpu' if machine.tpu else 'auto'}, or change the other: {', '.join(TPU_MACHINES)} "
            "have TPUs."
        )

    def precision(self, device: DeviceChoice) -> Precision:
        if device == "tpu":
            return "bfloat16"
        known = ACCELERATORS.get(self._settings().training.accelerator_type or "")
        return "bfloat16" if known and known.bfloat16 else "float32"

    def estimate(self, tokens: int, parameters: int) -> str | None:
        return estimate_training(self._settings(), tokens, parameters).line()

    def _settings(self) -> GoogleCloudSettings:
        return load_cloud_settings(Path(self.cloud_config_path))

    def _run(
        self,
        context: AssetExecutionContext,
        module: str,
        spec: BaseModel,
        missing: Callable[[], list[str]],
        output: str,
        machines_of: str,
    ) -> None:
        """Run a program as a job; one that ran before counts only with all that it has to leave."""
        settings = self._settings()
        machines: MachineSettings = getattr(settings, machines_of)
        fingerprint, folder = _stage_spec(settings, module.rsplit(".", 1)[1], spec)
        launcher = ["--processes", str(max(1, machines.accelerator_count))]
        launcher += ["--accelerators", str(machines.accelerator_count)]
        launcher += ["--spec", f"{folder}/spec.json"]
        if machines_of == "evaluation":
            launcher += ["--launcher", "command", "--", "python", "-m", module]
        else:
            launcher += ["--launcher", "torchrun", "--", "-m", module]
        job = custom_job(settings, machines, launcher, f"{folder}/output")
        self._submit(context, settings, machines, job, fingerprint, output, lambda: not missing())
        if lacking := missing():
            raise UserError(
                f"The job ended well, but left no {lacking[0]}. Materialize the asset again: the "
                "job is not counted, and starts again."
            )

    def _submit(
        self,
        context: AssetExecutionContext,
        settings: GoogleCloudSettings,
        machines: MachineSettings,
        job: Any,
        fingerprint: str,
        output: str,
        accept_succeeded: Callable[[], bool] = lambda: True,
    ) -> PipesClientCompletedInvocation:
        """Follow a job to its end; what it cost is the asset's metadata."""
        price = hourly(settings, machines)
        spending = Spending(
            settings, machines.machine_type, price, machines.replicas, context.run_id
        )
        client = PipesVertexCustomJobClient(
            message_reader=_reader(settings),
            client=_vertex(settings),
            limits=_limits(settings, spending),
        )
        invocation = client.run(
            context=context,
            parent=settings.parent,
            custom_job=job,
            fingerprint=fingerprint,
            accept_succeeded=accept_succeeded,
            before_submit=partial(_prepare, spending, output),
        )
        context.add_output_metadata(spending.metadata())
        return invocation


def _stats(invocation: PipesClientCompletedInvocation) -> dict[str, Any]:
    """What a program has returned."""
    (stats,) = [m["stats"] for m in invocation.get_custom_messages() if "stats" in m][-1:]
    return dict(stats)


def _stage_spec(settings: GoogleCloudSettings, job: str, spec: BaseModel) -> tuple[str, str]:
    """Write the spec where the job reads it: `(its fingerprint, the job's folder)`."""
    fingerprint = hash_json({"job": job, "spec": spec.model_dump(mode="json")})
    folder = f"gs://{settings.bucket}/jobs/{job}-{fingerprint}"
    files.write(f"{folder}/spec.json", spec.model_dump_json(indent=2).encode())
    return fingerprint, folder


def _reader(settings: GoogleCloudSettings) -> PipesGCSLiveMessageReader:
    return PipesGCSLiveMessageReader(bucket=settings.bucket, prefix=MESSAGES_FOLDER)


def _limits(settings: GoogleCloudSettings, spending: Spending) -> Limits:
    return Limits(
        pending_seconds=settings.pending_hours * HOUR,
        restarts=settings.restarts,
        objection=spending.objection,
    )


def _prepare(spending: Spending, output: str) -> None:
    """Before each submission: is there money left, and nothing left of a failed job?"""
    spending.check_before()
    files.remove(output)


def _options(settings: GoogleCloudSettings, host: str) -> dict[str, str]:
    return {"api_endpoint": settings.api_endpoint or f"{settings.region}-{host}"}


def _dataproc(settings: GoogleCloudSettings) -> Any:
    from google.cloud.dataproc_v1 import BatchControllerClient

    options = _options(settings, "dataproc.googleapis.com:443")
    return BatchControllerClient(client_options=options)


def _vertex(settings: GoogleCloudSettings) -> Any:
    from google.cloud.aiplatform_v1 import JobServiceClient

    return JobServiceClient(client_options=_options(settings, "aiplatform.googleapis.com"))
