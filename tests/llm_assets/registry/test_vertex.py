"""The registry in Vertex AI, as others see it there, and what can go wrong with it."""

import math

import grpc
import pytest

from artifacts.store.store import Store
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.vertex import Vertex
from llm_assets.pipes.failures import RetryPolicy
from llm_assets.registry.state import RegistryUnreachable
from llm_assets.registry.vertex import VertexModelRegistry
from tests.llm_assets.registry.conftest import base_entry, entry, judge, verdict
from tests.stand_ins.google import BUCKET, SERVE_IMAGE, LocalGoogle

NAME = "projects/local-project/locations/us-central1/models/manual"


@pytest.fixture
def vertex_registry(vertex_registry: VertexModelRegistry) -> VertexModelRegistry:
    """With the base model."""
    vertex_registry.register_base(base_entry())
    return vertex_registry


def test_version_in_vertex_ai_says_what_it_is(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    vertex_registry.confirm(0)
    judge(vertex_registry, "a", promoted=False)
    assert google.models.find(f"{NAME}@2").labels["verdict"] == "rejected"
    vertex_registry.approve(1, "Ada", "reads well")
    assert google.models.find(f"{NAME}@wanted").labels["number"] == "1"
    assert google.models.find(f"{NAME}@champion").labels["number"] == "0"
    vertex_registry.confirm(1)
    model = google.models.find(f"{NAME}@champion")
    assert set(model.version_aliases) == {"wanted", "champion", "default"}
    assert model.artifact_uri == f"gs://{BUCKET}/models/a"
    assert model.container_spec.image_uri == SERVE_IMAGE
    assert model.labels["number"] == "1" and model.labels["verdict"] == "accepted"
    assert "previous" in google.models.find(f"{NAME}@1").version_aliases
    card = Store(model.version_description.partition(" ")[0]).read_bytes("card.md") or b""
    assert b"Measured against base" in card and b"approved by Ada" in card


def test_evaluation_is_imported_once_and_without_nan(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    for _ in range(2):
        judge(vertex_registry, "a", promoted=False)
    (evaluation,) = google.models.evaluations(f"{NAME}@2")
    candidate = evaluation.metadata["figures"]["held_out_bits_per_byte"]["candidate"]
    assert candidate["value"] == 1.0
    vertex_registry.enter(entry("b", figure=math.nan), verdict("b", "base", promoted=False))
    (evaluation,) = google.models.evaluations(f"{NAME}@3")
    figures = evaluation.metadata["figures"]["held_out_bits_per_byte"]
    assert figures["base"]["value"] is None and figures["base"]["low"] == 0.5


def test_run_that_died_after_the_upload_is_completed_by_the_next(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    denied = grpc.StatusCode.PERMISSION_DENIED
    google.server.faults.add("MergeVersionAliases", denied, "no right", times=1)
    with pytest.raises(RegistryUnreachable, match=r"roles/aiplatform\.user"):
        judge(vertex_registry, "a")
    assert judge(vertex_registry, "a").version == 1
    assert len(google.models.evaluations(f"{NAME}@2")) == 1
    assert google.server.faults.count("UploadModel") == 2
    assert google.models.find(f"{NAME}@wanted").labels["number"] == "1"


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("ImportModelEvaluation", grpc.StatusCode.INVALID_ARGUMENT),
        ("ImportModelEvaluation", grpc.StatusCode.PERMISSION_DENIED),
        ("ImportModelEvaluation", grpc.StatusCode.FAILED_PRECONDITION),
        ("ImportModelEvaluation", grpc.StatusCode.NOT_FOUND),
        ("ListModelEvaluations", grpc.StatusCode.NOT_FOUND),
    ],
)
def test_registration_does_not_depend_on_whether_the_evaluation_is_taken(
    google: LocalGoogle, vertex_registry: VertexModelRegistry, method: str, code: grpc.StatusCode
) -> None:
    google.server.faults.add(method, code, "Invalid Metrics Format")
    reports: list[str] = []
    vertex_registry._vertex.report = reports.append
    assert judge(vertex_registry, "a").version == 1
    assert google.models.find(f"{NAME}@wanted").labels["number"] == "1"
    assert google.models.evaluations(f"{NAME}@2") == []
    assert "Invalid Metrics Format" in reports[0] and "version 1" in reports[0]


def test_another_serving_image_is_a_new_upload_of_the_same_number(
    google: LocalGoogle,
    vertex_registry: VertexModelRegistry,
    vertex_settings: GoogleCloudSettings,
) -> None:
    vertex_registry.confirm(0)
    images = vertex_settings.images.model_copy(update={"serve": f"{SERVE_IMAGE}-2"})
    changed = vertex_settings.model_copy(update={"images": images})
    again = VertexModelRegistry(vertex_registry._store, "manual", Vertex(changed))
    assert again.resource_name(0) == f"{NAME}@2"
    assert [version.version for version in again.state().versions] == [0]
    assert google.models.find(f"{NAME}@champion").version_id == "2"


def test_numbers_are_read_although_labels_of_model_and_versions_are_mixed(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    for model in "abc":
        judge(vertex_registry, model)
    listed = vertex_registry._vertex.models.list_model_versions(name=NAME)
    assert [version.labels["number"] for version in listed] == ["0", "1", "2", "3"]
    assert vertex_registry.resource_name(3) == f"{NAME}@4"
    assert google.server.faults.count("UploadModel") == 4


def test_alias_moved_in_the_console_is_put_back_by_the_next_change(
    google: LocalGoogle, vertex_registry: VertexModelRegistry
) -> None:
    vertex_registry.confirm(0)
    judge(vertex_registry, "a")
    models = vertex_registry._vertex.models
    models.merge_version_aliases(name=f"{NAME}@2", version_aliases=["champion"])
    champion = vertex_registry.find("champion")
    assert champion is not None and champion.version == 0
    judge(vertex_registry, "b", promoted=False)
    assert google.models.find(f"{NAME}@champion").labels["number"] == "0"


def test_busy_service_is_asked_again_and_a_forbidden_one_is_unreachable(
    google: LocalGoogle, vertex_registry: VertexModelRegistry, vertex_settings: GoogleCloudSettings
) -> None:
    quick = RetryPolicy(first_delay_seconds=0.05, longest_delay_seconds=0.1)
    registry = VertexModelRegistry(
        vertex_registry._store, "another", Vertex(vertex_settings, retries=quick)
    )
    google.server.faults.add("ListModelVersions", grpc.StatusCode.UNAVAILABLE, "busy", times=2)
    assert registry.state().versions == []
    google.server.faults.add("ListModelVersions", grpc.StatusCode.PERMISSION_DENIED, "no right")
    with pytest.raises(RegistryUnreachable, match="nothing was promoted"):
        registry.find("champion")


def test_model_of_another_store_is_not_touched(
    vertex_registry: VertexModelRegistry, vertex_settings: GoogleCloudSettings
) -> None:
    other = VertexModelRegistry(Store(f"gs://{BUCKET}/other"), "manual", Vertex(vertex_settings))
    with pytest.raises(RegistryUnreachable, match="belongs to another store"):
        other.register_base(base_entry())
