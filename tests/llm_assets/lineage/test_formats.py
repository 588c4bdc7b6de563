"""A version's manifests in other tools' formats, each checked by that format's own library."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from openlineage.client.event_v2 import RunEvent

from artifacts.errors import UserError
from artifacts.storage.checksums import FileEntry
from artifacts.store.manifest import Manifest
from llm_assets.lineage.bill_of_materials import bill_of_materials
from llm_assets.lineage.croissant import dataset
from llm_assets.lineage.openlineage import lineage_events
from llm_assets.registry.records import ModelVersion

SHA256 = "ab" * 32
INPUTS = {
    "raw_corpus": {"manual": "content"},
    "clean_corpus": {"raw_corpus": "f-raw_corpus"},
    "base_model": {},
    "tokenized_shards": {"clean_corpus": "f-clean_corpus", "base_model": "f-base_model"},
    "checkpoint": {"tokenized_shards": "f-tokenized_shards", "base_model": "f-base_model"},
}
FILES = {
    "clean_corpus": ["part-00000.parquet", "part-00001.parquet", "duplicates-00000.parquet"],
    "checkpoint": ["model/config.json", "model/model.safetensors", "trained.parquet"],
}


def manifest(kind: str) -> Manifest:
    return Manifest(
        kind=kind,
        fingerprint=f"f-{kind}",
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        code_version="1",
        inputs=INPUTS[kind],
        settings={},
        files=[FileEntry(path=path, bytes=9, sha256=SHA256) for path in FILES.get(kind, [])],
        stats={"documents": 3, "bytes": 99, "license": "Apache-2.0"},
    )


MANIFESTS = {kind: manifest(kind) for kind in INPUTS}
VERSION = ModelVersion(
    version=2,
    weights="0123",
    model_fingerprint="f-checkpoint",
    model_url="/nowhere",
    license="Apache-2.0",
    lineage={kind: f"f-{kind}" for kind in INPUTS},
    evaluation={"metrics": {"held_out_bits_per_byte": {"candidate": {"value": 1.25}}}},
)


@pytest.mark.parametrize("known", [list(INPUTS), ["checkpoint"], []])
def test_the_bill_of_materials_is_valid_cyclonedx(known: list[str]) -> None:
    from cyclonedx.validation.json import JsonStrictValidator  # takes each test worker 1.6 s

    bill = bill_of_materials("manual", VERSION, {kind: MANIFESTS[kind] for kind in known})
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None


def test_the_bill_has_the_model_its_files_and_what_it_was_made_of() -> None:
    bill = bill_of_materials("manual", VERSION, MANIFESTS)
    model = bill["metadata"]["component"]
    assert [file["name"] for file in model["components"]] == ["config.json", "model.safetensors"]
    assert model["components"][0]["hashes"] == [{"alg": "SHA-256", "content": SHA256}]
    assert bill["dependencies"][0]["dependsOn"] == [
        f"{kind}/f-{kind}"
        for kind in ("base_model", "tokenized_shards", "clean_corpus", "raw_corpus")
    ]
    assert "/nowhere" not in json.dumps(bill), "where it lies is nobody's business"


def test_every_artifact_is_an_event_whose_inputs_are_outputs_of_others() -> None:
    lines = list(lineage_events("manual", MANIFESTS.values()))
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert lines == list(lineage_events("manual", MANIFESTS.values())), "the same again"
    assert [event["job"]["name"] for event in events] == list(INPUTS)
    made = {
        (d["name"], d["facets"]["version"]["datasetVersion"]) for e in events for d in e["outputs"]
    }
    read = {
        (d["name"], d["facets"]["version"]["datasetVersion"]) for e in events for d in e["inputs"]
    }
    assert read - made == {("manual", "content")}
    assert all(event["schemaURL"] == RunEvent._get_schema() for event in events)


def test_the_producer_is_a_uri_that_names_no_host() -> None:
    (line,) = lineage_events("manual", [MANIFESTS["raw_corpus"]])
    event = json.loads(line)
    (output,) = event["outputs"]
    for producer in (event["producer"], output["facets"]["version"]["_producer"]):
        # RFC 8141: a name is `urn:`, a namespace and what is named in it.
        assert re.fullmatch(r"urn:[a-z0-9][a-z0-9-]{0,30}[a-z0-9]:[a-z0-9:-]+", producer)


def test_the_corpus_is_a_valid_croissant_dataset(tmp_path: Path) -> None:
    import mlcroissant

    path = tmp_path / "croissant.json"
    path.write_text(json.dumps(dataset("manual", ["CC-BY-4.0"], MANIFESTS["clean_corpus"])))
    found = mlcroissant.Dataset(jsonld=str(path))
    assert not found.metadata.ctx.issues.errors
    assert [record.name for record in found.metadata.record_sets] == [
        "documents-part-00000",
        "documents-part-00001",
    ]


def test_a_corpus_whose_files_are_not_on_record_is_refused() -> None:
    gone = MANIFESTS["clean_corpus"].model_copy(update={"files": []})
    with pytest.raises(UserError, match="it was removed, or lies in Cloud Storage"):
        dataset("manual", [], gone)
