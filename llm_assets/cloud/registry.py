"""The model registry of Google Cloud: versions and aliases in Vertex AI, their story in the store.

A version of this project is an upload to the Vertex AI model named after the pipeline, with a
label that says its number; the newest upload with a number holds. What Vertex AI has no place for,
such as verdict, lineage and the card, is a document in the store, whose address is the upload's
description.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from artifacts.identity import hash_json
from artifacts.store import Store
from llm_assets.cloud.config import load_cloud_settings
from llm_assets.cloud.serving_image import container_spec
from llm_assets.cloud.vertex import Vertex, VertexRefused
from llm_assets.pipes.names import as_labels
from llm_assets.registry.base import (
    Alias,
    AliasMove,
    ModelVersion,
    Registry,
    RegistryUnreachable,
    UnknownVersion,
)
from llm_assets.registry.card import render_card
from llm_assets.registry.rules import RegistryRules
from llm_assets.resources.pipeline import PipelineResource
from llm_assets.resources.registry import RegistryResource

NUMBER_LABEL = "number"
STORE_LABEL = "store"
MODEL_LABEL = "model"
IMAGE_LABEL = "image"
VERDICT_LABEL = "verdict"
DEFAULT_ALIAS = "default"
"""What Vertex AI takes where no version is named; it goes with the champion."""
METRICS_SCHEMA = (
    "gs://google-cloud-aiplatform/schema/modelevaluation/general_text_generation_metrics_1.0.0.yaml"
)
UPLOAD_SECONDS = 1800.0
HISTORY = TypeAdapter(list[AliasMove])


class VertexModelRegistry(RegistryRules):
    """Keeps the versions of one pipeline as one model of Vertex AI."""

    def __init__(self, store: Store, pipeline: str, vertex: Vertex) -> None:
        self._store = store
        self._vertex = vertex
        self._model_id = pipeline
        self._name = f"{vertex.parent}/models/{pipeline}"
        self._folder = f"registry/{pipeline}"

    def versions(self) -> list[ModelVersion]:
        return [self._document(number) for number in sorted(self._uploads())]

    def get(self, version: int) -> ModelVersion:
        self._find(version)
        return self._document(version)

    def history(self) -> list[AliasMove]:
        """As recorded, and where the champion was moved past the record, that move too."""
        with self._reachable():
            content = self._store.read_bytes(f"{self._folder}/history.json")
            moves = HISTORY.validate_json(content) if content else []
        champion = self._pointer("champion")
        recorded = [move.version for move in moves if move.alias == "champion"][-1:]
        if champion is not None and recorded != [champion]:
            moves.append(AliasMove(alias="champion", version=champion, reason="moved in Vertex AI"))
        return moves

    def resource_name(self, version: int) -> str:
        """The upload that holds a version, as Vertex AI names it; raises UnknownVersion."""
        return self._upload_name(self._find(version))

    def _pointer(self, alias: Alias) -> int | None:
        from google.api_core.exceptions import NotFound

        with self._reachable():
            try:
                model = self._vertex.call(
                    f"a look at the {alias}",
                    self._vertex.models.get_model,
                    name=f"{self._name}@{alias}",
                )
            except NotFound:
                return None
            return self._number(model)

    def _point(self, alias: Alias, version: int, reason: str) -> None:
        moves = [*self.history(), AliasMove(alias=alias, version=version, reason=reason)]
        default = [DEFAULT_ALIAS] if alias == "champion" else []
        self._merge(self.resource_name(version), [alias, *default])
        with self._reachable():
            self._store.write_bytes(
                f"{self._folder}/history.json", HISTORY.dump_json(moves, indent=2)
            )

    def _write(self, version: ModelVersion) -> ModelVersion:
        folder = self._version_folder(version.version)
        files = {"card.md": render_card(version), "version.json": version.model_dump_json(indent=2)}
        with self._reachable():
            for name, content in files.items():
                self._store.write_bytes(f"{folder}/{name}", content.encode())
        uploads = self._uploads()
        upload = uploads.get(version.version)
        if upload is None or not self._holds(upload, version):
            name = self._upload(version, is_first=not uploads)
            if upload is not None and upload.version_aliases:
                self._merge(name, list(upload.version_aliases))
        else:
            name = self._upload_name(upload)
            if upload.labels.get(VERDICT_LABEL) != self._labels(version).get(VERDICT_LABEL):
                self._update_labels(name, version)
        self._attach_evaluation(name, version)
        return version

    def _upload(self, version: ModelVersion, is_first: bool) -> str:
        """Upload a version; returns its resource name."""
        from google.cloud import aiplatform_v1

        model = aiplatform_v1.Model(
            display_name=self._model_id,
            description=f"The versions of {self._store.root}/{self._folder}",
            version_description=f"{self._store.root}/{self._version_folder(version.version)}",
            artifact_uri=version.model_url,
            container_spec=container_spec(self._vertex.settings, version),
            labels=self._labels(version),
        )
        place = {"model_id": self._model_id} if is_first else {"parent_model": self._name}
        request = aiplatform_v1.UploadModelRequest(parent=self._vertex.parent, model=model, **place)
        with self._reachable():
            uploaded = self._vertex.change(
                f"the upload of version {version.version}",
                self._vertex.models.upload_model,
                UPLOAD_SECONDS,
                request=request,
            )
        return f"{self._name}@{uploaded.model_version_id}"

    def _holds(self, upload: Any, version: ModelVersion) -> bool:
        """Whether an upload is of this model and serving image, which Vertex AI shows to nobody."""
        wanted = self._labels(version)
        return all(upload.labels.get(name) == wanted[name] for name in (MODEL_LABEL, IMAGE_LABEL))

    def _merge(self, name: str, aliases: list[str]) -> None:
        with self._reachable():
            self._vertex.call(
                f"the move of {', '.join(aliases)}",
                self._vertex.models.merge_version_aliases,
                name=name,
                version_aliases=aliases,
            )

    def _update_labels(self, name: str, version: ModelVersion) -> None:
        from google.cloud import aiplatform_v1
        from google.protobuf.field_mask_pb2 import FieldMask

        model = aiplatform_v1.Model(name=name, labels=self._labels(version))
        with self._reachable():
            self._vertex.call(
                f"new labels of version {version.version}",
                self._vertex.models.update_model,
                model=model,
                update_mask=FieldMask(paths=["labels"]),
            )

    def _attach_evaluation(self, name: str, version: ModelVersion) -> None:
        from google.cloud import aiplatform_v1

        models, doing = self._vertex.models, f"the evaluation of version {version.version}"
        figures = finite(version.evaluation.get("metrics", {}))
        if not figures:
            return
        with self._reachable():
            if self._vertex.list_all(doing, models.list_model_evaluations, parent=name):
                return
            evaluation = aiplatform_v1.ModelEvaluation(
                display_name=f"version {version.version}",
                metrics_schema_uri=METRICS_SCHEMA,
                metrics={
                    name: by_role["candidate"]["value"]
                    for name, by_role in figures.items()
                    if by_role.get("candidate", {}).get("value") is not None
                },
                metadata={
                    "evaluation_fingerprint": version.evaluation.get("evaluation_fingerprint"),
                    "figures": figures,
                },
            )
            self._vertex.call(
                doing, models.import_model_evaluation, parent=name, model_evaluation=evaluation
            )

    def _find(self, number: int) -> Any:
        """The upload that holds a version; raises UnknownVersion, RegistryUnreachable."""
        upload = self._uploads().get(number)
        if upload is None:
            raise UnknownVersion(f"The model {self._name} has no version {number}.")
        return upload

    def _uploads(self) -> dict[int, Any]:
        """Number to the newest upload that has it; raises RegistryUnreachable."""
        from google.api_core.exceptions import NotFound

        with self._reachable():
            try:
                found = self._vertex.list_all(
                    "the list of versions",
                    self._vertex.models.list_model_versions,
                    name=self._name,
                )
            except NotFound:
                return {}
        for upload in found:
            if upload.labels.get(STORE_LABEL) != self._store_label:
                raise RegistryUnreachable(
                    f"The model {self._name} belongs to another store ({upload.version_description}"
                    f"), not to {self._store.root}. Give this pipeline another `name`, or use that "
                    "store."
                )
        by_age = sorted(found, key=lambda upload: int(upload.version_id))
        return {self._number(upload): upload for upload in by_age}

    def _document(self, number: int) -> ModelVersion:
        path = f"{self._version_folder(number)}/version.json"
        with self._reachable():
            content = self._store.read_bytes(path)
            if content is None:
                raise RegistryUnreachable(
                    f"{self._store.root}/{path} is gone, though Vertex AI has version {number}. "
                    "Restore it, or delete that version in Vertex AI."
                )
            return ModelVersion.model_validate_json(content)

    def _labels(self, version: ModelVersion) -> dict[str, str]:
        labels = {
            NUMBER_LABEL: str(version.version),
            STORE_LABEL: self._store_label,
            MODEL_LABEL: version.model_fingerprint,
            IMAGE_LABEL: hash_json({"image": self._vertex.settings.images.serve})[:16],
            "license": version.license,
        }
        if version.verdict:
            labels[VERDICT_LABEL] = "accepted" if version.verdict.accepted else "rejected"
        return as_labels(labels)

    @property
    def _store_label(self) -> str:
        return hash_json({"root": self._store.root})[:16]

    def _number(self, model: Any) -> int:
        return int(model.labels[NUMBER_LABEL])

    def _upload_name(self, upload: Any) -> str:
        return f"{self._name}@{upload.version_id}"

    def _version_folder(self, number: int) -> str:
        return f"{self._folder}/versions/{number}"

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._reachable(), self._store.lease(f"registry-{self._model_id}"):
            yield

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn what keeps the registry from being asked into an error that says so."""
        try:
            yield
        except (VertexRefused, OSError, ValidationError) as error:
            raise RegistryUnreachable(
                f"The model registry {self._name} cannot be asked: {error}\nWithout it nobody "
                "knows which model serves, so nothing was promoted."
            ) from error


def finite(value: Any) -> Any:
    """A JSON value with None for every number that is not finite, which Google takes none of."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class VertexModelRegistryResource(RegistryResource):
    """The Vertex AI Model Registry of the cloud project."""

    cloud_config_path: str
    """The cloud project's file."""

    def open(self, pipeline: PipelineResource) -> Registry:
        settings = load_cloud_settings(Path(self.cloud_config_path))
        return VertexModelRegistry(pipeline.store, pipeline.settings.name, Vertex(settings))
