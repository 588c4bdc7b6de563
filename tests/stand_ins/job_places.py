"""Where a custom job's replicas are and where they write, as Vertex AI tells them."""

from typing import Any

from google.cloud import aiplatform_v1


def cluster_spec(job: aiplatform_v1.CustomJob, pool: int, index: int) -> dict[str, Any]:
    """CLUSTER_SPEC of one replica: all replicas by host name and port, and which of them it is."""
    job_id = job.name.rsplit("/", 1)[1]
    cluster = {
        f"workerpool{number}": [
            f"cmle-training-workerpool{number}-{job_id}-{replica}:2222"
            for replica in range(spec.replica_count)
        ]
        for number, spec in enumerate(job.job_spec.worker_pool_specs)
        if spec.replica_count
    }
    task = {"type": f"workerpool{pool}", "index": index}
    return {"cluster": cluster, "environment": "cloud", "task": task}


def output_folders(job: aiplatform_v1.CustomJob) -> dict[str, str]:
    """`CustomJobSpec.base_output_directory`: the variables that it sets, if it is there."""
    output = job.job_spec.base_output_directory.output_uri_prefix.rstrip("/")
    folders = {"MODEL_DIR": "model", "CHECKPOINT_DIR": "checkpoints", "TENSORBOARD_LOG_DIR": "logs"}
    return {f"AIP_{name}": f"{output}/{folder}/" for name, folder in folders.items() if output}
