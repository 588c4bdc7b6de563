"""Checks what a run needs before it starts, and foresees its steps, time and disk space."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from struct import unpack_from
from typing import Any

from rich.filesize import decimal

from artifacts.errors import UserError
from artifacts.model import POSITION_KEYS
from artifacts.progress import counted, format_duration, percent
from artifacts.storage.files import is_local, need_writable
from artifacts.store.store import Store
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_status
from llm_assets.exam.questions import read_tables
from llm_assets.operation_settings import WHOLE_TEXT
from llm_assets.preflight.held_out import find_whole, foresee_held_out
from llm_assets.preflight.text import TextEstimate, look_at
from llm_assets.study.rows import KnownFacts
from recipes.evaluation.harness import load_tasks
from recipes.model import base_model
from recipes.sections import BUDGETS
from serving.settings import bearer_token, listen
from spark_jobs.read.bigquery import plan_query
from spark_jobs.read.docstrings import find_package
from spark_jobs.read.facts import open_facts
from spark_jobs.read.settings import (
    BigQuery,
    Facts,
    HuggingFaceDataset,
    PackageDocs,
    RawCorpusSettings,
)

PARAMETERS, TOKENS_PER_SECOND = 134_515_008, 60.0
"""Of training the model that `init` names: tokens per second per core with AVX2, as measured in
docs/benchmarks.md."""
OTHER_SECONDS = 180
"""Seconds of a first run beside training: reading, cleaning, measuring, starting the endpoint."""
TEXT_COPIES = 4
"""Copies of the source text that the corpus stages write: raw, clean, tokens and caches."""
MASTER_BYTES, STATE_BYTES, SERVED_BYTES = 4, 12, 2
"""Per parameter: in 32 bits; the same with AdamW's two moments; as the endpoint caches it."""
LOOK_SECONDS = 60.0
"""Longest time for a look at the text."""
RUN_SECONDS = 10.0
"""The same before a run, which reads all of the text itself."""


@dataclass(frozen=True)
class Base:
    """A base model, as its files tell before it is loaded."""

    bytes: int = 0
    """That `base_model` writes."""
    parameters: int = 0
    """0 where the files are not on this machine."""
    config: dict[str, Any] = field(default_factory=dict)
    """As far as its positions go."""


def preflight(settings: PipelineSettings, is_judged: bool = True) -> list[str]:
    """Ask for all that a run needs, look at its text for some seconds, and say what is foreseen."""
    base = find_needs(settings)
    divided = find_whole(settings, "clean_corpus")
    held_out = divided.stats["splits"].get("held_out", 0) if divided else 0
    # With that much held out, a few documents more or less do not matter.
    is_enough = held_out >= 4 * settings.model_version.gate.minimum_documents
    looks = is_local(settings.store) and not is_enough
    text = look_at(settings, RUN_SECONDS if looks else 0)
    return foresee(settings, base, text, is_judged)


def find_needs(settings: PipelineSettings) -> Base:
    """Check everything that a run needs except its text and disk space. It takes no time, except
    where tasks of lm-eval are asked for the first time: then seconds, and their rows are fetched.

    Raises:
        UserError: the run could not succeed: a source, a table of facts, a task or the base model
            is not there, rows are too long for the model, or the port is another's.
    """
    find_sources(settings.raw_corpus)
    if settings.exam:
        read_tables(settings.exam)
    if settings.study:
        # Raises if one of its files cannot be read.
        KnownFacts(settings.study)
    asks, is_here = settings.eval_metrics, settings.training_place == "local"
    if asks.tasks and settings.checkpoint.answers_questions and is_here:
        measured, content = find_whole(settings, "eval_metrics"), asks.content()
        asked = measured.manifest.settings if measured else {}
        # They are asked after training, and need not be loaded again if they were asked before.
        if any(asked.get(key) != content.get(key) for key in ("tasks", "task_files")):
            load_tasks(asks.lm_eval_tasks, [Path(asks.task_folder)] if asks.task_folder else [])
    # As it was prepared here or, before that, as its source has it.
    artifact = find_whole(settings, "base_model")
    if artifact and (config := Path(artifact.url) / "config.json").exists():
        # It is in the store already, so the run writes no bytes of it.
        base = Base(0, artifact.stats["parameters"], json.loads(config.read_bytes()))
    else:
        base = describe_base(settings.base_model)
    # Found here, it costs nothing; the training would find it after all text was tokenized.
    base_model.check_row_length(settings.tokenized_shards.input_length(settings.form), base.config)
    if settings.platform == "local":
        # Raises if the variable of the endpoint's token is not set.
        bearer_token(settings.endpoint)
        host, port = settings.endpoint.host, settings.endpoint.port
        # A port that this pipeline's own endpoint holds is not another's.
        if port and endpoint_status(settings) is None:
            listen(host, port).close()
    return base


def find_sources(settings: RawCorpusSettings) -> None:
    """Ask for every source but files, without reading it; raises UserError where one, or a column
    of a table in BigQuery, is not there."""
    for source in settings.sources:
        if isinstance(source, PackageDocs):
            for name in source.packages:
                find_package(name)
        elif isinstance(source, Facts):
            open_facts(source)
        elif isinstance(source, HuggingFaceDataset):
            is_folder = source.dataset.startswith(("/", ".", "~"))
            if is_folder and not Path(source.dataset).expanduser().is_dir():
                raise UserError(
                    f"Source {source.name!r}: there is no folder {source.dataset}. Correct "
                    "`dataset`."
                )
        elif isinstance(source, BigQuery):
            plan_query(source)


def foresee(
    settings: PipelineSettings, base: Base, text: TextEstimate, is_judged: bool = True
) -> list[str]:
    """What is to be known of a run, by its text.

    Args:
        is_judged: whether the run is to end with a verdict, for which it needs enough documents.

    Raises:
        UserError: documents are too few, or the disk is too small.
    """
    if text.unseen:
        shards = find_whole(settings, "tokenized_shards")
        text.tokens_to_train = shards.stats["tokens"]["train"] if shards else 0
    if settings.platform == "local" and is_local(settings.store):
        steps = -(-_planned_tokens(settings, text) // _step_tokens(settings))
        needed = bytes_written(settings, base, text.bytes, steps)
        folder = need_writable(Path(Store(settings.store).root))
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"`store`: {folder} has {decimal(free)} free, and a run with this text and base "
                f"model needs up to {decimal(int(needed))} there at a time. Free some space, or "
                "set `store` to another disk."
            )
    held_out = foresee_held_out(settings, text, is_judged)
    notes = [*tell_coverage(settings, text, base), *held_out, *settings.notifications.unset()]
    has_key = bool(os.environ.keys() & {"WANDB_API_KEY", "WANDB_MODE"})
    # `wandb login` writes the key to this file.
    if settings.checkpoint.logging.weights_and_biases and not (
        settings.uses_cloud or has_key or Path("~/.netrc").expanduser().exists()
    ):
        notes.append(
            "`checkpoint.logging.weights_and_biases`: training ends at its start without a key; "
            "set WANDB_API_KEY, or WANDB_MODE=offline to keep the figures here."
        )
    return notes


def tell_coverage(settings: PipelineSettings, text: TextEstimate, base: Base) -> list[str]:
    """How much of the text a training reads, and how long that and one pass take, by the speed of
    the last training run or, before there is any here, by that of a model of `PARAMETERS`."""
    budget = settings.checkpoint.budget
    if not text.tokens_to_train:
        return []
    own_share, row_tokens = _own_share(settings), _step_tokens(settings)
    planned = _planned_tokens(settings, text)
    steps = -(-planned // row_tokens)
    share = own_share * planned / text.tokens_to_train
    # The speed of the training that made the current checkpoint.
    checkpoint = find_whole(settings, "checkpoint")
    is_known = base.parameters == PARAMETERS and settings.training_place == "local"
    guess = tokens_per_second() if is_known else None
    speed = checkpoint.stats["tokens_per_second"] if checkpoint else guess

    def time(tokens: float) -> str:
        return f" in about {format_duration(tokens / speed)}" if speed else ""

    sentence = f"{counted(steps, 'step')} read about {percent(share)} of the training text"
    sentence += time(steps * row_tokens)
    reads_on = ""
    if share < WHOLE_TEXT:
        tokens = text.tokens_to_train / own_share
        pass_steps = round(tokens / row_tokens) or 1
        # In the unit of the configured budget, since only one unit may be set.
        amounts = {"steps": pass_steps, "tokens": round(tokens), "epochs": 1}
        name = next(name for name in BUDGETS if getattr(budget, name) is not None)
        setting = f"`checkpoint.budget.{name}: {amounts[name]}`"
        sentence += f"; one pass takes about {counted(pass_steps, 'step')} ({setting})"
        sentence += time(tokens)
        if settings.checkpoint.starts_from != "random":
            reads_on = "; automatic runs read on where `automation.least_coverage` is set"
    source = ", at the speed of the last training run" if checkpoint else ""
    return [f"{sentence}{source}{reads_on}."]


def _step_tokens(settings: PipelineSettings) -> int:
    row_tokens = settings.tokenized_shards.row_tokens(settings.form)
    return row_tokens * settings.checkpoint.budget.global_batch_size


def _planned_tokens(settings: PipelineSettings, text: TextEstimate) -> int:
    """Tokens that the budget amounts to; 0 for epochs over text that was not looked at."""
    budget = settings.checkpoint.budget
    if budget.epochs:
        return round(budget.epochs * text.tokens_to_train / _own_share(settings))
    return budget.tokens or (budget.steps or 0) * _step_tokens(settings)


def _own_share(settings: PipelineSettings) -> float:
    """The share of rows that neither replay other text nor were made of the text by `study`."""
    study = settings.tokenized_shards.mixing.get("study")
    derived = (study.share or 0) if study else 0
    return (1 - settings.checkpoint.replay_share) * (1 - derived)


def tokens_per_second() -> float:
    """Of training the model that `init` names on this processor, where nothing was trained yet."""
    return TOKENS_PER_SECOND * len(os.sched_getaffinity(0))


def describe_base(settings: base_model.BaseModelSettings) -> Base:
    """What is known of a base model without loading it; raises UserError where it is not there."""
    files = base_model.source_files(settings)
    if settings.package:
        return _describe_gguf(files[0])
    weights = [file for file in files if file.suffix == ".safetensors"]
    configs = (json.loads(file.read_bytes()) for file in files if file.name == "config.json")
    parameters, _ = base_model.count_weights(weights)
    return Base(sum(file.stat().st_size for file in files), parameters, next(configs, {}))


def _describe_gguf(path: Path) -> Base:
    import numpy as np
    from gguf import GGUFEndian, GGUFReader, GGUFValueType

    class Head(GGUFReader):
        """Leaves out the values of arrays: to cut a vocabulary into its words takes seconds."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            (kind,), (count,) = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            end = orig_offs + kind.nbytes + count.nbytes
            if kind == GGUFValueType.STRING:
                order = ">Q" if self.endianess == GGUFEndian.BIG else "<Q"
                for _ in range(count):
                    end += 8 + unpack_from(order, self.data.data, end)[0]
            else:
                number = self.gguf_scalar_to_np[GGUFValueType(kind)]
                end += int(count) * np.dtype(number).itemsize
            return end - orig_offs, [], [], [GGUFValueType.ARRAY]

    head = Head(path)
    parameters = sum(int(tensor.n_elements) for tensor in head.tensors)
    # GGUF names it by the architecture: `llama.context_length`.
    names = (name for name in head.fields if name.endswith(".context_length"))
    length = next((int(head.fields[name].contents()) for name in names), None)
    return Base(parameters * MASTER_BYTES, parameters, {POSITION_KEYS[0]: length})


def bytes_written(settings: PipelineSettings, base: Base, text_bytes: float, steps: int) -> float:
    """The most that a first run has on disk at a time.

    Args:
        steps: 0 where the text decides them and is not known: as many as fill what is kept.
    """
    saving = settings.checkpoint.checkpointing
    # One is written while all that are kept are still there.
    states = saving.keep + 1
    if steps:
        # 8 is `recipes.device.Device.saves_every_steps`, whose module would import torch here.
        states = min(states, -(-steps // (saving.every_steps or 8)))
    export = MASTER_BYTES if settings.checkpoint.export.dtype == "float32" else 2
    model = base.parameters * max(states * STATE_BYTES, STATE_BYTES + 2 * export + SERVED_BYTES)
    return base.bytes + model + TEXT_COPIES * text_bytes
