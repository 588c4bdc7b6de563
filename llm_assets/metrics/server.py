"""Serves the graph's metrics on loopback."""

from dagster import DagsterInstance
from prometheus_client import CollectorRegistry, start_http_server

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.store.pipelines import Pipeline
from llm_assets.config import PipelineSettings
from llm_assets.metrics.collector import GraphCollector
from llm_assets.registry.base import Registry
from llm_assets.services.ports import HOST


def serve_metrics(
    settings: PipelineSettings, record: Pipeline, models: Registry, port: int, report: Report
) -> None:
    """Answer Prometheus until the process is ended; raises UserError where the port is taken."""
    registry = CollectorRegistry()
    registry.register(GraphCollector(settings, record, models, DagsterInstance.get, report))
    try:
        _, thread = start_http_server(port, HOST, registry)
    except OSError as error:
        raise UserError(
            f"Port {port} of {HOST} cannot be used ({error.strerror}): choose another with --port."
        ) from None
    report(f"metrics: http://{HOST}:{port}/metrics")
    thread.join()
