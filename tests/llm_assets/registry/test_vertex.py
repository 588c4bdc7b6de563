"""The registry in Vertex AI, as others see it there, and what can go wrong with it."""

import math

import grpc
import pytest

from artifacts.store import Store
from llm_assets.cloud.registry import VertexModelRegistry
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.vertex import Vertex
from llm_assets.gate.verdict import Decision
from llm_assets.pipes.retries import RetryPolicy
from llm_assets.registry.base import RegistryUnreachable
from tests.llm_assets.registry.conftest import entry
from tests.stand_ins.google import BUCKET, SERVE_IMAGE, LocalGoogle

NAME = "projects/local-project/locations/us-central1/models/manual"


def test_version_in_vertex_ai_says_what_it_is(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    vertex_registry.register_base(entry("base", promoted=None))
    vertex_registry.register(entry("a", promoted=False))
    vertex_registry.promote(1, "approved by Ada")
    model = google.models.find(f"{NAME}@champion")
    assert set(model.version_aliases) == {"champion", "default"}
    assert model.artifact_uri == f"gs://{BUCKET}/models/a"
    assert model.container_spec.image_uri == SERVE_IMAGE
    assert model.labels["number"] == "1" and model.labels["verdict"] == "rejected"
    assert "previous" in google.models.find(f"{NAME}@1").version_aliases
    store = Store(model.version_description)
    assert b"It was judged" in (store.read_bytes("card.md") or b"")
    vertex_registry.decide(1, Decision(approved=True, name="Ada", reason="reads well"))
    assert google.models.find(f"{NAME}@champion").labels["verdict"] == "accepted"
    assert b"Approved by Ada" in (store.read_bytes("card.md") or b"")


def test_evaluation_is_imported_once_and_without_nan(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    for _ in range(2):
        vertex_registry.register(entry("a"))
    (evaluation,) = google.models.evaluations(f"{NAME}@1")
    assert dict(evaluation.metrics) == {"held_out_bits_per_byte": 1.0}
    vertex_registry.register(entry("b", figure=math.nan))
    (evaluation,) = google.models.evaluations(f"{NAME}@2")
    assert dict(evaluation.metrics) == {}
    figures = evaluation.metadata["figures"]["held_out_bits_per_byte"]
    assert figures["base"]["value"] is None and figures["base"]["low"] == 0.5


def test_run_that_died_after_the_upload_is_completed_by_the_next(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    denied = grpc.StatusCode.PERMISSION_DENIED
    google.server.faults.add("ImportModelEvaluation", denied, "no right", times=1)
    with pytest.raises(RegistryUnreachable, match=r"roles/aiplatform\.user"):
        vertex_registry.register(entry("a"))
    assert vertex_registry.register(entry("a")).version == 1
    assert len(google.models.evaluations(f"{NAME}@1")) == 1
    assert google.server.faults.count("UploadModel") == 1


def test_another_serving_image_or_base_model_is_a_new_upload_of_the_same_number(
    google: LocalGoogle,
    vertex_registry: VertexModelRegistry,
    vertex_settings: GoogleCloudSettings,
) -> None:
    vertex_registry.register_base(entry("base", promoted=None))
    images = vertex_settings.images.model_copy(update={"serve": f"{SERVE_IMAGE}-2"})
    changed = vertex_settings.model_copy(update={"images": images})
    again = VertexModelRegistry(vertex_registry._store, "manual", Vertex(changed))
    again.register_base(entry("base", promoted=None))
    assert [version.version for version in again.versions()] == [0]
    assert again.resource_name(0) == f"{NAME}@2"
    assert google.models.find(f"{NAME}@champion").version_id == "2"


def test_champion_moved_in_the_console_counts_and_is_in_the_history(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    vertex_registry.register_base(entry("base", promoted=None))
    vertex_registry.register(entry("a"))
    models = vertex_registry._vertex.models
    models.merge_version_aliases(name=f"{NAME}@2", version_aliases=["champion"])
    champion = vertex_registry.find("champion")
    assert champion is not None and champion.version == 1
    assert [(move.version, move.reason) for move in vertex_registry.history()][-1] == (
        1,
        "moved in Vertex AI",
    )


def test_busy_service_is_asked_again_and_a_forbidden_one_is_unreachable(
    google: LocalGoogle, vertex_registry: VertexModelRegistry, vertex_settings: GoogleCloudSettings
) -> None:
    quick = RetryPolicy(first_delay_seconds=0.05, longest_delay_seconds=0.1)
    registry = VertexModelRegistry(
        vertex_registry._store, "manual", Vertex(vertex_settings, retries=quick)
    )
    google.server.faults.add("ListModelVersions", grpc.StatusCode.UNAVAILABLE, "busy", times=2)
    assert registry.versions() == []
    google.server.faults.add("GetModel", grpc.StatusCode.PERMISSION_DENIED, "no right")
    with pytest.raises(RegistryUnreachable, match="nothing was promoted"):
        registry.find("champion")


def test_model_of_another_store_is_not_touched(
    vertex_registry: VertexModelRegistry, vertex_settings: GoogleCloudSettings
) -> None:
    vertex_registry.register(entry("a"))
    other = VertexModelRegistry(Store(f"gs://{BUCKET}/other"), "manual", Vertex(vertex_settings))
    with pytest.raises(RegistryUnreachable, match="belongs to another store"):
        other.register(entry("b"))
