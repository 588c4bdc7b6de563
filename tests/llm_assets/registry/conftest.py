"""Registries of both kinds, and what is entered into them."""

from collections.abc import Callable

import pytest

from artifacts.store import Store
from llm_assets.cloud.registry import VertexModelRegistry
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.vertex import Vertex
from llm_assets.gate.settings import GateSettings
from llm_assets.gate.verdict import Outcome, Reason, Verdict
from llm_assets.registry.base import ModelEntry, Registry
from llm_assets.registry.local import LocalRegistry
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.stand_ins.project import cloud_settings


def entry(model: str, promoted: bool | None = True, figure: float = 1.0) -> ModelEntry:
    """A model with its evaluation and verdict; `promoted` None is one that nothing judged."""
    verdict = None
    if promoted is not None:
        verdict = Verdict(
            promoted=promoted,
            reasons=[Reason(outcome=Outcome.BETTER, text="It was judged.")],
            comparisons=[],
            thresholds=GateSettings(),
            evaluation_fingerprint="evaluation",
            judged_before=0,
        )
    figures = {role: {"value": figure, "low": 0.5, "high": 1.5} for role in ("base", "candidate")}
    return ModelEntry(
        model_fingerprint=model,
        model_url=f"gs://{BUCKET}/models/{model}",
        license="Apache-2.0",
        lineage={"checkpoint": model, "raw_corpus": "text"},
        evaluation={
            "evaluation_fingerprint": "evaluation",
            "models": {"candidate": model},
            "metrics": {"held_out_bits_per_byte": figures},
        },
        verdict=verdict,
    )


@pytest.fixture
def vertex_settings(google: LocalGoogle) -> GoogleCloudSettings:
    return GoogleCloudSettings.model_validate(cloud_settings(google))


@pytest.fixture
def vertex_registry(
    vertex_settings: GoogleCloudSettings, tmp_path_factory: pytest.TempPathFactory
) -> VertexModelRegistry:
    """A registry of Vertex AI, its documents in the bucket."""
    store = Store(f"gs://{BUCKET}/{tmp_path_factory.mktemp('registry').name}")
    return VertexModelRegistry(store, "manual", Vertex(vertex_settings))


@pytest.fixture(params=["local", "vertex"])
def open_registry(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Registry]:
    """Opens the same registry as another process would."""
    if request.param == "local":
        folder = tmp_path_factory.mktemp("registry")
        return lambda: LocalRegistry(folder, "manual")
    made: VertexModelRegistry = request.getfixturevalue("vertex_registry")
    settings: GoogleCloudSettings = request.getfixturevalue("vertex_settings")
    return lambda: VertexModelRegistry(made._store, "manual", Vertex(settings))


@pytest.fixture
def registry(open_registry: Callable[[], Registry]) -> Registry:
    return open_registry()
