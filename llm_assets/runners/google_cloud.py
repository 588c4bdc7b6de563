"""The runners of Google Cloud: Spark on Dataproc Serverless, PyTorch on Vertex AI, Batch, TPUs."""

import json
import time
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import dagster as dg
from pydantic import BaseModel

from artifacts.checkpoints import newest_step, step_url
from artifacts.errors import UserError
from artifacts.model import INDEX, WEIGHTS
from artifacts.program.entry import PROBE, UPLOADED, SmokeSpec
from artifacts.storage import files
from artifacts.store.identity import hash_json
from artifacts.store.layout import MANIFEST_NAME
from llm_assets.cloud import jobs
from llm_assets.cloud.settings import (
    ACCELERATORS,
    TPU_MACHINES,
    GoogleCloudSettings,
    MachineSettings,
    TpuMachine,
    load_cloud_settings,
)
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
from spark_jobs.runtime.session import USAGE

RENEWAL_SECONDS = 60.0
STATE_BYTES = 16
"""Bytes per trained parameter: itself, its gradient and AdamW's two moments, in float32."""
FROZEN_BYTES = 4
MESSAGES_FOLDER = "pipes"
MAIN_PROGRAM = 'import runpy\n\nrunpy.run_module("{module}", run_name="__main__")\n'


@dataclass(frozen=True)
class CloudWork:
    """What a job does: a program's spec, where the job reads it, and what it has to leave."""

    settings: GoogleCloudSettings
    name: str
    """What people see in the cloud's lists of jobs."""
    spec: BaseModel
    output: str = ""
    """The folder that the program writes; by default the job's own."""
    missing: Callable[[], list[str]] = list
    """The files that it has to leave but did not."""
    run_folder: str | None = None
    """Where the program saves what has to survive an interruption."""

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same work, by which a job is found again."""
        # Machine types and images are not in it: a job that runs on others than the settings name
        # is followed, not started a second time.
        return hash_json({"job": self.name, "spec": self.spec.model_dump(mode="json")})

    @property
    def folder(self) -> str:
        """Where the bucket has what is the job's alone."""
        return f"gs://{self.settings.bucket}/jobs/{self.name}-{self.fingerprint}"

    @property
    def spec_file(self) -> str:
        """The spec, as the job reads it."""
        return f"{self.folder}/spec.json"

    @property
    def job_output(self) -> str:
        """The folder that Google's services know as the job's."""
        return f"{self.folder}/output"

    def follow(
        self,
        context: dg.AssetExecutionContext,
        kind: type[RemoteJobPipesClient],
        job: Any,
        spending: Spending,
        limits: Limits,
    ) -> dg.PipesClientCompletedInvocation:
        """Run a job to its end, renewing its lease; what it cost is the asset's metadata.

        A job that ran before, or reports success, counts only with all the files that it has to
        leave.
        """
        from dagster_gcp import GCSResource

        # The first look renews the lease at once: that of a job which is adopted may be about to
        # end.
        settings, renewed = self.settings, float("-inf")
        # At each run, also where a job is adopted: one that is started again reads it, and the
        # bucket's lifecycle rule deletes it after a month (`infrastructure/storage.tf`).
        files.write(self.spec_file, self.spec.model_dump_json(indent=2).encode())

        def prepare() -> None:
            """Before each submission: check the budget, and remove what a failed job left."""
            # First, so that nothing is deleted for a job that is not started.
            spending.check_before()
            # Otherwise files of an earlier attempt would pass for those of this one. The run's
            # folder stays: it has the checkpoints from which the work goes on.
            files.remove(self.output or self.job_output)

        def look(job: RemoteJob) -> str | None:
            nonlocal renewed
            # Spark batches and the check of the serve image ignore leases, but an exception for
            # them would cost more than the lease.
            if time.monotonic() - renewed > RENEWAL_SECONDS:
                renewed = time.monotonic()
                files.write(jobs.lease_of(self.job_output), str(time.time()).encode())
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
            fingerprint=self.fingerprint,
            accept_succeeded=lambda: not self.missing(),
            before_submit=prepare,
        )
        context.add_output_metadata(spending.metadata())
        if lacking := self.missing():
            raise UserError(
                f"The job ended well, but left no {lacking[0]}. Materialize the asset again: the "
                "job then starts again."
            )
        return invocation


class DataprocSparkRunner(SparkRunner):
    """Runs the Spark jobs as Dataproc Serverless batches."""

    cloud_config_path: str
    """The cloud project's file."""
    training: TrainingPlace = "google_cloud"
    """Where the later stages run."""

    def run(
        self, context: dg.AssetExecutionContext, job: ModuleType, spec: BaseModel
    ) -> dict[str, Any]:
        settings = load_cloud_settings(Path(self.cloud_config_path))
        output: str = vars(spec)["output"]
        # `clean` for `spark_jobs.clean.job`: people see the name in the cloud's lists of jobs.
        name = job.__name__.split(".")[1]
        work = CloudWork(
            settings, name, spec, output, lambda: [] if files.exists(output) else [output]
        )
        # A batch's main file has to lie in storage; the packages that it runs are in the image.
        main = f"{work.folder}/main.py"
        files.write(main, MAIN_PROGRAM.format(module=job.__name__).encode())
        batch = jobs.spark_batch(settings, main, ["--spec", work.spec_file])
        spending = Spending(
            settings,
            DCU,
            dcu_hourly(settings),
            first_dcus(settings),
            context.run_id,
            training=self.training,
        )
        limits = job_limits(settings)
        invocation = work.follow(context, PipesDataprocServerlessClient, batch, spending, limits)
        stats = _stats(invocation)
        context.add_output_metadata(stats.pop(USAGE, {}))
        return stats


class CloudTrainingRunner(TrainingRunner, ABC):
    """Runs training and evaluation as jobs of one of Google's services."""

    cloud_config_path: str
    """The cloud project's file."""

    client: ClassVar[type[RemoteJobPipesClient]]
    describe: ClassVar[Callable[..., Any]]
    """The service's job that runs the launcher on every machine, by settings, machines, the
    launcher's arguments and the job's output folder."""

    def train(self, context: dg.AssetExecutionContext, spec: TrainingSpec) -> TrainingResult:
        settings, spec = self._settings(), self._placed(spec)
        missing = partial(missing_of_training, spec)
        program, output = "continued_pretraining", spec.export_folder
        work = CloudWork(settings, program, spec, output, missing, spec.run_folder)
        self._run(context, work, settings.training)
        result = files.read(f"{spec.run_folder}/{RESULT_NAME}")
        return TrainingResult.model_validate_json(result)

    def evaluate(self, context: dg.AssetExecutionContext, spec: EvaluationSpec) -> dict[str, Any]:
        settings, output = self._settings(), str(spec.output)
        missing = partial(_missing, output, {RESULT_NAME, SCORES_NAME})
        work = CloudWork(settings, "evaluate", spec, output, missing)
        self._run(context, work, settings.evaluation, 0)
        return _read_result(output)

    def smoke(
        self, context: dg.AssetExecutionContext, spec: SmokeSpec, nodes: int = 1
    ) -> dict[str, Any]:
        """Run the smallest training on the evaluation's machines; returns what it found."""
        files.write(f"{spec.output}/{UPLOADED}", PROBE)
        settings, missing = self._settings(), partial(_missing, spec.output, {RESULT_NAME})
        work = CloudWork(settings, "smoke", spec, f"{spec.output}/mounted", missing)
        machines = settings.evaluation.model_copy(update={"replicas": nodes})
        # Two at least, so that processes of a single machine have to find each other, too.
        self._run(context, work, machines, max(2, nodes))
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
        # `ACCELERATORS` has no TPUs: their strategy names its own precision
        # (`TrainingRunner.resolve`).
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
        work: CloudWork,
        machines: MachineSettings,
        processes: int = 1,
    ) -> None:
        """Run a program of `recipes`, which has the work's name, as a job.

        Args:
            processes: at least so many train together if machines have no accelerators to share; 0
                for a program that is a single process.
        """
        # A launcher runs on each machine, and is told how many processes to start there.
        count = machines.processes // machines.replicas
        if machines.accelerator_count == 0 and machines.tpu is None:
            count = max(count, processes // machines.replicas)
        program = ["torchrun", "--"] if processes else ["command", "--", "python"]
        launcher = [
            *("--processes", str(count)),
            *("--accelerators", str(machines.accelerator_count)),
            *("--spec", work.spec_file),
            *("--launcher", *program, "-m", f"recipes.{work.name}"),
        ]
        job = self.describe(work.settings, machines, launcher, work.job_output)
        self._submit(context, work, machines, job)

    def _submit(
        self,
        context: dg.AssetExecutionContext,
        work: CloudWork,
        machines: MachineSettings,
        job: Any,
    ) -> dg.PipesClientCompletedInvocation:
        price = hourly(work.settings, machines, self.client.jobs)
        spending = Spending(
            work.settings,
            machines.machine_type,
            price,
            machines.replicas,
            context.run_id,
            partial(last_saved, work.run_folder),
        )
        limits = job_limits(work.settings, machines)
        if work.run_folder:
            limits = replace(limits, progress=partial(newest_step, work.run_folder))
        return work.follow(context, self.client, job, spending, limits)


class VertexTrainingRunner(CloudTrainingRunner):
    """Runs them as Vertex AI custom jobs."""

    client = PipesVertexCustomJobClient
    describe = staticmethod(jobs.custom_job)

    def smoke_serving(self, context: dg.AssetExecutionContext, spec: SmokeSpec) -> dict[str, Any]:
        """Have the serve image parse its engine's arguments and answer; returns what was found."""
        settings = self._settings()
        work = CloudWork(settings, "serving", spec)
        job = jobs.serving_check_job(settings, work.spec_file, work.job_output)
        return _stats(self._submit(context, work, jobs.serving_check_machine(settings), job))


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
    # Large models are saved in several files, which an index names.
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
    # A checkpoint's manifest is written last, so its time is when the checkpoint became valid.
    filesystem, path = files.resolve(f"{step_url(run_folder, step)}/{MANIFEST_NAME}")
    return float(filesystem.modified(path).timestamp())


def _read_result(folder: str) -> dict[str, Any]:
    return json.loads(files.read(f"{folder}/{RESULT_NAME}"))


def _stats(invocation: dg.PipesClientCompletedInvocation) -> dict[str, Any]:
    """What a program has returned."""
    # A job whose process was started again may have reported more than once.
    (stats,) = [m["stats"] for m in invocation.get_custom_messages() if "stats" in m][-1:]
    return dict(stats)


def job_limits(settings: GoogleCloudSettings, machines: MachineSettings | None = None) -> Limits:
    """How long a job may wait, and how often it starts again."""
    hours = settings.pending_hours
    if machines and machines.strategy == "FLEX_START":
        # It waits in Google's queue by its own wish, before it waits for lack of machines.
        hours += machines.max_wait_hours
    return Limits(pending_seconds=hours * jobs.HOUR, restarts=settings.restarts)
