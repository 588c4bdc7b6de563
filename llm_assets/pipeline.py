"""The pipeline's settings and its view of the store, as every asset uses them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster import AssetExecutionContext, ConfigurableResource

from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.cloud import secrets
from llm_assets.cloud.config import load_cloud_settings
from llm_assets.config import PipelineSettings, load_settings


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
        artifact's.
        """
        record = self.record
        if record.store.find(identity) is None:
            for line in record.explain_change(identity):
                context.log.info(f"{identity.kind} is made again because of {line}")
        artifact, made = record.store.make(
            identity,
            build,
            on_wait=lambda holder: context.log.info(
                f"{identity.kind} {identity.fingerprint} is being made by {holder}; waiting for it"
            ),
        )
        if not made:
            context.log.info(f"{identity.kind} {identity.fingerprint} exists already")
        record.advance(artifact)
        context.add_output_metadata({"made_now": made})
        return artifact
