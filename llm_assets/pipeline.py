"""The pipeline's settings and its view of the store, as every asset uses them."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, ConfigurableResource, InitResourceContext
from pydantic import PrivateAttr

from artifacts.libraries import changes
from artifacts.store.identity import Identity
from artifacts.store.manifest import COST
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store, layout
from llm_assets.cloud import jobs
from llm_assets.cloud.settings import load_cloud_settings
from llm_assets.config import (
    PipelineSettings,
    changed_settings,
    load_settings,
    refuse_second_file,
)
from llm_assets.launchpad import overrides

REBUILD_TAG = "llm_assets/rebuild"
"""Tag of a run: names of assets, separated by commas, that are rebuilt though nothing changed."""
JUDGED_TAG = "llm_assets/judged"
"""Tag of a run that has to end with a verdict: without enough held-out text, nothing is trained."""
_ASSET_OUTPUT = "result"
"""Dagster's name of an asset's only output."""
Comparison = Iterable[tuple[str, object, object]]
"""Some properties of an artifact: name, recorded value, and value with today's libraries."""
Compare = Callable[[Artifact], Comparison]


class PipelineResource(ConfigurableResource):
    """Settings, store and the record of current artifacts."""

    config_path: str
    _config_of_assets: Mapping[str, Mapping[str, Any]] = PrivateAttr(default={})

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Keep the config that the run has for each asset."""
        if context.run is not None:
            config: Mapping[str, Any] = context.run.run_config
            self._config_of_assets = config.get("ops", {})

    @cached_property
    def settings_of_file(self) -> PipelineSettings:
        """The pipeline file's content; raises UserError where it is wrong.

        Dagster makes a resource for each run, so each run reads the file once: a file that changes
        meanwhile cannot name an artifact by some settings and build it with others.
        """
        return load_settings(Path(self.config_path))

    @cached_property
    def settings(self) -> PipelineSettings:
        """The same with what this run's config has otherwise; raises UserError naming the key."""
        settings = self.settings_of_file
        changed: dict[str, Any] = {}
        beginning = settings.dagster_name("")
        for step, config in self._config_of_assets.items():
            values, name = config.get("config"), step.removeprefix(beginning)
            # Other assets of the code location have config of their own.
            if not step.startswith(beginning) or not isinstance(values, Mapping):
                continue
            if name in type(settings).model_fields:
                changed |= overrides(getattr(settings, name), values, name)
            else:
                changed |= overrides(settings.stages.get(name, {}), values, f"stages.{name}")
        return changed_settings(Path(self.config_path), changed) if changed else settings

    @property
    def store(self) -> Store:
        """The root of all artifacts."""
        return Store(self.settings.store)

    @property
    def record(self) -> Pipeline:
        """Which artifact of each asset is current."""
        return Pipeline(self.store, self.settings.name)

    def claim(self) -> None:
        """Note that the record is this pipeline file's; raises UserError where it is another's."""
        path = Path(self.config_path)
        refuse_second_file(path, self.settings, self.record)
        self.record.note(file=str(path.resolve()))

    def hub_access(self) -> AbstractContextManager[None]:
        """On Google Cloud, the Hugging Face token of Secret Manager while the block runs."""
        is_local = self.settings.platform == "local"
        return nullcontext() if is_local else jobs.hub_access(load_cloud_settings())

    def find(
        self, context: AssetExecutionContext, identity: Identity, compare: Compare | None
    ) -> Artifact | None:
        """The artifact of an identity, or one with the same settings and inputs from other
        libraries.

        The latter stays, with all that was made from it, if a sample of it comes out unchanged with
        the libraries installed now; the store records what was compared.
        """
        store, kind = self.store, identity.kind
        artifact = store.find(identity)
        if artifact or compare is None:
            return artifact
        others = (store.find_named(kind, name) for name in store.names(identity))
        earlier = next(filter(None, others), None)
        if earlier is None:
            return None
        # Without checksums, which are compared before a stage reads the files.
        earlier.verify(checksums=False)
        count = 0
        for name, stored, now in compare(earlier):
            count += 1
            if stored != now:
                context.log.info(f"{kind} {earlier.fingerprint}: {name} comes out otherwise now")
                return None
        changed = ", ".join(changes(earlier.manifest.libraries, identity.libraries))
        if not count:
            context.log.info(f"{kind} {earlier.fingerprint} cannot be compared ({changed})")
            return None
        store.enter(earlier, identity.libraries, sample := f"a sample of {count}")
        context.log.info(
            f"{kind} {earlier.fingerprint} stays: {sample} comes out as it did ({changed})"
        )
        return earlier

    def make(
        self,
        context: AssetExecutionContext,
        identity: Identity,
        build: Callable[[Draft], None],
        compare: Compare | None = None,
    ) -> Artifact:
        """Make the artifact unless it exists, and make it the asset's current one.

        Before anything is rebuilt, the log says which setting, input or library differs from the
        current artifact's. A runner's reported cost enters the manifest. `compare` rebuilds a
        sample with the libraries installed now; see `find`.
        """

        def build_and_note(draft: Draft) -> None:
            build(draft)
            metadata = context.get_output_metadata(_ASSET_OUTPUT) or {}
            if COST in metadata:
                draft.provenance[COST] = metadata[COST]

        record = self.record
        if identity.kind in context.run.tags.get(REBUILD_TAG, "").split(","):
            self._set_aside(context, identity)
        # This is not only for the log: `find` enters an earlier artifact that stays, and `make`
        # finds it then.
        if self.find(context, identity, compare) is None:
            for line in record.explain_change(identity):
                context.log.info(f"{identity.kind} is made again because of {line}")
        artifact, is_new = record.store.make(
            identity,
            build_and_note,
            on_wait=lambda holder: context.log.info(
                f"{identity.kind} {identity.fingerprint} is being made by {holder}; waiting for it"
            ),
        )
        if not is_new:
            context.log.info(f"{identity.kind} {artifact.fingerprint} exists already")
        elif artifact.manifest.remade:
            context.log.warning(
                f"{identity.kind} came out otherwise than before, though nothing that decides it "
                f"has changed: it is {artifact.fingerprint} from now on, not "
                f"{identity.fingerprint}, and what follows is made again"
            )
        # This is needed even if it existed: the run that made it may have been killed before this.
        record.advance(artifact)
        context.add_output_metadata({"made_now": is_new})
        return artifact

    def _set_aside(self, context: AssetExecutionContext, identity: Identity) -> None:
        """Have an artifact rebuilt although nothing changed; a training starts from its first step.

        If it does not exist, what was done for it is kept, so that a failed run continues.
        """
        artifact = self.store.find(identity)
        if artifact is None:
            return
        kind, fingerprint = identity.kind, artifact.fingerprint
        for place in (layout.artifact(kind, fingerprint), layout.run(fingerprint)):
            self.store.set_aside(place)
        context.log.info(
            f"{kind} {fingerprint} is made again as asked; what was there lies in "
            f"{layout.DAMAGED_FOLDER}/ until it is cleaned"
        )
