"""Which text, which code and which checkpoint stand behind a version."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.shards import SPLITS, Shard, ShardSet, ShardStats
from artifacts.store import Artifact, Store
from llm_assets.commands.session import Session
from llm_assets.registry.base import ModelVersion

STEPS = ("eval_metrics", "checkpoint", "tokenized_shards", "clean_corpus", "raw_corpus")


def explain(session: Session, version: int) -> Iterator[str]:
    """Lines that lead from a version down to the source text; raises UnknownVersion."""
    found = session.registry.get(version)
    yield f"version {found.version}, registered {found.created_at:%Y-%m-%d %H:%M} UTC"
    yield f"  model     {found.model_url}"
    yield f"  licence   {found.license}"
    if found.verdict:
        word = "accepted" if found.verdict.accepted else "rejected"
        yield f"  verdict   {word}. {found.verdict.summary}"
        for decision in found.verdict.decisions:
            said = "approved" if decision.approved else "rejected"
            yield f"  decision  {said} by {decision.name}: {decision.reason}"
    for artifact in artifacts_of(session.pipeline.store, found):
        yield from _describe(artifact)


def artifacts_of(store: Store, version: ModelVersion) -> Iterator[Artifact]:
    """The artifacts behind a version that the store still holds, from evaluation to raw text."""
    for asset in STEPS:
        fingerprint = version.lineage.get(asset)
        if fingerprint and store.exists(asset, fingerprint):
            yield store.load(asset, fingerprint)


def find_text(session: Session, version: int, text: str) -> Iterator[str]:
    """Lines that say which documents hold a piece of text and which rows trained on them."""
    lineage = session.registry.get(version).lineage
    store = session.pipeline.store
    shards = store.load("tokenized_shards", lineage["tokenized_shards"])
    clean = store.load("clean_corpus", lineage["clean_corpus"])
    identifiers = documents_holding(clean.path, text)
    if not identifiers:
        yield "No document of the clean corpus holds this text."
    stats = ShardStats.model_validate(shards.stats)
    present = {entry.split for entry in stats.shards if entry.rows}
    for split in SPLITS:
        for shard in ShardSet(shards.path, stats, split).shards if split in present else ():
            for identifier, rows in rows_of(shard, identifiers).items():
                yield f"{identifier}: {split}, shard {shard.entry.name}, rows {_ranges(rows)}"


def documents_holding(folder: Path, text: str) -> set[str]:
    """Ids of the clean documents that contain a text."""
    found: set[str] = set()
    for path in sorted(folder.glob("part-*.parquet")):
        table = pq.read_table(path, columns=["id", "text"])
        found |= set(table.filter(pc.match_substring(table["text"], text))["id"].to_pylist())
    return found


def rows_of(shard: Shard, identifiers: set[str]) -> dict[str, list[int]]:
    """Document id to the rows of a shard that hold a part of it."""
    names = shard.documents()["id"].to_pylist()
    wanted = {number: name for number, name in enumerate(names) if name in identifiers}
    rows: dict[str, list[int]] = {}
    if wanted:
        for row in range(shard.entry.rows):
            for document in shard.row(row)[1]["document"]:
                if int(document) in wanted:
                    rows.setdefault(wanted[int(document)], []).append(row)
    return rows


def _describe(artifact: Artifact) -> Iterator[str]:
    manifest = artifact.manifest
    yield f"{manifest.kind} {manifest.fingerprint}, made {manifest.created_at:%Y-%m-%d %H:%M} UTC"
    yield f"  folder    {artifact.url}"
    revision = manifest.provenance.get("revision", "unknown")
    yield f"  code      version {manifest.code_version}, revision {revision}"
    for name, fingerprint in manifest.inputs.items():
        yield f"  input     {name} {fingerprint}"
    for name, value in manifest.settings.items():
        yield f"  setting   {name}: {value}"


def _ranges(rows: list[int]) -> str:
    """`3, 7-9` for the rows 3, 7, 8 and 9."""
    ranges: list[list[int]] = []
    for row in sorted(set(rows)):
        if ranges and row == ranges[-1][1] + 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)
