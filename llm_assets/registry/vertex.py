"""The model registry of Google Cloud: the state in the store, versions and aliases in Vertex AI.

The state is one object of the bucket, replaced by generation. A version is an upload to the Vertex
AI model named after the pipeline; its description holds the version's number, and the newest upload
with a number counts. Aliases and labels there only show the state and are never read, because
Vertex AI mixes a version's labels with those of its model.
"""

import json
import re
from pathlib import Path
from typing import Any, get_args

from artifacts.store.identity import hash_json
from artifacts.store.store import Store
from llm_assets.cloud.jobs import container_spec
from llm_assets.cloud.settings import load_cloud_settings
from llm_assets.cloud.vertex import Vertex, VertexRefused
from llm_assets.pipeline import PipelineResource
from llm_assets.pipes.service import as_labels
from llm_assets.registry.base import Registry
from llm_assets.registry.card import CARD_NAME, render_card
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.state import Alias, ModelVersion, RegistryState, RegistryUnreachable

DEFAULT_ALIAS = "default"
METRICS_SCHEMA = (
    "gs://google-cloud-aiplatform/schema/modelevaluation/general_text_generation_metrics_1.0.0.yaml"
)
UPLOAD_SECONDS = 1800.0
NUMBER = re.compile(r"([0-9]+) of [0-9a-f]{16}")


class VertexModelRegistry(Registry):
    """Keeps the versions of one pipeline as one model of Vertex AI, its state in the store."""

    def __init__(self, store: Store, pipeline: str, vertex: Vertex) -> None:
        super().__init__(store, pipeline)
        self._vertex = vertex
        self.place = f"{vertex.parent}/models/{pipeline}"

    def resource_name(self, version: int) -> str:
        """The upload that holds a version, as Vertex AI names it, made where it is missing.

        Raises:
            UnknownVersion: there is no such version.
        """
        with self._reachable():
            return self._upload_name(self._ensure_upload(self.get(version), self._uploads()))

    def _published(self) -> set[int]:
        return set(self._uploads())

    def _publish(self, state: RegistryState, touched: list[ModelVersion]) -> None:
        uploads = self._uploads()
        missing = [version for version in state.versions if version.version not in uploads]
        # Also those that an earlier change could not upload.
        for version in {v.version: v for v in [*missing, *touched]}.values():
            located = self._locate(version)
            card = self._path(f"versions/{version.version}/{CARD_NAME}")
            self._store.write_bytes(card, render_card(state, located).encode())
            upload = self._ensure_upload(located, uploads)
            uploads[version.version] = upload
            self._update_labels(upload, version.version, self._labels(state, version))
            self._attach_evaluation(self._upload_name(upload), version)
        # Last: an alias can point only to a version that was uploaded.
        self._move_aliases(state, uploads)

    def _move_aliases(self, state: RegistryState, uploads: dict[int, Any]) -> None:
        for alias in get_args(Alias):
            version = state.find(alias)
            if version is None:
                continue
            upload = uploads[version.version]
            # Requests that name no version go to the default, which follows the champion.
            aliases = [alias, DEFAULT_ALIAS] if alias == "champion" else [alias]
            if not set(aliases) <= set(upload.version_aliases):
                self._merge(self._upload_name(upload), aliases)

    def _ensure_upload(self, version: ModelVersion, uploads: dict[int, Any]) -> Any:
        """The upload of this model and container, which Vertex AI shows to nobody."""
        from google.cloud import aiplatform_v1

        upload = uploads.get(version.version)
        if upload and upload.version_description == self._describe(version):
            return upload
        model = aiplatform_v1.Model(
            display_name=self.name,
            description=f"The versions of {self.folder}",
            version_description=self._describe(version),
            artifact_uri=version.model_url,
            container_spec=self._container(version),
        )
        # The first upload creates the model, under the pipeline's name.
        place = {"parent_model": self.place} if uploads else {"model_id": self.name}
        request = aiplatform_v1.UploadModelRequest(parent=self._vertex.parent, model=model, **place)
        new_upload = self._vertex.change(
            f"the upload of version {version.version}",
            self._vertex.models.upload_model,
            UPLOAD_SECONDS,
            request=request,
        )
        # Vertex AI moves no aliases by itself, and others find what serves by them.
        if upload is not None and upload.version_aliases:
            self._merge(f"{self.place}@{new_upload.model_version_id}", list(upload.version_aliases))
        # The operation returns only a name and a version id; callers need labels and aliases, too.
        return self._uploads()[version.version]

    def _merge(self, name: str, aliases: list[str]) -> None:
        self._vertex.call(
            f"the move of {', '.join(aliases)}",
            self._vertex.models.merge_version_aliases,
            name=name,
            version_aliases=aliases,
        )

    def _update_labels(self, upload: Any, version: int, labels: dict[str, str]) -> None:
        from google.cloud import aiplatform_v1
        from google.protobuf.field_mask_pb2 import FieldMask

        if dict(upload.labels) != labels:
            self._vertex.call(
                f"new labels of version {version}",
                self._vertex.models.update_model,
                model=aiplatform_v1.Model(name=self._upload_name(upload), labels=labels),
                update_mask=FieldMask(paths=["labels"]),
            )

    def _attach_evaluation(self, name: str, version: ModelVersion) -> None:
        """Show a version's figures in the console; what Vertex AI does not take is only reported.

        The next change of the version tries again. Vertex AI's schema for text generation has BLEU
        and ROUGE-Lsum, which nothing here measures, so the figures are metadata.
        """
        from google.api_core.exceptions import AlreadyExists, NotFound
        from google.cloud import aiplatform_v1

        models, doing = self._vertex.models, f"the evaluation of version {version.version}"
        figures = finite(version.evaluation.get("metrics", {}))
        if not figures:
            return
        evaluation = aiplatform_v1.ModelEvaluation(
            display_name=f"version {version.version}",
            metrics_schema_uri=METRICS_SCHEMA,
            metadata={
                "evaluation_fingerprint": version.evaluation.get("evaluation_fingerprint"),
                "figures": figures,
            },
        )
        try:
            if self._vertex.list_all(doing, models.list_model_evaluations, parent=name):
                return
            self._vertex.call(
                doing, models.import_model_evaluation, parent=name, model_evaluation=evaluation
            )
        except (VertexRefused, NotFound, AlreadyExists) as error:
            self._vertex.report(f"WARNING: the console will not show {doing}: {error}")

    def _uploads(self) -> dict[int, Any]:
        """Number to the newest upload that has it."""
        from google.api_core.exceptions import NotFound

        try:
            versions = self._vertex.list_all(
                "the list of versions", self._vertex.models.list_model_versions, name=self.place
            )
        except NotFound:
            return {}
        uploads = {}
        # In this order, the newest upload with a number replaces the earlier ones.
        for upload in sorted(versions, key=lambda upload: int(upload.version_id)):
            match = NUMBER.fullmatch(upload.version_description.removeprefix(self._versions))
            if match is None:
                raise RegistryUnreachable(
                    f"The model {self.place} belongs to another store ({upload.version_description}"
                    f"), not to {self._store.root}. Give this pipeline another `name`, or use that "
                    f"store. If somebody edited the description of version {upload.version_id} in "
                    "the console, restore it."
                )
            uploads[int(match[1])] = upload
        return uploads

    def _describe(self, version: ModelVersion) -> str:
        """What tells an upload from others: the version's folder, its weights and container."""
        content = {"weights": version.weights, "container": self._container(version)}
        return f"{self._versions}{version.version} of {hash_json(content)[:16]}"

    def _container(self, version: ModelVersion) -> dict[str, Any]:
        settings = self._vertex.settings
        return container_spec(settings, self.name, version.version, version.model_fingerprint)

    def _labels(self, state: RegistryState, version: ModelVersion) -> dict[str, str]:
        """Labels for people: a person's last word about the model, else the gate's."""
        labels = {"number": str(version.version), "license": version.license}
        words = [decision.approved for decision in state.decisions_of(version.weights)]
        words = words or [verdict.promoted for verdict in state.verdicts_of(version.weights)]
        if words:
            labels["verdict"] = "accepted" if words[-1] else "rejected"
        return as_labels(labels)

    @property
    def _versions(self) -> str:
        return f"{self.folder}/versions/"

    def _upload_name(self, upload: Any) -> str:
        return f"{self.place}@{upload.version_id}"

    def _faults(self) -> tuple[type[Exception], ...]:
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError

        return (*super()._faults(), VertexRefused, GoogleAPICallError, GoogleAuthError)


def finite(value: Any) -> Any:
    """A JSON value with None for every number that is not finite, since Google accepts none."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


class VertexModelRegistryResource(RegistryResource):
    """The Vertex AI Model Registry of the cloud project."""

    cloud_config_path: str
    """The cloud project's file."""

    def open(self, pipeline: PipelineResource) -> Registry:
        settings = load_cloud_settings(Path(self.cloud_config_path))
        return VertexModelRegistry(pipeline.store, pipeline.settings.name, Vertex(settings))
