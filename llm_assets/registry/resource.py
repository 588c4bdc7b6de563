"""The resources by which Dagster's runs open a registry; `status` reads one without Dagster."""

from abc import ABC, abstractmethod

import dagster as dg

from llm_assets.pipeline import PipelineResource
from llm_assets.registry.base import LocalRegistry, Registry


class RegistryResource(dg.ConfigurableResource, ABC):
    """Opens the registry of a pipeline."""

    @abstractmethod
    def open(self, pipeline: PipelineResource) -> Registry:
        """The registry that holds this pipeline's model versions."""


class LocalRegistryResource(RegistryResource):
    """A folder in the store."""

    def open(self, pipeline: PipelineResource) -> Registry:
        return LocalRegistry.of(pipeline.record)
