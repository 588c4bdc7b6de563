"""The runners of Google Cloud: Spark on Dataproc Serverless, PyTorch on Vertex AI, Batch, TPUs."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import dagster as dg
from pydantic import BaseModel

from artifacts.checkpoints import MANIFEST_NAME, newest_step, step_url
from artifacts.errors import UserError
from artifacts.model import INDEX, WEIGHTS
from artifacts.program.entry import PROBE, UPLOADED, SmokeSpec
from artifacts.storage import files
from artifacts.store.identity import hash_json
from llm_assets.cloud import jobs
from llm_assets.cloud.settings import (
    ACCELERATORS,
    TPU_MACHINES,
    GoogleCloudSettings,
    MachineSettings,
    TpuMachine,
    load_cloud_settings,
)
from llm_assets.cloud.setup.rights import Finding
from llm_assets.cloud.spending import (
    DCU,
    Spending,
    dcu_hourly,
    estimate_training,
    first_dcus,
    hourly,
)
from llm_assets.config import TrainingPlace
from llm_assets.pipes import (
    Limits,
    PipesDataprocServerlessClient,
    PipesGCSLiveMessageReader,
    PipesGoogleBatchClient,
    PipesTpuVmClient,
    PipesVertexCustomJobClient,
)
from llm_assets.pipes.remote_job import RemoteJobPipesClient
from llm_assets.pipes.service import RemoteJob
from llm_assets.runners.spark import SparkRunner
from llm_assets.runners.training import TrainingRunner
from recipes.data.records import SEEN_NAME, TRAINED_NAME
from recipes.evaluation.settings import SCORES_NAME
from recipes.evaluation.spec import EvaluationSpec
from recipes.settings import PlacementSettings, Precision, TrainingSettings
from recipes.spec import RESULT_NAME, TrainingResult, TrainingSpec
from spark_jobs import smoke as smallest_batch
from spark_jobs.runtime.session import USAGE

RENEWAL_SECONDS = 60.0
STATE_BYTES = 16
"""Bytes per trained parameter: itself, its gradient and AdamW's two moments, in float32."""
FROZEN_BYTES = 4
MESSAGES_FOLDER = "pipes"
MAIN_PROGRAM = 'import runpy\n\nrunpy.run_module("{module}", run_name="__main__")\n'


class DataprocSparkRunner(SparkRunner):
    """Runs the Spark jobs as Dataproc Serverless batches."""

    cloud_config_path: str
    """The cloud project's file."""
    training: TrainingPlace = "google_cloud"
    """Where the later stages run."""

    def run(
        self, context: dg.AssetExecutionContext, job: ModuleType, spec: BaseModel
    ) -> dict[str, Any]:
        output: str = vars(spec)["output"]
        settings = load_cloud_settings(Path(self.cloud_config_path))
        # `clean` for `spark_jobs.clean.job`: people see the name in the cloud's lists of jobs.
        staged = _stage_spec(settings, job.__name__.split(".")[1], spec)
        main = f"{staged.folder}/main.py"
        files.write(main, MAIN_PROGRAM.format(module=job.__name__).encode())
        spending = Spending(
            settings,
            DCU,
            dcu_hourly(settings),
            first_dcus(settings),
            context.run_id,
            training=self.training,
        )
        invocation = _follow(
            context,
            spending,
            PipesDataprocServerlessClient,
            jobs.spark_batch(settings, main, ["--spec", staged.spec]),
            staged,
            output,
            lambda: [] if files.exists(output) else [output],
            job_limits(settings),
        )
        stats = _stats(invocation)
        context.add_output_metadata(stats.pop(USAGE, {}))
        return stats


class CloudTrainingRunner(TrainingRunner, ABC):
    """Runs training and evaluation as jobs of one of Google's services."""

    cloud_config_path: str
    """The cloud project's file."""

    client: ClassVar[type[RemoteJobPipesClient]]

    @staticmethod
    @abstractmethod
    def describe(
        settings: GoogleCloudSettings,
        machines: MachineSettings,
        arguments: Sequence[str],
        output: str,
    ) -> Any:
        """The service's job that runs the launcher with these arguments on every machine."""

    def train(self, context: dg.AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        result = f"{spec.run_folder}/{RESULT_NAME}"
        spec = self._placed(spec)
        self._run(
            context,
            "recipes.continued_pretraining",
            spec,
            partial(missing_of_training, spec),
            spec.export_folder,
            self._settings().training,
            run_folder=spec.run_folder,
        )
        return TrainingResult.model_validate_json(files.read(result))

    def evaluate(self, context: dg.AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        output, machines = str(spec.output), self._settings().evaluation
        missing = partial(_missing, output, {RESULT_NAME, SCORES_NAME})
        self._run(context, "recipes.evaluate", spec, missing, output, machines, 0)
        return _read_result(output)

    def smoke(
        self, context: dg.AssetExecutionContext, spec: SmokeSpec, nodes: int = 1
    ) -> dict[str, Any]:
        """Run the smallest training on the evaluation's machines; returns what it found."""
        files.write(f"{spec.output}/{UPLOADED}", PROBE)
        missing = partial(_missing, spec.output, {RESULT_NAME})
        output = f"{spec.output}/mounted"
        machines = self._settings().evaluation.model_copy(update={"replicas": nodes})
        self._run(context, "recipes.smoke", spec, missing, output, machines, max(2, nodes))
        return _read_result(spec.output)

    def check_hardware(self, placement: PlacementSettings) -> None:
        machine, strategy = self._settings().training, placement.strategy
        device = "tpu" if strategy and strategy.name == "tpu" else "auto"
        if (device == "tpu") == (machine.tpu is not None):
            return
        has = "TPUs" if machine.tpu else "no TPUs"
        raise UserError(
            f"`checkpoint.placement.device` is {device}, but `training.machine_type` in "
            f"{self.cloud_config_path} is {machine.machine_type}, which has {has}. Set `device` to "
            f"{'tpu' if machine.tpu else 'auto'}, or change the machine type: "
            f"{', '.join(TPU_MACHINES)} have TPUs."
        )

    def precision(self) -> Precision:
        accelerator = ACCELERATORS.get(self._settings().training.accelerator_type or "")
        return "bfloat16" if accelerator and accelerator.bfloat16 else "float32"

    def world_size(self, placement: PlacementSettings) -> int:
        machines = self._settings().training
        if placement.workers not in (None, machines.processes):
            raise UserError(
                f"`checkpoint.placement.workers` is {placement.workers}, but a job starts "
                f"{machines.processes} processes: one for each of {machines.accelerator_count} "
                f"accelerator(s) of {machines.replicas} machine(s) (`training` in "
                f"{self.cloud_config_path}). Leave `workers` out, or change the machines."
            )
        return machines.processes

    def _placed(self, spec: TrainingSpec) -> TrainingSpec:
        """A spec for today's machines, which may differ from those of a run that is repeated.

        Raises:
            UserError: on these machines the run would come to another model.
        """
        training = spec.training.placed(self._settings().training.processes)
        if training.content() != spec.training.content():
            raise UserError(
                f"The run was planned for {spec.training.placement.world_size} training "
                f"process(es), but a job starts {training.placement.world_size}, with which a "
                "step of this recipe takes other rows. Set `training.accelerator_count` and "
                f"`training.replicas` in {self.cloud_config_path} as they were."
            )
        return spec.model_copy(update={"training": training})

    def check_state(self, settings: TrainingSettings, parameters: int) -> None:
        # GPU memory, with activations, is checked by the training itself.
        asked = self._settings().training
        if asked.tpu is None:
            return
        is_frozen = bool(getattr(settings, "lora", None))
        state = parameters * (FROZEN_BYTES if is_frozen else STATE_BYTES) / 1e9
        parts = "weights" if is_frozen else "weights, gradients and AdamW's moments"

        def fits(machine: TpuMachine) -> bool:
            return state / machine.chips <= machine.generation.gigabytes

        if fits(asked.tpu):
            return
        larger = ", ".join(name for name, machine in TPU_MACHINES.items() if fits(machine))
        raise UserError(
            f"This training does not fit the {asked.tpu.chips} chip(s) of {asked.machine_type}, "
            f"{asked.tpu.generation.gigabytes:g} GB each: {parts} alone take {state:,.1f} GB. "
            + (
                f"Set `training.machine_type` in {self.cloud_config_path} to one of {larger}, or "
                "train adapters alone (`checkpoint.lora`)."
                if larger
                else "Train it on GPUs, or choose a smaller `base_model`."
            )
        )

    def estimate(self, tokens: int, parameters: int) -> str | None:
        return estimate_training(self._settings(), tokens, parameters, self.client.jobs).line()

    def _settings(self) -> GoogleCloudSettings:
        return load_cloud_settings(Path(self.cloud_config_path))

    def _run(
        self,
        context: dg.AssetExecutionContext,
        module: str,
        spec: BaseModel,
        missing: Callable[[], list[str]],
        output: str,
        machines: MachineSettings,
        processes: int = 1,
        run_folder: str | None = None,
    ) -> None:
        """Run a program as a job.

        Args:
            missing: the files that it has to leave but did not.
            processes: at least so many train together if machines have no accelerators to share; 0
            for
                a program that is a single process.
            run_folder: where the program saves what has to survive an interruption.
        """
        settings = self._settings()
        staged = _stage_spec(settings, module.rsplit(".", 1)[1], spec)
        count = machines.processes // machines.replicas
        if machines.accelerator_count == 0 and machines.tpu is None:
            count = max(count, processes // machines.replicas)
        launcher = ["--processes", str(count)]
        launcher += ["--accelerators", str(machines.accelerator_count)]
        launcher += ["--spec", staged.spec]
        if processes:
            launcher += ["--launcher", "torchrun", "--", "-m", module]
        else:
            launcher += ["--launcher", "command", "--", "python", "-m", module]
        job = self.describe(settings, machines, launcher, staged.output)
        self._submit(context, settings, machines, job, staged, output, missing, run_folder)

    def _submit(
        self,
        context: dg.AssetExecutionContext,
        settings: GoogleCloudSettings,
        machines: MachineSettings,
        job: Any,
        staged: "Staged",
        output: str,
        missing: Callable[[], list[str]] = list,
        run_folder: str | None = None,
    ) -> dg.PipesClientCompletedInvocation:
        price = hourly(settings, machines, self.client.jobs)
        saved = partial(last_saved, run_folder)
        spending = Spending(
            settings, machines.machine_type, price, machines.replicas, context.run_id, saved
        )
        limits = job_limits(settings, machines)
        if run_folder:
            limits = replace(limits, progress=partial(newest_step, run_folder))
        return _follow(context, spending, self.client, job, staged, output, missing, limits)


class VertexTrainingRunner(CloudTrainingRunner):
    """Runs them as Vertex AI custom jobs."""

    client = PipesVertexCustomJobClient
    describe = staticmethod(jobs.custom_job)

    def smoke_serving(self, context: dg.AssetExecutionContext, spec: SmokeSpec) -> dict[str, Any]:
        """Have the serve image parse its engine's arguments and answer; returns what was found."""
        settings = self._settings()
        staged = _stage_spec(settings, "serving", spec)
        job = jobs.serving_check_job(settings, staged.spec, staged.output)
        machines = jobs.serving_check_machine(settings)
        return _stats(self._submit(context, settings, machines, job, staged, staged.output))


class BatchTrainingRunner(CloudTrainingRunner):
    """Runs them on machines that Google Batch makes for each job, and deletes."""

    client = PipesGoogleBatchClient
    describe = staticmethod(jobs.batch_job)

    def check_hardware(self, placement: PlacementSettings) -> None:
        super().check_hardware(placement)
        if self._settings().training.tpu:
            raise UserError(
                "`training.runner: google_batch` has no TPUs. Set `training.machine_type` in "
                f"{self.cloud_config_path} to a machine with GPUs, or set `runner` to tpu_vm."
            )


class TpuVmTrainingRunner(CloudTrainingRunner):
    """Trains on TPU machines that queued resources make for each job; evaluates by Google Batch."""

    client = PipesTpuVmClient
    describe = staticmethod(jobs.tpu_job)

    def evaluate(self, context: dg.AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        batch = BatchTrainingRunner(cloud_config_path=self.cloud_config_path)
        return batch.evaluate(context, spec)

    def check_hardware(self, placement: PlacementSettings) -> None:
        super().check_hardware(placement)
        settings, runner = self._settings(), "`training.runner: tpu_vm`"
        machine, file = settings.training, self.cloud_config_path
        if machine.tpu is None:
            raise UserError(
                f"{runner} trains on TPUs alone, but `training.machine_type` in {file} is "
                f"{machine.machine_type}. Set it to one of {', '.join(TPU_MACHINES)}, or `runner` "
                "to google_batch."
            )
        if settings.tpu_parent is None:
            raise UserError(
                f"{runner} asks for its machine in one zone, but `training.zones` in {file} names "
                f"{len(machine.zones)}. Name one that has {machine.tpu.accelerator_type}, such as "
                f"`zones: [{settings.region}-a]`: gcloud compute tpus accelerator-types list "
                "--zone=ZONE"
            )
        if machine.strategy == "FLEX_START":
            raise UserError(
                f"{runner} asks for machines at once or for spot machines, but `training.strategy` "
                f"in {file} is FLEX_START. Set it to SPOT or STANDARD: either waits in Google's "
                "queue for `pending_hours`."
            )


def missing_of_training(spec: TrainingSpec) -> list[str]:
    """What a finished training did not leave, in order: its records, or files of its model."""
    index = files.find(f"{spec.export_folder}/{INDEX}")
    weights = set(json.loads(index)["weight_map"].values()) if index else {WEIGHTS}
    return [
        *_missing(spec.run_folder, {RESULT_NAME, SEEN_NAME, TRAINED_NAME}),
        *_missing(spec.export_folder, {"config.json", "tokenizer.json", *weights}),
    ]


def _missing(folder: str, names: set[str]) -> list[str]:
    return [f"{folder}/{name}" for name in sorted(names - files.list_sizes(folder).keys())]


def last_saved(run_folder: str | None) -> float | None:
    """When a run's newest finished checkpoint was, in seconds since the epoch."""
    if run_folder is None or (step := newest_step(run_folder)) is None:
        return None
    filesystem, path = files.resolve(f"{step_url(run_folder, step)}/{MANIFEST_NAME}")
    return float(filesystem.modified(path).timestamp())


def _read_result(folder: str) -> dict[str, Any]:
    return json.loads(files.read(f"{folder}/{RESULT_NAME}"))


def _follow(
    context: dg.AssetExecutionContext,
    spending: Spending,
    kind: type[RemoteJobPipesClient],
    job: Any,
    staged: "Staged",
    output: str,
    missing: Callable[[], list[str]],
    limits: Limits,
) -> dg.PipesClientCompletedInvocation:
    """Run a job to its end, renewing its lease; what it cost is the asset's metadata.

    A job that ran before, or reports success, counts only with all the files that it has to leave.
    """
    from dagster_gcp import GCSResource

    settings, renewed = spending.settings, float("-inf")

    def prepare() -> None:
        """Before each submission: check the budget, and remove what a failed job left."""
        spending.check_before()
        files.remove(output)

    def look(job: RemoteJob) -> str | None:
        nonlocal renewed
        # Spark batches and the check of the serve image ignore leases, but an exception for them
        # would cost more than the lease.
        if time.monotonic() - renewed > RENEWAL_SECONDS:
            renewed = time.monotonic()
            files.write(jobs.lease_of(staged.output), str(time.time()).encode())
        return spending.objection(job)

    storage = GCSResource(project=settings.project).get_client()
    reader = PipesGCSLiveMessageReader(
        bucket=settings.bucket, prefix=MESSAGES_FOLDER, client=storage
    )
    client = kind.jobs.connect(settings.region, settings.api_endpoint)
    # Cloud TPU creates its machines in a zone, all others in a region.
    parent = settings.tpu_parent if kind is PipesTpuVmClient else None
    invocation = kind(reader, client, limits=replace(limits, objection=look)).run(
        context=context,
        parent=parent or settings.parent,
        job=job,
        fingerprint=staged.fingerprint,
        accept_succeeded=lambda: not missing(),
        before_submit=prepare,
    )
    context.add_output_metadata(spending.metadata())
    if lacking := missing():
        raise UserError(
            f"The job ended well, but left no {lacking[0]}. Materialize the asset again: the job "
            "then starts again."
        )
    return invocation


def _stats(invocation: dg.PipesClientCompletedInvocation) -> dict[str, Any]:
    """What a program has returned."""
    (stats,) = [m["stats"] for m in invocation.get_custom_messages() if "stats" in m][-1:]
    return dict(stats)


class Staged(NamedTuple):
    """A spec where a job reads it."""

    fingerprint: str
    folder: str

    @property
    def spec(self) -> str:
        """The file."""
        return f"{self.folder}/spec.json"

    @property
    def output(self) -> str:
        """The folder that Google's services know as the job's."""
        return f"{self.folder}/output"


def _stage_spec(settings: GoogleCloudSettings, job: str, spec: BaseModel) -> Staged:
    fingerprint = hash_json({"job": job, "spec": spec.model_dump(mode="json")})
    staged = Staged(fingerprint, f"gs://{settings.bucket}/jobs/{job}-{fingerprint}")
    files.write(staged.spec, spec.model_dump_json(indent=2).encode())
    return staged


def job_limits(settings: GoogleCloudSettings, machines: MachineSettings | None = None) -> Limits:
    """How long a job may wait, and how often it starts again.

    Args:
        machines: of Vertex AI; a job may ask to wait for them in a queue, which is added.
    """
    queue = machines.hours_in_queue if machines else 0
    return Limits(
        pending_seconds=(settings.pending_hours + queue) * jobs.HOUR, restarts=settings.restarts
    )


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
    values: dict[str, Any] = {}

    @dg.asset(name=f"smoke_{key.rpartition('.')[2]}")
    def smallest(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        values.update(program(context, spec))
        return dg.MaterializeResult(metadata=values)

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
        if settings.endpoint.uses_vllm:
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
