"""What can be known before any work: that it can succeed, and how much of the text it reads."""

import json
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import DamagedArtifact, UserError, reason_of
from artifacts.progress import format_duration
from artifacts.storage.files import is_local
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.forecast import (
    Base,
    TextEstimate,
    bytes_written,
    describe_base,
    describe_held_out,
    look_at,
)
from recipes.model.base_model import check_row_length
from serving import endpoint as process
from serving.settings import listen
from spark_jobs.read.docstrings import find_package
from spark_jobs.read.document import EXAMPLES
from spark_jobs.read.facts import open_facts
from spark_jobs.read.settings import Facts, HuggingFaceDataset, PackageDocs, Source

LOOK_SECONDS = 60.0
"""A look at the text takes so long at most."""
RUN_SECONDS = 10.0
"""Before a run, which reads all of the text itself."""


@dataclass(frozen=True)
class Preflight:
    """What is known of a run before it."""

    text: TextEstimate
    notes: list[str]


def preflight(
    settings: PipelineSettings,
    seconds: float | None = RUN_SECONDS,
    *,
    is_judged: bool = True,
    messages: int = EXAMPLES,
) -> Preflight:
    """Look at all that a run needs, and at its text for so many seconds.

    Args:
        seconds: None reads all of the text, 0 nothing of it.
        is_judged: whether the run is to end with a verdict, for which it needs enough documents.
        messages: of each kind of what is left out, how many are named.

    Raises:
        UserError: the run could not succeed: a source, the base model or a teacher is not there,
            text cannot be read, rows are too long for the model, documents are too few, the port is
            another's, or the disk is too small.
    """
    for source in settings.raw_corpus.sources:
        _need_source(source)
    base = _base(settings)
    check_row_length(settings.tokenized_shards.sequence_length, base.config)
    settings.checkpoint.check_files()
    if settings.platform == "local":
        _need_port(settings)
    text = look_at(settings, seconds, messages)
    if settings.platform == "local":
        steps = settings.checkpoint.budget.steps or 32
        _need_space(settings.store, bytes_written(settings, base, text.characters, steps))
    held_out = _held_out(settings, text, is_judged)
    return Preflight(text, [*_coverage(settings, text), *held_out])


def _need_source(source: Source) -> None:
    if isinstance(source, PackageDocs):
        for name in source.packages:
            find_package(name)
    elif isinstance(source, Facts):
        open_facts(source)
    elif isinstance(source, HuggingFaceDataset):
        _need_dataset(source)


def seconds_before_run(settings: PipelineSettings) -> float:
    """How long a run looks at its text: not where it was read before."""
    if not is_local(settings.store):
        return 0
    with suppress(DamagedArtifact):  # Whoever needs it says so.
        return 0 if _record(settings).find_current("raw_corpus") else RUN_SECONDS
    return 0


def _record(settings: PipelineSettings) -> Pipeline:
    return Pipeline(Store(settings.store), settings.name)


def _base(settings: PipelineSettings) -> Base:
    """The base model, as it was prepared here or as its source has it."""
    if is_local(settings.store):
        with suppress(DamagedArtifact):  # Whoever needs it says so.
            made = _record(settings).find_current("base_model")
            if made and (config := Path(made.url) / "config.json").exists():
                return Base(0, made.stats["parameters"], json.loads(config.read_bytes()))
    return describe_base(settings.base_model)


def _need_dataset(source: HuggingFaceDataset) -> None:
    if source.dataset.startswith(("/", ".")) and not Path(source.dataset).is_dir():
        raise UserError(f"Source {source.name!r}: there is no folder {source.dataset}.")


def _need_port(settings: PipelineSettings) -> None:
    host, port = settings.endpoint.host, settings.endpoint.port
    if port == 0 or process.status(endpoint_folder(settings)) is not None:
        return
    listen(host, port).close()


def _need_space(store: str, needed: float) -> None:
    if "://" in store:
        return
    folder = Path(store).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        # It names the file that would have been; the user knows the folder.
        error.filename = str(folder)
        raise UserError(f"`store`: {reason_of(error) or error}") from error
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"`store`: {folder} has {free / 1e9:,.1f} GB free, and a run with this text and base "
            f"model has up to {needed / 1e9:,.1f} GB there at a time. Free some space, or set "
            "`store` to another disk."
        )


def _coverage(settings: PipelineSettings, text: TextEstimate) -> list[str]:
    budget = settings.checkpoint.budget
    if text.documents is None or not text.tokens:
        return []
    row_tokens = settings.tokenized_shards.sequence_length * budget.global_batch_size
    planned = budget.tokens or (budget.steps or 32) * row_tokens
    if budget.epochs:
        planned = round(budget.epochs * text.tokens)
    steps = -(-planned // row_tokens)
    share = planned / text.tokens
    speed = _tokens_per_second(settings)

    def time(tokens: float) -> str:
        return f" in about {format_duration(tokens / speed)}" if speed else ""

    told = f"{steps:,} steps read about {share:.1%} of the text{time(steps * row_tokens)}"
    if share < 0.95:
        whole = round(text.tokens / row_tokens) or 1
        budget_key = "`checkpoint.budget.steps`"
        told += f"; all of it once is about {whole:,} ({budget_key}){time(text.tokens)}"
    return [f"{told}, as fast as it trained last." if speed else f"{told}."]


def _tokens_per_second(settings: PipelineSettings) -> float | None:
    """Of the training that made the current checkpoint here; None where there is none."""
    if settings.platform != "local":
        return None
    try:
        trained = _record(settings).find_current("checkpoint")
    except DamagedArtifact:
        return None  # Whoever needs it says so.
    return trained.stats["tokens_per_second"] if trained else None


def _held_out(settings: PipelineSettings, text: TextEstimate, is_judged: bool) -> list[str]:
    """What is held out and the gain that shows; raises UserError where that is too little."""
    if split_before := _split_before(settings):
        return split_before
    told, obstacle = describe_held_out(settings, text)
    if obstacle and is_judged:
        raise UserError(obstacle)
    return list(filter(None, [obstacle or told]))


def _split_before(settings: PipelineSettings) -> list[str]:
    """Of text that was divided before, what a changed share means for it."""
    if not is_local(settings.store):
        return []
    with suppress(DamagedArtifact):  # Whoever needs it says so.
        made = _record(settings).find_current("clean_corpus")
        if made is None:
            return []
        before, now = made.manifest.settings["split"]["held_out"], settings.clean_corpus.split
        held_out = made.stats["splits"].get("held_out", 0)
        told = f"{held_out:,} documents are held out since they were first read."
        if before != now.held_out:
            told += (
                f" What is split stays so: `held_out: {now.held_out:g}` in place of {before:g} "
                "holds for new text alone. To divide all of it again, give the pipeline another "
                "`name`."
            )
        return [told]
    return []
