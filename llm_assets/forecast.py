"""What a run will do, reckoned before it: documents held out, the gain that can be seen, minutes,
gigabytes. `init` chooses by it, and `check` and `run` refuse by it.
"""

import json
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from artifacts.storage.files import is_local
from llm_assets.config import PipelineSettings
from llm_assets.gate.verdict import GateSettings
from recipes.evaluation.settings import EvaluationSettings, Rounds
from recipes.evaluation.statistics import POWER, level, reach
from recipes.model.base_model import POSITION_KEYS, BaseModelSettings, source_files
from spark_jobs.read.document import EMPTY, EXAMPLES, judge_faults
from spark_jobs.read.files.find import find_files
from spark_jobs.read.opened import SkippedFiles
from spark_jobs.read.settings import Files
from spark_jobs.read.survey import survey

CHARACTERS_PER_TOKEN = 4
"""About, for English and the usual vocabularies."""
MOST_HELD_OUT = 0.5
"""Largest share that is held out of little text, so that a model still learns from most of it."""
HELD_OUT_DOCUMENTS = 60
"""Held-out documents to aim at: twice what the gate needs, since near-copies count as one."""
DOCUMENT_SPREAD = 0.066
"""Standard deviation of a document's gain, in bits per byte; docs/promotion.md has how it was
measured."""
PARAMETERS, TOKENS_PER_SECOND = 134_515_008, 60.0
"""Of training the model that `init` names: per core with AVX2, as docs/benchmarks.md has it."""
OTHER_SECONDS = 180
"""Of a first run, beside training: reading, cleaning, measuring and starting the endpoint."""
TEXT_COPIES = 4
"""Times the source text that the corpus stages write: raw, clean, tokens and caches."""
MASTER_BYTES, STATE_BYTES, SERVED_BYTES = 4, 12, 2
"""Of a parameter: in 32 bits; so with AdamW's two moments; as the endpoint caches it."""


@dataclass
class TextEstimate:
    """What the sources hold, as a first look found it."""

    documents: float | None = 0.0
    """That can be divided into splits; None where a source was not looked at."""
    held_out: float = 0.0
    """Those of sources that are held out as a whole."""
    characters: float = 0.0
    share: float = 1.0
    """Of the files' bytes, the least that was read of a source."""
    copies: float = 0.0
    short: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    unread: SkippedFiles = field(default_factory=SkippedFiles)
    decoded: SkippedFiles = field(default_factory=SkippedFiles)
    messages: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        """About."""
        return self.characters / CHARACTERS_PER_TOKEN

    def lines(self) -> list[str]:
        """What is learnt, and what is not: a line of each kind."""
        told = []
        if self.documents is not None:
            sampled = "" if self.share == 1 else f", estimated from {self.share:.1%} of the bytes"
            told.append(
                f"{'' if self.share == 1 else 'about '}{self.documents + self.held_out:,.0f} "
                f"documents, {self.tokens:,.0f} tokens{sampled}"
            )
        for count, what in ((self.copies, "exact copies"), (self.short, "too short to keep")):
            told += [f"left out: {count:,.0f} {what}"] * bool(count)
        for kind, count in self.decoded.counts.items():
            told.append(f"decoded: {count:,} files in {kind}")
        reasons = {reason.replace("_", " "): count for reason, count in self.faults.items()}
        for what, counts in (("set aside", reasons), ("not read", self.unread.counts)):
            told += [f"{what}: {count:,} {kind}" for kind, count in counts.items()]
        if self.faults or self.unread.counts:
            told.append("list all of them: llm-assets check --all")
        return told


def look_at(
    settings: PipelineSettings, seconds: float | None, messages: int = EXAMPLES
) -> TextEstimate:
    """Read the files of the sources for so many seconds; other kinds of sources are not read.

    Args:
        seconds: for all sources together; None reads everything, 0 nothing.
        messages: of each kind of what is left out, how many are named.

    Raises:
        UserError: what a run would end with: a file that cannot be read, or more such documents
            than the source allows.
    """
    text = TextEstimate()
    files = [one for one in settings.raw_corpus.sources if isinstance(one, Files)]
    if len(files) < len(settings.raw_corpus.sources):
        text.documents = None
    for source in files:
        found = find_files(source, settings.store, messages)
        if seconds == 0 or not is_local(source.path):
            text.documents = None
            continue
        part = None if seconds is None else seconds / len(files)
        seen = survey(source, found.files, settings.clean_corpus.minimum_characters, part, messages)
        if source.on_bad_file == "stop":
            sound = seen.read + seen.faults[EMPTY]
            share = source.maximum_faulty_share
            judge_faults(source.name, share, sound, seen.faults, seen.messages)
        place = settings.clean_corpus.split.sources.get(source.name)
        if place == "held_out":
            text.held_out += seen.documents
        elif place is None and text.documents is not None:
            text.documents += seen.documents
        text.characters += seen.characters
        text.copies, text.short = text.copies + seen.copies, text.short + seen.short
        text.share = min(text.share, seen.share)
        text.faults += seen.faults
        text.messages += seen.messages
        for kept, one in (
            (text.unread, found.unread),
            (text.unread, seen.unread),
            (text.decoded, seen.decoded),
        ):
            _merge(kept, one)
    return text


def _merge(kept: SkippedFiles, one: SkippedFiles) -> None:
    for kind, count in one.counts.items():
        kept.counts[kind] = kept.counts.get(kind, 0) + count
        kept.examples[kind] = [*kept.examples.get(kind, []), *one.examples[kind]]


def held_out_share(documents: float, gate: GateSettings) -> float | None:
    """The share to hold out, so that the gate can decide; None where no share is enough."""
    aim = HELD_OUT_DOCUMENTS * gate.minimum_documents / 30
    share = math.ceil(100 * max(0.05, min(MOST_HELD_OUT, aim / max(1.0, documents)))) / 100
    return share if surely_held_out(documents, share) >= gate.minimum_documents else None


def surely_held_out(documents: float, share: float) -> float:
    """Documents that are held out at least, but for one in forty draws."""
    return documents * share - 2 * math.sqrt(documents * share * (1 - share))


def documents_needed(gate: GateSettings) -> int:
    """Fewest documents of which enough can be held out."""
    too_few = takewhile(lambda count: held_out_share(count, gate) is None, range(1, 10**6))
    return 1 + sum(1 for _ in too_few)


def visible_gain(held_out: float, gate: GateSettings, measured: EvaluationSettings) -> float:
    """The gain in bits per byte that the first judgement finds with a probability of 80 %."""
    from scipy.special import ndtri

    of_one = measured.document_tokens or 512
    budget = (measured.held_out_tokens or math.inf) / of_one
    clusters = max(2, int(min(held_out, max(budget, measured.minimum_documents))))
    error = DOCUMENT_SPREAD / math.sqrt(clusters)
    at = level(gate.lifetime_error, 1, Rounds(measured=1, planned=1, share=1.0))
    margin = max(float(reach(error, 0.0, clusters, at)), gate.smallest_effect)
    return margin + float(ndtri(POWER)) * error


def describe_held_out(settings: PipelineSettings, text: TextEstimate) -> tuple[str, str | None]:
    """What is held out, and with which gain that shows; or why that is too little to judge on."""
    if text.documents is None:
        return "", None
    gate, split = settings.model_version.gate, settings.clean_corpus.split
    documents, expected = text.documents, text.held_out + text.documents * split.held_out
    if expected >= gate.minimum_documents:
        gain, of_more = (
            visible_gain(count, gate, settings.eval_metrics) for count in (expected, 4 * expected)
        )
        return (
            f"about {expected:,.0f} documents will be held out, enough to detect a gain of "
            f"{gain:.3f} bits per byte ({of_more:.3f} with four times as many)"
        ), None
    told = (
        f"About {expected:.0f} of {documents + text.held_out:,.0f} documents would be held out, "
        f"fewer than the {gate.minimum_documents} that the gate judges on, so that no model could "
        "be promoted. "
    )
    enough = held_out_share(documents, gate)
    if enough:
        told += f"Set `clean_corpus.split.held_out: {enough:.2f}`, or add text."
    else:
        told += (
            f"Add text: it takes {documents_needed(gate)} different documents of "
            f"{settings.clean_corpus.minimum_characters} characters or more; a document is a file, "
            "or a row of a table."
        )
    return "", (
        f"{told} To train anyway and decide yourself: llm-assets run --unjudged, then "
        'llm-assets approve 1 --reason "..."'
    )


def tokens_per_second(parameters: int) -> float:
    """Of training on this machine's processor, where nothing was trained yet."""
    return TOKENS_PER_SECOND * len(os.sched_getaffinity(0)) * PARAMETERS / parameters


@dataclass(frozen=True)
class Base:
    """A base model, as its files tell before it is loaded."""

    bytes: int = 0
    """That `base_model` writes."""
    parameters: int = 0
    """0 where the files are not on this machine."""
    config: dict[str, Any] = field(default_factory=dict)
    """As far as its positions go."""


def describe_base(settings: BaseModelSettings) -> Base:
    """What is known of a base model without loading it.

    Raises:
        UserError: the package or the folder is not there.
    """
    files = source_files(settings)
    if settings.package:
        from gguf import GGUFReader

        reader = GGUFReader(files[0])
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
        found = (one for name, one in reader.fields.items() if name.endswith(".context_length"))
        length = next((int(one.contents()) for one in found), None)
        return Base(parameters * MASTER_BYTES, parameters, {POSITION_KEYS[0]: length})
    weights = [file for file in files if file.suffix == ".safetensors"]
    configs = (json.loads(file.read_bytes()) for file in files if file.name == "config.json")
    parameters = sum(map(_parameters, weights))
    return Base(sum(file.stat().st_size for file in files), parameters, next(configs, {}))


def _parameters(weights: Path) -> int:
    from safetensors import safe_open

    with safe_open(weights, framework="numpy") as opened:
        names = opened.keys()
        return sum(math.prod(opened.get_slice(name).get_shape()) for name in names)


def bytes_written(settings: PipelineSettings, base: Base, text_bytes: float, steps: int) -> float:
    """The most that a first run has on disk at a time."""
    saving = settings.checkpoint.checkpointing
    states = min(saving.keep + 1, -(-steps // (saving.every_steps or 8)))
    export = MASTER_BYTES if settings.checkpoint.export.dtype == "float32" else 2
    model = base.parameters * max(states * STATE_BYTES, STATE_BYTES + 2 * export + SERVED_BYTES)
    return base.bytes + model + TEXT_COPIES * text_bytes
