"""Forgotten texts out of what was made before: snapshots, corpora, shards, evaluations, caches.

An artifact keeps its name, its other documents and their order; of a forgotten one stay its id and
the hash of its text. So runs can still be made once more over the same rows.
"""

import io
import json
import shutil
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.progress import Report
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_files import ShardFiles
from artifacts.shards.shard_set import Shard
from artifacts.storage import files
from artifacts.storage.machine import cache_folder
from artifacts.store import layout
from artifacts.store.pipelines import Pipeline
from artifacts.store.rewrite import find_rewritable, rewrite
from artifacts.store.store import Artifact
from llm_assets.forgetting.listed import ForgottenList
from llm_assets.registry.state import RegistryState
from recipes.evaluation.settings import SAMPLES_NAME
from spark_jobs.clean.decide.duplicates import find_duplicates
from spark_jobs.clean.history import read_history
from spark_jobs.runtime.pinned.parts import parts_of
from spark_jobs.runtime.raw_parts import find_pinned

REASON = "texts were forgotten"


def erase(record: Pipeline, state: RegistryState, listed: ForgottenList, report: Report) -> None:
    """Take the texts of a pipeline's list out of all that it made, and drop the caches.

    Killed and called again, it goes on. What was adopted from elsewhere is not ours to change: it
    is named.

    Raises:
        DamagedArtifact: a manifest or a file cannot be read.
    """
    ids = {one.id for one in listed.documents}
    raw_ids: dict[str, set[str]] = {}
    for corpus in _made(record, state, "clean_corpus"):
        found = ids | _ids_of(corpus, ids, set(listed.texts))
        raw_ids.setdefault(corpus.manifest.inputs.get("raw_corpus", ""), set()).update(found)
        _rewrite(corpus, _without_rows(corpus, found), _without_examples(corpus, found), report)
    for raw in _made(record, state, "raw_corpus"):
        gone = ids | raw_ids.get(raw.fingerprint, set())
        _rewrite(raw, _without_rows(raw, gone), raw.stats, report)
        for url in _pinned_with(raw, gone):
            report(
                f"{url}, which raw_corpus {raw.fingerprint} pins, is not ours to change: take the "
                "text out there."
            )
    for shards in _made(record, state, "tokenized_shards"):
        erased = sorted({*shards.stats.get("erased", []), *_held(shards, listed.texts)})
        stats = shards.stats | ({"erased": erased} if erased else {})
        _rewrite(shards, _without_tokens(shards, erased), stats, report)
    for evaluation in _made(record, state, "eval_metrics"):
        _rewrite(evaluation, _without_samples(evaluation, ids), evaluation.stats, report)
    _drop_caches(record)
    report("The caches were emptied; what they held is made again when it is needed.")


def find_holders(record: Pipeline, state: RegistryState, listed: ForgottenList) -> list[str]:
    """What a pipeline has made and that still holds a text of a list, as `kind/fingerprint`."""
    ids, texts = {one.id for one in listed.documents}, set(listed.texts)
    contents: dict[str, Callable[[Artifact], Iterator[tuple[str, bytes]]]] = {
        "raw_corpus": lambda raw: _without_rows(raw, ids),
        "clean_corpus": lambda clean: _without_rows(clean, ids | _ids_of(clean, ids, texts)),
        "tokenized_shards": lambda shards: _without_tokens(shards, texts),
    }
    found = []
    for kind, without in contents.items():
        for artifact in _made(record, state, kind):
            if next(without(artifact), None) or (
                kind == "raw_corpus" and next(_pinned_with(artifact, ids), None)
            ):
                found.append(f"{kind}/{artifact.fingerprint}")
    return found


def _made(record: Pipeline, state: RegistryState, kind: str) -> Iterator[Artifact]:
    """What the pipeline has made of a kind, as far as it is still there."""
    versions = (version.lineage.get(kind) for version in state.versions)
    for fingerprint in dict.fromkeys([*record.known(kind), *filter(None, versions)]):
        artifact = find_rewritable(record.store, kind, fingerprint)
        if artifact:
            yield artifact


def _rewrite(
    artifact: Artifact,
    contents: Iterator[tuple[str, bytes]],
    stats: dict[str, Any],
    report: Report,
) -> None:
    name = f"{artifact.manifest.kind} {artifact.fingerprint}"
    if artifact.manifest.location:
        if next(contents, None):
            report(f"{name} lies in {artifact.url}, made elsewhere: take the text out there.")
        return
    written = rewrite(artifact, contents, stats, REASON)
    if written:
        report(f"{name}: {len(written):,} files written again without it.")


def _ids_of(corpus: Artifact, ids: Collection[str], texts: Collection[str]) -> set[str]:
    """Ids of a clean corpus that have the texts, and of the copies that were dropped for them."""
    found: set[str] = set()
    history = read_history(corpus.url)
    if history:
        same = pc.is_in(history.documents["text_hash"], pa.array(sorted(texts), pa.string()))
        found.update(history.documents.filter(same)["id"].to_pylist())
    survivors = pa.array(sorted(found | set(ids)), pa.string())
    copies = find_duplicates(corpus.url, "survivor", survivors)
    return found | set(copies["id"].to_pylist())


def _pinned_with(raw: Artifact, ids: Collection[str]) -> Iterator[str]:
    """The files that a raw corpus pins and that hold one of them; one that changed is none."""
    wanted = pa.array(sorted(ids), pa.string())
    for file in find_pinned(raw.url):
        if file.find_change() is None and any(
            pc.any(pc.is_in(part.read(["id"])["id"], wanted)).as_py() for part in parts_of(file)
        ):
            yield file.url


def _without_rows(corpus: Artifact, ids: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """The Parquet files of a corpus, past texts among them, that hold one of them, without it."""
    wanted = pa.array(sorted(ids), pa.string())
    for entry in corpus.manifest.files:
        if not entry.path.endswith(".parquet"):
            continue
        with files.open_file(f"{corpus.url}/{entry.path}") as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            if not {"id", "text"} <= set(parquet.schema_arrow.names):
                continue
            if not pc.any(pc.is_in(parquet.read(["id"])["id"], wanted)).as_py():
                continue
            yield entry.path, _filtered(parquet, wanted)


def _filtered(parquet: pq.ParquetFile, ids: pa.Array) -> bytes:
    """A Parquet file without some ids, with its row groups and its metadata."""
    written = io.BytesIO()
    with pq.ParquetWriter(
        written, parquet.schema_arrow, compression="zstd", write_page_checksum=True
    ) as writer:
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            writer.write_table(table.filter(pc.invert(pc.is_in(table["id"], ids))))
    return written.getvalue()


def _without_examples(corpus: Artifact, ids: Collection[str]) -> dict[str, Any]:
    """The stats of a clean corpus, in which the first words of dropped documents stand."""
    examples = corpus.stats.get("dropped_examples", {})
    kept = {
        reason: [one for one in found if one["id"] not in ids] for reason, found in examples.items()
    }
    return corpus.stats | ({"dropped_examples": kept} if examples else {})


def _held(shards: Artifact, texts: Collection[str]) -> set[str]:
    """Those of the texts that stand in the shards."""
    wanted = pa.array(sorted(texts), pa.string())
    found: set[str] = set()
    for shard in _shards(shards):
        hashes = shard.documents(["text_hash"])["text_hash"]
        found.update(hashes.filter(pc.is_in(hashes, wanted)).to_pylist())
    return found


def _without_tokens(shards: Artifact, texts: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Files of shards that hold one of the texts, its tokens overwritten with the end token."""
    end = ShardStats.model_validate(shards.stats).end_token_id
    wanted = pa.array(sorted(texts), pa.string())
    for shard in _shards(shards):
        hashes = shard.documents(["text_hash"])["text_hash"]
        documents = np.flatnonzero(pc.is_in(hashes, wanted).to_numpy())
        gone = np.flatnonzero(np.isin(shard.segments["document"], documents))
        if not len(gone):
            continue
        places = _places(shard, gone)
        for end_of_name, values, blank in (
            ("tokens", shard.tokens, end),
            ("targets", shard.targets, 0),
        ):
            if values is not None and (values.reshape(-1)[places] != blank).any():
                copy = values.reshape(-1).copy()
                copy[places] = blank
                yield f"{shard.entry.name}.{end_of_name}", copy.tobytes()


def _places(shard: Shard, segments: np.ndarray) -> np.ndarray:
    """Where the tokens of some segments stand among all of the shard."""
    rows = np.searchsorted(shard.row_offsets, segments, side="right") - 1
    starts = rows * shard.tokens.shape[1] + shard.segments["start"][segments]
    lengths = shard.segments["length"][segments].astype(np.int64)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.asarray(np.repeat(starts, lengths) + within)


def _shards(artifact: Artifact) -> Iterator[Shard]:
    stats = ShardStats.model_validate(artifact.stats)
    opened = ShardFiles(artifact.url)
    return (Shard(opened, entry, stats) for entry in stats.shards if entry.rows)


def _without_samples(evaluation: Artifact, ids: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """What models wrote after the beginnings of held-out documents, without the forgotten ones."""
    content = files.find(f"{evaluation.url}/{SAMPLES_NAME}")
    samples = json.loads(content) if content else {}
    kept = {
        role: [one for one in found if one["document"] not in ids]
        for role, found in samples.items()
    }
    if kept != samples:
        yield SAMPLES_NAME, json.dumps(kept, indent=2).encode()


def _drop_caches(record: Pipeline) -> None:
    """Remove what the caches hold of text; a model in an engine's form goes with the model."""
    store = record.store
    if not store.is_local:
        # Copies that this machine has of what lies in the cloud.
        for folder in ("artifacts", "shards"):
            shutil.rmtree(cache_folder() / folder, ignore_errors=True)
    for cache in {store.cache, store.machine_cache}:
        for name in files.list_names(cache):
            if name != layout.CONVERSIONS_FOLDER:
                files.remove(f"{cache}/{name}")
