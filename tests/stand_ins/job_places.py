"""Where a custom job's replicas are and where they write, as Vertex AI tells them."""

from google.cloud import aiplatform_v1


def cluster_of(job: aiplatform_v1.CustomJob) -> dict[str, list[str]]:
    """The `cluster` of CLUSTER_SPEC: each pool's replicas by host name and port."""
    job_id = job.name.rsplit("/", 1)[1]
    return {
        f"workerpool{number}": [
            f"cmle-training-workerpool{number}-{job_id}-{index}:2222"
            for index in range(pool.replica_count)
        ]
        for number, pool in enumerate(job.job_spec.worker_pool_specs)
        if pool.replica_count
    }


def output_folders(job: aiplatform_v1.CustomJob) -> dict[str, str]:
    """`CustomJobSpec.base_output_directory`: the variables that it sets, if it is there."""
    output = job.job_spec.base_output_directory.output_uri_prefix.rstrip("/")
    folders = {"MODEL_DIR": "model", "CHECKPOINT_DIR": "checkpoints", "TENSORBOARD_LOG_DIR": "logs"}
    return {f"AIP_{name}": f"{output}/{folder}/" for name, folder in folders.items() if output}
