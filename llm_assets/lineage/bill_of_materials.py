"""A machine-learning bill of materials of a version: CycloneDX 1.6, https://cyclonedx.org/mlbom.

The model with its card and the checksums of its files, the base model, and the corpora that it was
trained on.
"""

import uuid
from collections.abc import Mapping
from typing import Any

from artifacts.store.manifest import Manifest
from llm_assets.registry.records import ModelVersion
from recipes.spec import MODEL_FOLDER

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
DATA = ("tokenized_shards", "clean_corpus", "raw_corpus")


def bill_of_materials(
    pipeline: str, version: ModelVersion, manifests: Mapping[str, Manifest]
) -> dict[str, Any]:
    """The bill as JSON values.

    Args:
        manifests: asset to manifest, of what stands behind the version.
    """
    model = _model(pipeline, version, manifests)
    data = [_data(pipeline, manifests[name]) for name in DATA if name in manifests]
    base = [_base(manifests["base_model"])] if "base_model" in manifests and data else []
    dependencies = [{"ref": model["bom-ref"], "dependsOn": [c["bom-ref"] for c in (*base, *data)]}]
    serial = uuid.uuid5(uuid.NAMESPACE_OID, f"{pipeline}/{version.weights}")
    return {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"timestamp": version.created_at.isoformat(), "component": model},
        "components": [*base, *data],
        "dependencies": dependencies,
    }


def _model(
    pipeline: str, version: ModelVersion, manifests: Mapping[str, Manifest]
) -> dict[str, Any]:
    checkpoint = manifests.get("checkpoint") or manifests.get("base_model")
    data = [{"ref": _ref(manifests[name])} for name in DATA if name in manifests]
    metrics = [
        {"type": metric, "value": f"{figures['candidate']['value']}"}
        for metric, figures in version.evaluation.get("metrics", {}).items()
        if figures.get("candidate")
    ]
    return {
        "type": "machine-learning-model",
        "bom-ref": f"model/{version.weights}",
        "name": pipeline,
        "version": str(version.version),
        **_licenses(version.license),
        "components": _files(checkpoint) if checkpoint else [],
        "modelCard": {
            "modelParameters": {"task": "text-generation", "datasets": data},
            **({"quantitativeAnalysis": {"performanceMetrics": metrics}} if metrics else {}),
        },
    }


def _files(manifest: Manifest) -> list[dict[str, Any]]:
    """The model's files with their checksums, those that the manifest knows by SHA-256."""
    folder = f"{MODEL_FOLDER}/" if manifest.kind == "checkpoint" else ""
    return [
        {
            "type": "file",
            "bom-ref": f"{_ref(manifest)}/{entry.path}",
            "name": entry.path.removeprefix(folder),
            "hashes": [{"alg": "SHA-256", "content": entry.sha256}],
        }
        for entry in manifest.files
        if entry.path.startswith(folder) and entry.sha256
    ]


def _base(manifest: Manifest) -> dict[str, Any]:
    return {
        "type": "machine-learning-model",
        "bom-ref": _ref(manifest),
        "name": "base_model",
        "version": manifest.fingerprint,
        **_licenses(str(manifest.stats.get("license", "unknown"))),
    }


def _data(pipeline: str, manifest: Manifest) -> dict[str, Any]:
    sizes = {key: manifest.stats[key] for key in ("documents", "bytes") if key in manifest.stats}
    return {
        "type": "data",
        "bom-ref": _ref(manifest),
        "name": f"{pipeline} {manifest.kind}",
        "version": manifest.fingerprint,
        "properties": [{"name": key, "value": str(value)} for key, value in sizes.items()],
    }


def _licenses(name: str) -> dict[str, Any]:
    return {} if name == "unknown" else {"licenses": [{"license": {"name": name}}]}


def _ref(manifest: Manifest) -> str:
    return f"{manifest.kind}/{manifest.fingerprint}"
