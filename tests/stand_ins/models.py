"""Vertex AI's model registry: models, versions, aliases, labels and imported evaluations."""

import math
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from google.cloud import aiplatform_v1

from tests.stand_ins.faults import already_exists, invalid, not_found
from tests.stand_ins.grpc_server import Operations

ALIAS = re.compile(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]")
LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
LONGEST_DEPLOYMENT = 2 * 3600
MODEL_ID = re.compile(r"[a-z_][a-z0-9_-]{0,62}")
METRICS = {
    "gs://google-cloud-aiplatform/schema/modelevaluation/"
    "general_text_generation_metrics_1.0.0.yaml": {"bleu", "rougeLSum"}
}
"""Schema to the names it knows: those of "Run a computation-based evaluation pipeline", table of
tasks and metrics, as that pipeline's import writes them."""


class VertexModels:
    """The model service of one region."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Forget all models."""
        with self._lock:
            self._versions: dict[str, dict[str, aiplatform_v1.Model]] = {}
            self._evaluations: dict[str, list[aiplatform_v1.ModelEvaluation]] = {}
            self._labels: dict[str, dict[str, str]] = {}
            """Model's name to the labels that its first upload came with."""

    def find(self, name: str) -> aiplatform_v1.Model:
        """A version by `model`, `model@version` or `model@alias`."""
        base, _, wanted = name.partition("@")
        with self._lock:
            for version_id, model in self._versions.get(base, {}).items():
                if (wanted or "default") in (version_id, *model.version_aliases):
                    return model
        raise not_found(name)

    def evaluations(self, name: str) -> list[aiplatform_v1.ModelEvaluation]:
        """What was imported about a version."""
        return self._evaluations.get(self._evaluated(name), [])

    def upload_model(self, request: aiplatform_v1.UploadModelRequest) -> Any:
        model = aiplatform_v1.Model(request.model)
        if not model.artifact_uri.startswith("gs://"):
            raise invalid(f"artifact_uri {model.artifact_uri!r} is not a Cloud Storage path.")
        if not model.container_spec.image_uri:
            raise invalid("container_spec.image_uri is required.")
        if model.container_spec.invoke_route_prefix not in ("", "/*"):
            raise invalid('container_spec.invoke_route_prefix: "/*" is the only supported value.')
        if model.container_spec.invoke_route_prefix and model.container_spec.predict_route:
            raise invalid("Only one of predict_route or invoke_route_prefix can be set.")
        if model.container_spec.deployment_timeout.total_seconds() > LONGEST_DEPLOYMENT:
            raise invalid("container_spec.deployment_timeout is two hours at most.")
        check_labels(model.labels)
        if request.parent_model:
            name = request.parent_model
            if name not in self._versions:
                raise not_found(name)
        else:
            if not MODEL_ID.fullmatch(request.model_id):
                raise invalid(f"model_id {request.model_id!r} is not valid.")
            name = f"{request.parent}/models/{request.model_id}"
            if name in self._versions:
                raise already_exists(name)
        return self._operations.run(name, lambda: self._add(name, model))

    def list_model_versions(self, request: aiplatform_v1.ListModelVersionsRequest) -> Any:
        if request.name not in self._versions:
            raise not_found(request.name)
        models = [self._shown(model) for model in self._versions[request.name].values()]
        return aiplatform_v1.ListModelVersionsResponse(models=models)

    def update_model(self, request: aiplatform_v1.UpdateModelRequest) -> Any:
        model = self.find(request.model.name)
        for path in request.update_mask.paths:
            if path not in ("labels", "version_description"):
                raise invalid(f"The field {path} cannot be updated.")
            check_labels(request.model.labels)
            setattr(model, path, getattr(request.model, path))
        return self._shown(model)

    def merge_version_aliases(self, request: aiplatform_v1.MergeVersionAliasesRequest) -> Any:
        model = self.find(request.name)
        with self._lock:
            for alias in request.version_aliases:
                if not ALIAS.fullmatch(alias.removeprefix("-")):
                    raise invalid(f"The alias {alias!r} is not valid.")
                if alias == "-default":
                    raise invalid("The default alias cannot be removed, only moved.")
                self._set_alias(model, alias)
        return self._shown(model)

    def import_model_evaluation(self, request: aiplatform_v1.ImportModelEvaluationRequest) -> Any:
        parent = self._evaluated(request.parent)
        evaluation = aiplatform_v1.ModelEvaluation(request.model_evaluation)
        names = METRICS.get(evaluation.metrics_schema_uri)
        if names is None:
            raise invalid(f"Unknown metrics_schema_uri {evaluation.metrics_schema_uri!r}.")
        if not set(evaluation.metrics or {}) <= names:
            raise invalid("Invalid Metrics Format")
        for content in (evaluation.metrics, evaluation.metadata):
            check_finite(content)
        known = self._evaluations.setdefault(parent, [])
        evaluation.name = f"{parent}/evaluations/{len(known) + 1}"
        known.append(evaluation)
        return aiplatform_v1.ModelEvaluation(evaluation)

    def list_model_evaluations(self, request: aiplatform_v1.ListModelEvaluationsRequest) -> Any:
        return aiplatform_v1.ListModelEvaluationsResponse(
            model_evaluations=self.evaluations(request.parent)
        )

    def _add(self, name: str, model: aiplatform_v1.Model) -> aiplatform_v1.UploadModelResponse:
        with self._lock:
            versions = self._versions.setdefault(name, {})
            self._labels.setdefault(name, dict(model.labels))
            model.name, model.version_id = name, str(len(versions) + 1)
            wanted = list(model.version_aliases) or ([] if versions else ["default"])
            model.version_aliases = []
            versions[model.version_id] = model
            for alias in wanted:
                self._set_alias(model, alias)
        return aiplatform_v1.UploadModelResponse(model=name, model_version_id=model.version_id)

    def _set_alias(self, model: aiplatform_v1.Model, alias: str) -> None:
        """An alias names one version: it leaves the one that had it."""
        for other in self._versions[model.name].values():
            kept = [known for known in other.version_aliases if known != alias.removeprefix("-")]
            other.version_aliases = kept
        if not alias.startswith("-"):
            model.version_aliases = [*model.version_aliases, alias]

    def _shown(self, model: aiplatform_v1.Model) -> aiplatform_v1.Model:
        """A version as callers see it: its labels are mixed with the model's, as the text on
        `UpdateModelRequest.model` says, and the container's specification is never given again."""
        copy = aiplatform_v1.Model(model)
        copy.container_spec = None
        copy.labels = {**model.labels, **self._labels[model.name]}
        return copy

    def _evaluated(self, name: str) -> str:
        model = self.find(name)
        return f"{model.name}@{model.version_id}"


def check_labels(labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise invalid(f"The label {key}={value!r} is not valid.")


def check_finite(content: Any) -> None:
    """Google's APIs take JSON, which has no word for NaN and infinity."""
    for number in _numbers(content):
        if not math.isfinite(number):
            raise invalid(f"Invalid value: {number} is no JSON number.")


def _numbers(content: Any) -> Iterator[float]:
    if isinstance(content, float):
        yield content
    elif hasattr(content, "values"):
        for item in content.values():
            yield from _numbers(item)
    elif content is not None and not isinstance(content, str | bool | int):
        for item in content:
            yield from _numbers(item)
