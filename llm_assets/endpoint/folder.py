"""Where the local endpoint keeps its state; no Dagster here."""

from pathlib import Path

from artifacts.store.store import Store, layout
from llm_assets.config import PipelineSettings


def endpoint_folder(settings: PipelineSettings) -> Path:
    """Where the local endpoint keeps its state and its log."""
    store = Store(settings.store)
    return store.local_path(store.root) / layout.endpoint(settings.name)
