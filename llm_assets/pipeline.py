"""The pipeline's settings and its view of the store, as every asset uses them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster import AssetExecutionContext, ConfigurableResource

from artifacts.store.identity import Identity
from artifacts.store.manifest import COST
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store, layout
from llm_assets.cloud import secrets
from llm_assets.cloud.config import load_cloud_settings
from llm_assets.config import PipelineSettings, load_settings

REBUILD_TAG = "llm_assets/rebuild"
"""Tag of a run: assets, by their names with commas between, that are made again unchanged."""
_ASSET_OUTPUT = "result"
"""Dagster's name of an asset's only output."""


class PipelineResource(ConfigurableResource):
    """Settings, store and the record of current artifacts."""

    config_path: str

    @property
    def settings(self) -> PipelineSettings:
        """The pipeline file's content, read afresh; raises UserError where it is wrong."""
        return load_settings(Path(self.config_path))

    @property
    def store(self) -> Store:
        """The root of all artifacts."""
        return Store(self.settings.store)

    @property
    def record(self) -> Pipeline:
        """Which artifact of each asset is current."""
        return Pipeline(self.store, self.settings.name)

    @contextmanager
    def hub_access(self) -> Iterator[None]:
        """On Google Cloud, the Hugging Face token of Secret Manager while the block runs."""
        if self.settings.platform == "local":
            yield
            return
        with secrets.hub_access(load_cloud_settings()):
            yield

    def make(
        self,
        context: AssetExecutionContext,
        identity: Identity,
        build: Callable[[Draft], None],
    ) -> Artifact:
        """Make the artifact unless it exists, and make it the asset's current one.

        Before anything is made again, the log says which setting or input differs from the current
        artifact's. What a runner reports of its cost enters the manifest.
        """

        def build_and_note(draft: Draft) -> None:
            build(draft)
            reported = context.get_output_metadata(_ASSET_OUTPUT) or {}
            if COST in reported:
                draft.provenance[COST] = reported[COST]

        record = self.record
        if identity.kind in context.run.tags.get(REBUILD_TAG, "").split(","):
            self._set_aside(context, identity)
        if record.store.find(identity) is None:
            for line in record.explain_change(identity):
                context.log.info(f"{identity.kind} is made again because of {line}")
        artifact, made = record.store.make(
            identity,
            build_and_note,
            on_wait=lambda holder: context.log.info(
                f"{identity.kind} {identity.fingerprint} is being made by {holder}; waiting for it"
            ),
        )
        if not made:
            context.log.info(f"{identity.kind} {identity.fingerprint} exists already")
        record.advance(artifact)
        context.add_output_metadata({"made_now": made})
        return artifact

    def _set_aside(self, context: AssetExecutionContext, identity: Identity) -> None:
        """Have an artifact made again although nothing changed; a training begins again too.

        One that does not exist keeps what was done for it, so that a run that failed goes on.
        """
        kind, fingerprint = identity.kind, identity.fingerprint
        if not self.store.exists(kind, fingerprint):
            return
        for place in (layout.artifact(kind, fingerprint), layout.run(fingerprint)):
            self.store.set_aside(place)
        context.log.info(
            f"{kind} {fingerprint} is made again as asked; what was there lies in "
            f"{layout.DAMAGED_FOLDER}/ until it is cleaned"
        )
