"""Dagster Pipes clients for Dataproc Serverless, Vertex AI, Google Batch and TPUs, for any project.

Of the rest of the project this package imports `artifacts.errors` and `artifacts.reasons` alone.
Each client starts a job, streams its messages into the run, finds the job again when the run died,
and cancels it when the run is cancelled. `RemoteJobPipesClient` has an example.
"""

from llm_assets.pipes.dataproc_serverless import PipesDataprocServerlessClient
from llm_assets.pipes.failures import RemoteJobFailed, RetryPolicy
from llm_assets.pipes.google_batch import PipesGoogleBatchClient
from llm_assets.pipes.messages import PipesGCSLiveMessageReader
from llm_assets.pipes.service import Limits
from llm_assets.pipes.tpu_vm import PipesTpuVmClient
from llm_assets.pipes.vertex_custom_job import PipesVertexCustomJobClient

__all__ = [
    "Limits",
    "PipesDataprocServerlessClient",
    "PipesGCSLiveMessageReader",
    "PipesGoogleBatchClient",
    "PipesTpuVmClient",
    "PipesVertexCustomJobClient",
    "RemoteJobFailed",
    "RetryPolicy",
]
