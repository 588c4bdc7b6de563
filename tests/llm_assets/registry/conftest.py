"""Registries of both kinds, and what is entered into them."""

from collections.abc import Callable
from typing import Any

import pytest

from artifacts.store.store import Store
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.vertex import Vertex
from llm_assets.gate.verdict import CODE_VERSION, GateSettings, Outcome, Reason, Verdict
from llm_assets.registry.base import LocalRegistry, Registry
from llm_assets.registry.state import ModelEntry, ModelVersion
from llm_assets.registry.vertex import VertexModelRegistry
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.stand_ins.project import cloud_settings


def entry(model: str, figure: float = 1.0) -> ModelEntry:
    """A model, known by the name of its weights, with an evaluation."""
    figures = {role: {"value": figure, "low": 0.5, "high": 1.5} for role in ("base", "candidate")}
    return ModelEntry(
        weights=model,
        model_fingerprint=f"artifact-of-{model}",
        model_url=f"gs://{BUCKET}/models/{model}",
        license="Apache-2.0",
        lineage={"checkpoint": model, "raw_corpus": "text"},
        evaluation={
            "evaluation_fingerprint": "evaluation",
            "models": {"candidate": model},
            "metrics": {"held_out_bits_per_byte": figures},
        },
    )


def base_entry(model: str = "base") -> ModelEntry:
    """A base model, which nothing measured."""
    return entry(model).model_copy(update={"evaluation": {}})


def verdict(
    model: str,
    against: str,
    promoted: bool = True,
    thresholds: GateSettings | None = None,
    evaluation: str = "evaluation",
    look: int = 1,
    procedure: str = "",
    outcome: Outcome | None = None,
) -> Verdict:
    """What the gate found about one model against another."""
    outcome = outcome or (Outcome.BETTER if promoted else Outcome.NOT_BETTER)
    return Verdict(
        weights=model,
        against=against,
        promoted=promoted,
        reasons=[Reason(outcome=outcome, text=f"Measured against {against}.")],
        comparisons=[],
        thresholds=thresholds or GateSettings(),
        gate_code_version=CODE_VERSION,
        evaluation_fingerprint=evaluation,
        look=look,
        procedure=procedure,
    )


def judge(registry: Registry, model: str, promoted: bool = True, **asked: Any) -> ModelVersion:
    """Enter a model with a verdict against whatever it has to beat now."""
    state = registry.state()
    against = state.incumbent_of(model).weights
    found = verdict(model, against, promoted, **asked)
    look = state.look_of(model, against, found.evaluation_fingerprint, found.thresholds)
    return registry.enter(entry(model), found.model_copy(update={"look": look}))


@pytest.fixture
def vertex_settings(google: LocalGoogle) -> GoogleCloudSettings:
    return GoogleCloudSettings.model_validate(cloud_settings(google))


@pytest.fixture
def vertex_registry(
    vertex_settings: GoogleCloudSettings, tmp_path_factory: pytest.TempPathFactory
) -> VertexModelRegistry:
    """A registry of Vertex AI, its state in the bucket."""
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
    """A registry with the base model."""
    registry = open_registry()
    registry.register_base(base_entry())
    return registry
