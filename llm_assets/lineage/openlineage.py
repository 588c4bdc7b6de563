"""The lineage of a version as OpenLineage events: https://openlineage.io, spec 2-0-2.

One event for each artifact that was made, from the raw corpus to the model. What reads such events
(Marquez, DataHub, OpenMetadata) shows the same graph as the Dagster UI.
"""

import json
import uuid
from collections.abc import Iterable, Iterator

from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import DatasetFacet, dataset_version_dataset
from openlineage.client.serde import Serde

from artifacts.store.manifest import Manifest

PRODUCER = "urn:llm-assets:lineage"
"""Who says so: a name, since the specification wants a URI and this program has no address."""


def lineage_events(pipeline: str, manifests: Iterable[Manifest]) -> Iterator[str]:
    """One event a manifest, each a line of JSON.

    Args:
        pipeline: the namespace of jobs and datasets.
        manifests: in the order of their making; an input that none of them has is named by its role
            alone.
    """
    known: dict[str, Manifest] = {}
    for manifest in manifests:
        known[manifest.fingerprint] = manifest
        event = RunEvent(
            eventTime=manifest.created_at.isoformat(),
            producer=PRODUCER,
            run=Run(runId=str(uuid.uuid5(uuid.NAMESPACE_OID, _name(manifest)))),
            job=Job(namespace=pipeline, name=manifest.kind),
            eventType=RunState.COMPLETE,
            inputs=[
                InputDataset(
                    namespace=pipeline,
                    name=known[value].kind if value in known else role,
                    facets=_version(value),
                )
                for role, value in sorted(manifest.inputs.items())
            ],
            outputs=[
                OutputDataset(
                    namespace=pipeline, name=manifest.kind, facets=_version(manifest.fingerprint)
                )
            ],
        )
        yield json.dumps(json.loads(Serde.to_json(event)), sort_keys=True)


def _version(value: str) -> dict[str, DatasetFacet]:
    facet = dataset_version_dataset.DatasetVersionDatasetFacet(
        datasetVersion=value, producer=PRODUCER
    )
    return {"version": facet}


def _name(manifest: Manifest) -> str:
    return f"{manifest.kind}/{manifest.fingerprint}"
