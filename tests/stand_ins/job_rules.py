"""What the services refuse before they make a job; each rule says where it is written."""

import re
from collections.abc import Mapping

from google.cloud import aiplatform_v1, batch_v1, dataproc_v1, tpu_v2

from tests.stand_ins.faults import invalid

LONGEST_SECONDS = 7 * 24 * 3600
"""`Scheduling.timeout`: seven days (quotas page, "Limits for custom training")."""
MOST_VARIABLES = 100
"""`ContainerSpec.env`: "Maximum limit is 100"."""
DISKS = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
"""`DiskSpec.boot_disk_type`."""
HYPERDISK_ONLY = ("a3-ultragpu-", "a4-", "a4x-", "g4-", "c4-", "c4d-", "n4-", "n4d-")
"""Machine families whose boot disk is a hyperdisk: "for A3U machines ... hyperdisk-balanced"; of
the others Compute Engine says "[pd-ssd, n4-standard-2] features are not compatible"."""
ATTACHED = {
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    **{f"g2-standard-{cores}": ("NVIDIA_L4", 1) for cores in (4, 8, 12, 16, 32)},
    **{f"g2-standard-{12 * n}": ("NVIDIA_L4", n) for n in (2, 4, 8)},
    **{f"g4-standard-{48 * n}": ("NVIDIA_RTX_PRO_6000", n) for n in (1, 2, 4, 8)},
}
"""Machines that come with their accelerators, whose kind and number must be given (page "Configure
compute resources for training", table of machine types)."""

WITH_ACCELERATORS = ("a2-", "a3-", "a4-", "a4x-", "g2-", "g4-")
TOPOLOGIES = {
    **{"ct5lp-hightpu-1t": "1x1", "ct5lp-hightpu-4t": "2x2", "ct5lp-hightpu-8t": "2x4"},
    **{"ct6e-standard-1t": "1x1", "ct6e-standard-4t": "2x2", "ct6e-standard-8t": "2x4"},
}
"""TPUs on one machine, whose type says what it has; `MachineSpec.tpu_topology` is GKE's."""
BATCH_ID = re.compile(r"[a-z0-9-]{4,63}")
"""`CreateBatchRequest.batch_id`."""
RFC_1035 = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""`Batch.labels`: keys, and values where they are not empty; at most 32 of them."""
MOST_LABELS = 32
RUNTIMES = re.compile(r"(2\.3|3\.0)(\.\d+)?")
"""Page "Serverless for Apache Spark runtime versions"; 2.2 had support until September 2026."""
PROPERTIES = {
    r"spark\.(driver|executor)\.cores": r"4|8|16",
    r"spark\.executor\.instances": r"[2-9]|[1-9]\d{1,2}|1\d{3}|2000",
    r"spark\.dynamicAllocation\.(min|max)Executors": r"[2-9]|[1-9]\d{1,2}|1\d{3}|2000",
    r"spark\.dynamicAllocation\.initialExecutors": r"[2-9]|[1-9]\d|[1-4]\d{2}|500",
    r"spark\.dynamicAllocation\.executorAllocationRatio": r"0?\.\d+|1(\.0*)?|0(\.0*)?",
    r"spark\.(driver|executor)\.memory(Overhead)?": r"\d+[mgt]",
    r"spark\.dataproc\.(driver|executor)\.(compute|disk)\.tier": r"standard|premium",
}
"""Page "Spark properties", table of resource allocation: name to the values that it may have."""
UNSUPPORTED = re.compile(r"spark\.(master|yarn\..*|shuffle\.service\..*)")
"""The same page: "does not support YARN-related and shuffle-related Spark properties"."""
TIME_TO_LIVE_SECONDS = (600, 14 * 24 * 3600)
"""`ExecutionConfig.ttl`: 10 minutes to 14 days."""


def check_batch(batch_id: str, batch: dataproc_v1.Batch) -> None:
    """Raise INVALID_ARGUMENT as Dataproc Serverless would."""
    if not BATCH_ID.fullmatch(batch_id):
        _refuse(f"batch_id {batch_id!r} does not match {BATCH_ID.pattern}.")
    if not RUNTIMES.fullmatch(batch.runtime_config.version):
        _refuse(f"Runtime version {batch.runtime_config.version!r} is not supported.")
    texts = [*batch.labels, *filter(None, batch.labels.values())]
    for text in texts:
        if not RFC_1035.fullmatch(text):
            _refuse(f"The label {text!r} does not conform to RFC 1035.")
    if len(batch.labels) > MOST_LABELS:
        _refuse(f"A batch has at most {MOST_LABELS} labels.")
    for name, value in batch.runtime_config.properties.items():
        allowed = [values for known, values in PROPERTIES.items() if re.fullmatch(known, name)]
        if UNSUPPORTED.fullmatch(name) or (allowed and not re.fullmatch(allowed[0], value)):
            _refuse(f"Spark property {name}={value!r} is not supported.")
    seconds = batch.environment_config.execution_config.ttl.total_seconds()
    shortest, longest = TIME_TO_LIVE_SECONDS
    if seconds and not shortest <= seconds <= longest:
        _refuse(f"ttl has to be between {shortest} s and {longest} s.")


def batch_cores(batch: dataproc_v1.Batch) -> int:
    """Processors that a batch begins with: page "Spark properties", defaults of its table."""
    given = batch.runtime_config.properties
    executors = given.get("spark.dynamicAllocation.minExecutors", 2)
    cores = int(given.get("spark.executor.cores", 4))
    return int(given.get("spark.driver.cores", 4)) + int(executors) * cores


def check_job(job: aiplatform_v1.CustomJob) -> None:
    """Raise INVALID_ARGUMENT as Vertex AI would."""
    spec = job.job_spec
    if not spec.worker_pool_specs:
        _refuse("job_spec.worker_pool_specs is required")
    if spec.worker_pool_specs[0].replica_count != 1:
        # Page "Distributed training": the first pool is the primary replica, and there is one.
        _refuse("The first worker pool must have replica_count 1.")
    for pool in spec.worker_pool_specs:
        _check_pool(pool)
    if spec.scheduling.timeout.total_seconds() > LONGEST_SECONDS:
        _refuse("scheduling.timeout must be at most 604800s.")
    if spec.tensorboard and not (
        spec.service_account and spec.base_output_directory.output_uri_prefix
    ):
        # Page "Use Vertex AI TensorBoard with custom training": both are required.
        _refuse("tensorboard needs service_account and base_output_directory.")
    if spec.scheduling.strategy == aiplatform_v1.Scheduling.Strategy.FLEX_START:
        machines = {str(pool.machine_spec) for pool in spec.worker_pool_specs}
        if len(machines) > 1:
            # Page "Schedule training jobs based on resource availability", requirements.
            _refuse("FLEX_START needs the same machine configuration for all worker pools.")


def check_machine(machine: aiplatform_v1.MachineSpec) -> None:
    """Raise INVALID_ARGUMENT for a machine that does not have such accelerators."""
    attached = ATTACHED.get(machine.machine_type)
    given = (machine.accelerator_type.name, machine.accelerator_count)
    if attached and given != attached:
        _refuse(f"Machine type {machine.machine_type} needs {attached[1]} of {attached[0]}.")
    if given[1] and not attached and not machine.machine_type.startswith("n1-"):
        _refuse(f"Machine type {machine.machine_type} does not support {given[0]}.")
    if machine.tpu_topology != TOPOLOGIES.get(machine.machine_type, ""):
        _refuse(f"tpu_topology {machine.tpu_topology!r} is not {machine.machine_type}'s.")
    if machine.machine_type in TOPOLOGIES and given[1]:
        _refuse(f"Machine type {machine.machine_type} has its TPUs; it takes no accelerator.")
    if machine.machine_type.startswith(WITH_ACCELERATORS) and not given[1]:
        _refuse(f"Machine type {machine.machine_type} needs its accelerators named.")


def _check_pool(pool: aiplatform_v1.WorkerPoolSpec) -> None:
    machine, disk = pool.machine_spec, pool.disk_spec.boot_disk_type
    check_machine(machine)
    if disk and disk not in DISKS:
        _refuse(f"boot_disk_type {disk} is not one of {', '.join(DISKS)}.")
    if disk and machine.machine_type.startswith(HYPERDISK_ONLY) and disk != "hyperdisk-balanced":
        _refuse(f"Machine type {machine.machine_type} does not support boot disk type {disk}.")
    names = [variable.name for variable in pool.container_spec.env]
    if len(names) > MOST_VARIABLES:
        _refuse(f"container_spec.env has {len(names)} variables; the limit is {MOST_VARIABLES}.")


def _refuse(message: str) -> None:
    raise invalid(message)


JOB_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""`CreateJobRequest.job_id`."""
LABEL = re.compile(r"[a-z0-9_-]{0,63}")
"""Page "Organize resources using labels"."""
MOUNTS = "/mnt/disks/"
"""Page "Create and run a job that uses storage volumes": on Container-Optimized OS."""


def check_machines_job(request: batch_v1.CreateJobRequest) -> None:
    """Raise INVALID_ARGUMENT as Google Batch would."""
    job, region = request.job, request.parent.split("/")[3]
    if not JOB_ID.fullmatch(request.job_id):
        _refuse(f"job_id {request.job_id!r} does not match {JOB_ID.pattern}.")
    _check_labels(job.labels)
    if len(job.task_groups) != 1:
        _refuse("A job has one task group.")
    (group,) = job.task_groups
    if group.parallelism and group.parallelism > max(1, group.task_count):
        _refuse("parallelism must not be larger than task_count.")
    for place in job.allocation_policy.location.allowed_locations:
        kind, _, name = place.partition("/")
        of_region = name if kind == "regions" else name.rpartition("-")[0]
        if kind not in ("regions", "zones") or of_region != region:
            _refuse(f"allowed_locations: {place} is not in the job's region {region}.")
    _check_task(group.task_spec)
    for instance in job.allocation_policy.instances:
        _check_instance(instance)


def _check_labels(labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        if not LABEL.fullmatch(key) or not LABEL.fullmatch(value) or key.startswith("goog"):
            _refuse(f"The label {key}={value} is not valid.")


def _check_task(task: batch_v1.TaskSpec) -> None:
    if not task.runnables:
        _refuse("task_spec.runnables is required.")
    if not 0 <= task.max_retry_count <= 10:
        _refuse("max_retry_count is not in between 0 and 10.")
    bound = {bind.split(":")[0] for r in task.runnables for bind in r.container.volumes}
    for volume in task.volumes:
        if not volume.mount_path.startswith(MOUNTS):
            _refuse(f"mount_path {volume.mount_path} is not under {MOUNTS}.")
        if bound and volume.mount_path not in bound:
            # `Container.volumes`: given ones take the place of those of the task.
            _refuse(f"No container has the volume {volume.mount_path}.")


def _check_instance(instance: batch_v1.AllocationPolicy.InstancePolicyOrTemplate) -> None:
    policy = instance.policy
    attached = ATTACHED.get(policy.machine_type)
    if policy.accelerators and not policy.machine_type.startswith("n1-") and not attached:
        _refuse(f"Machine type {policy.machine_type} takes no accelerators.")
    for given in policy.accelerators:
        if not re.fullmatch(r"nvidia-[a-z0-9-]+", given.type_):
            _refuse(f"Invalid accelerator type {given.type_}.")
    if instance.install_gpu_drivers and not (attached or policy.accelerators):
        _refuse("install_gpu_drivers needs accelerators.")
    if policy.boot_disk.type_ not in ("", "pd-balanced", *DISKS):
        _refuse(f"Invalid disk type {policy.boot_disk.type_}.")
    features = f"[{policy.boot_disk.type_}, {policy.machine_type}]"
    if policy.machine_type.startswith(HYPERDISK_ONLY) and "hyperdisk" not in features:
        _refuse(f"{features} features are not compatible for creating instance.")


RESOURCE_ID = re.compile(r"[A-Za-z0-9_.~+%-]+")
"""`CreateQueuedResourceRequest.queued_resource_id`, and a node's."""
ZONE = re.compile(r"projects/[^/]+/locations/[a-z]+-[a-z]+[0-9]+-[a-z]")
TPU_MACHINES = {
    **{f"v5litepod-{chips}": "v2-alpha-tpuv5-lite" for chips in (1, 4, 8, 16, 32, 64)},
    **{f"v6e-{chips}": "v2-alpha-tpuv6e" for chips in (1, 4, 8, 16, 32, 64)},
}
"""Pages "TPU v5e" and "TPU v6e", and what its machines boot with (page "TPU software versions")."""
RESERVATION = re.compile(ZONE.pattern + r"/reservations/[^/]+")
"""`QueuedResource.reservation_name`."""
LONGEST_METADATA = 256 * 1024
"""Page "Set and query custom metadata": bytes of one value."""


def check_queued_resource(request: tpu_v2.CreateQueuedResourceRequest) -> None:
    """Raise INVALID_ARGUMENT as Cloud TPU would."""
    resource = request.queued_resource
    if not ZONE.fullmatch(request.parent):
        _refuse(f"{request.parent} is not a zone.")
    if not RESOURCE_ID.fullmatch(request.queued_resource_id):
        _refuse(f"queued_resource_id {request.queued_resource_id!r} is not valid.")
    if len(resource.tpu.node_spec) != 1:
        _refuse("A request has one node_spec.")
    (spec,) = resource.tpu.node_spec
    if spec.parent != request.parent or not RESOURCE_ID.fullmatch(spec.node_id):
        _refuse(f"node_spec: {spec.parent} {spec.node_id} is not a node of {request.parent}.")
    if TPU_MACHINES.get(spec.node.accelerator_type) != spec.node.runtime_version:
        _refuse(f"{spec.node.accelerator_type} does not boot with {spec.node.runtime_version!r}.")
    _check_labels(spec.node.labels)
    if (name := resource.reservation_name) and not RESERVATION.fullmatch(name):
        _refuse(f"reservation_name {name} is not one of a zone.")
    if any(len(value.encode()) > LONGEST_METADATA for value in spec.node.metadata.values()):
        _refuse("A value of metadata is longer than 256 KB.")
