"""`llm-assets lineage`: what stands behind a version, in the formats that other tools read."""

import json
from pathlib import Path
from typing import Any

from artifacts.errors import UserError
from artifacts.progress import Report
from llm_assets.cli.session import Session
from llm_assets.lineage.bill_of_materials import bill_of_materials
from llm_assets.lineage.croissant import dataset
from llm_assets.lineage.openlineage import lineage_events
from llm_assets.registry.retired import find_manifest

BILL_NAME, DATASET_NAME, EVENTS_NAME = "bom.cdx.json", "croissant.json", "openlineage.jsonl"


def write_lineage(session: Session, number: int, folder: Path, report: Report) -> None:
    """Write a version's bill of materials, lineage events and dataset into a folder.

    Raises:
        UserError: there is no such version, or the folder cannot be written to.
    """
    version, name = session.registry.get(number), session.settings.name
    behind = {
        asset: manifest
        for asset, fingerprint in version.lineage.items()
        if (manifest := find_manifest(session.pipeline.store, asset, fingerprint))
    }
    in_order = sorted(behind.values(), key=lambda one: one.created_at)
    bill = bill_of_materials(name, version, behind)
    events = "".join(f"{event}\n" for event in lineage_events(name, in_order))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / BILL_NAME, bill, report)
        (folder / EVENTS_NAME).write_text(events)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {error.strerror}.") from None
    report(f"Wrote {folder / EVENTS_NAME}")
    if corpus := behind.get("clean_corpus"):
        try:
            raw = behind.get("raw_corpus")
            licenses = sorted(raw.stats.get("licenses", {})) if raw else []
            described = dataset(name, licenses, corpus)
        except UserError as error:
            report(f"Left out {DATASET_NAME}: {error}")
            return
        _write(folder / DATASET_NAME, described, report)


def _write(path: Path, content: dict[str, Any], report: Report) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
    report(f"Wrote {path}")
