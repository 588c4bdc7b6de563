"""What can be known before any work: that it can succeed, and how much of the text it reads."""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from artifacts.errors import DamagedArtifact, UserError
from artifacts.model import POSITION_KEYS
from artifacts.progress import format_duration
from artifacts.storage.files import is_local, need_writable
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.gate.verdict import GateSettings
from recipes.evaluation.settings import EvaluationSettings, Rounds
from recipes.evaluation.statistics import POWER, level, reach
from recipes.model import base_model
from recipes.settings import BUDGETS
from serving import endpoint as process
from serving.settings import bearer_token, listen
from spark_jobs.read.docstrings import find_package
from spark_jobs.read.document import EMPTY, EXAMPLES, judge_faults
from spark_jobs.read.facts import open_facts, read_facts, read_forms
from spark_jobs.read.files.find import find_files
from spark_jobs.read.opened import SkippedFiles
from spark_jobs.read.settings import Facts, Files, HuggingFaceDataset, PackageDocs, Source
from spark_jobs.read.survey import survey

# What a run will do, reckoned before it: documents held out, the gain that can be seen, minutes,
# gigabytes. `init` chooses by it, and `check` and `run` refuse by it.
BYTES_PER_TOKEN, BEYOND_ASCII = 4, 2
"""About, of a vocabulary for English: of English text, and of characters beyond ASCII (SmolLM2's
has 4.9 of English, 2.5 of Russian, 1.5 of Chinese, Japanese and Thai)."""
LANGUAGE_SHARE = 0.1
"""Of the documents, from which on another language than English is worth a word."""
ORDER_OF_COUNTING = ("held_out", "validation", "train", None, "replay")
"""Of the places that a source's text may have: a text that two have counts where it is kept."""
MOST_HELD_OUT = 0.5
"""Largest share that is held out of little text, so that a model still learns from most of it."""
HELD_OUT_DOCUMENTS = 60
"""Held-out documents to aim at: twice what the gate needs, since near-copies count as one."""
DOCUMENT_SPREAD = 0.066
"""Standard deviation of a document's gain, in bits per byte; docs/promotion.md has how it was
measured."""
PARAMETERS, TOKENS_PER_SECOND = 134_515_008, 60.0
"""Of training the model that `init` names: per core with AVX2, as docs/benchmarks.md has it."""
ENOUGH_SHORT = 1_000
"""So many documents that are all too short speak for those that were not read."""
MOST_KEPT = 0.9
"""Share of short documents that are kept by the length that is advised."""
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
    bytes: float = 0.0
    """In UTF-8."""
    beyond_ascii: float = 0.0
    """Of these bytes, those of characters beyond ASCII."""
    share: float = 1.0
    """Of the files' bytes, the least that was read of a source."""
    copies: float = 0.0
    short: float = 0.0
    short_lengths: Counter[int] = field(default_factory=Counter)
    """Of short documents that were read and are not replayed: characters to documents."""
    faults: Counter[str] = field(default_factory=Counter)
    unread: SkippedFiles = field(default_factory=SkippedFiles)
    decoded: SkippedFiles = field(default_factory=SkippedFiles)
    messages: list[str] = field(default_factory=list)
    languages: Counter[str | None] = field(default_factory=Counter)
    """What the documents seem to be written in, to how many; None where nothing tells."""

    @property
    def tokens(self) -> float:
        """About."""
        ascii_bytes = self.bytes - self.beyond_ascii
        return ascii_bytes / BYTES_PER_TOKEN + self.beyond_ascii / BEYOND_ASCII

    def lines(self, command: str | None) -> list[str]:
        """What is learnt, and what is not: a line of each kind.

        Args:
            command: begins the one that lists all that is not; None where there is no pipeline file
                to check.
        """
        told = []
        if self.documents is not None:
            sampled = "" if self.share == 1 else f", estimated from {self.share:.1%} of the bytes"
            told.append(
                f"{'' if self.share == 1 else 'about '}{self.documents + self.held_out:,.0f} "
                f"documents, about {self.tokens:,.0f} tokens{sampled}"
            )
        for language, written in [one for one in self.languages.most_common(2) if one[0]][:1]:
            share = written / self.languages.total()
            if language != "English" and share >= LANGUAGE_SHARE:
                told.append(
                    f"{share:.0%} of the documents seem to be in "
                    f"{language}; the default base model and the text that `init` replays are "
                    "English. For another language, change `base_model`, and the source that "
                    "`clean_corpus.split.sources` assigns to `replay`"
                )
        for what, count in (("exact copies", self.copies), ("short documents", self.short)):
            told += [f"{what} left out: {count:,.0f}"] * bool(count)
        for kind, count in self.decoded.counts.items():
            told.append(f"files decoded from {kind}: {count:,}")
        reasons = {reason.replace("_", " "): count for reason, count in self.faults.items()}
        for what, counts in (("set aside", reasons), ("not read", self.unread.counts)):
            told += [f"{what}: {count:,} {kind}" for kind, count in counts.items()]
        if self.faults["not_utf8"]:
            told.append("to read text that is not UTF-8: set `encoding` of its source")
        if command and (self.faults or self.unread.counts):
            told.append(f"list all of them: {command} check --all")
        return told


def look_at(
    settings: PipelineSettings, seconds: float | None, messages: int = EXAMPLES
) -> TextEstimate:
    """Read the files of the sources for so many seconds; other kinds of sources are not read.

    What is replayed is looked at too, for faults, and counts as no text to learn.

    Args:
        seconds: for all sources together; None reads everything, 0 nothing.
        messages: of each kind of what is left out, how many are named.

    Raises:
        UserError: what a run would end with: a file that cannot be read, or more such documents
            than the source allows.
    """
    text, places = TextEstimate(), settings.clean_corpus.split.sources
    documents = 0.0
    files = [one for one in settings.raw_corpus.sources if isinstance(one, Files)]
    unread = [one.name for one in settings.raw_corpus.sources if not isinstance(one, Files)]
    texts: set[int] = set()
    # Text that is held out is trained on nowhere, and text that is also replayed is no replay.
    files.sort(key=lambda one: ORDER_OF_COUNTING.index(places.get(one.name)))
    for source in files:
        found = find_files(source, Store(settings.store).root, messages)
        if seconds == 0 or not is_local(source.path):
            unread.append(source.name)
            continue
        part = None if seconds is None else seconds / len(files)
        least = settings.clean_corpus.minimum_characters
        seen = survey(source, found.files, least, part, messages, texts)
        if source.on_bad_file == "stop":
            sound = seen.read + seen.faults[EMPTY]
            share = source.maximum_faulty_share
            judge_faults(source.name, share, sound, seen.faults, seen.messages)
        place = places.get(source.name)
        if place == "held_out":
            text.held_out += seen.documents
        elif place is None:
            documents += seen.documents
        text.languages += seen.languages if place != "replay" else Counter()
        text.short_lengths += seen.short_lengths if place != "replay" else Counter()
        text.bytes += seen.bytes if place != "replay" else 0
        text.beyond_ascii += seen.beyond_ascii if place != "replay" else 0
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
    is_known = all(places.get(name) == "replay" for name in unread)
    text.documents = documents if is_known else None
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


def most_measured(measured: EvaluationSettings) -> float:
    """About how many held-out documents are measured at most."""
    of_one = measured.document_tokens or 512
    return max((measured.held_out_tokens or math.inf) / of_one, measured.minimum_documents)


def visible_gain(held_out: float, gate: GateSettings, measured: EvaluationSettings) -> float:
    """The gain in bits per byte that the first judgement finds with a probability of 80%."""
    from scipy.special import ndtri

    clusters = max(2, int(min(held_out, most_measured(measured))))
    error = DOCUMENT_SPREAD / math.sqrt(clusters)
    at = level(gate.lifetime_error, 1, Rounds(measured=1, planned=1, share=1.0))
    margin = max(float(reach(error, 0.0, clusters, at)), gate.smallest_effect)
    return margin + float(ndtri(POWER)) * error


def all_too_short(settings: PipelineSettings, text: TextEstimate) -> str | None:
    """That cleaning would keep none of the documents, and the setting by which it would; None where
    it keeps some."""
    count = text.short_lengths.total()
    is_known = text.documents is not None and (text.share == 1 or count >= ENOUGH_SHORT)
    if text.bytes or not count or not is_known:
        return None
    lengths = sorted(text.short_lengths.elements(), reverse=True)
    fitting = lengths[math.ceil(MOST_KEPT * count) - 1]
    kept = sum(length >= fitting for length in lengths) / count
    return (
        f"All {count:,} documents that were read are shorter than "
        f"`clean_corpus.minimum_characters` ({settings.clean_corpus.minimum_characters}), so there "
        f"is nothing to train on. Set `clean_corpus.minimum_characters: {fitting}`, which keeps "
        f"{kept:.0%} of them, or add longer documents."
    )


def describe_held_out(settings: PipelineSettings, text: TextEstimate) -> tuple[str, str | None]:
    """What is held out, and with which gain that shows; or why that is too little to judge on."""
    if text.documents is None:
        return "", None
    gate, split = settings.model_version.gate, settings.clean_corpus.split
    documents, expected = text.documents, text.held_out + text.documents * split.held_out
    told = f"about {expected:,.0f} documents will be held out"
    if gate.metric == "exam":
        return f"{told}; the exam decides", None
    if expected >= gate.minimum_documents:
        return told + _describe_gain(settings, expected), None
    told = f"About {expected:.0f} of {documents + text.held_out:,.0f} documents would be held out"
    return "", _obstacle(told, documents, settings)


def _describe_gain(settings: PipelineSettings, held_out: float) -> str:
    """The gain that so many held-out documents show, where the spread of their scores is known."""
    recipe = settings.checkpoint
    if settings.form != "pretraining" or recipe.family != "causal" or not recipe.is_judged_in_bits:
        return f"; the metric of the recipe {recipe.recipe} decides"
    most, more = most_measured(settings.measured), 4 * held_out
    gain, of_more = (
        visible_gain(count, settings.model_version.gate, settings.measured)
        for count in (held_out, more)
    )
    told = f", enough to detect a gain of {gain:.3f} bits per byte with 80% power"
    limit = "`eval_metrics.held_out_tokens`"
    if held_out >= most:
        return f"{told}; about {most:,.0f} of them are measured, as {limit} says"
    others = (
        "four times as many" if more <= most else f"{most:,.0f}, about the most that {limit} allows"
    )
    return f"{told} ({of_more:.3f} with {others})"


def held_out_obstacle(clusters: int, documents: float, settings: PipelineSettings) -> str | None:
    """Why the text that was cleaned is too little to judge on; None where it is enough.

    Args:
        clusters: independent documents that are held out.
        documents: all of the text's, of which others can still be held out; 0 where a model has
            read them, after which splits stay.
    """
    gate = settings.model_version.gate
    if gate.metric == "exam" or clusters >= gate.minimum_documents:
        return None
    told = f"Only {clusters:,} independent documents are held out, near-copies counted as one"
    return _obstacle(told, documents, settings)


UNJUDGED = "To train anyway and decide yourself: `llm-assets run --unjudged`, then"


def _obstacle(told: str, documents: float, settings: PipelineSettings) -> str:
    """What is too little, and the ways out; `documents` as in `held_out_obstacle`."""
    gate, share = (
        settings.model_version.gate,
        held_out_share(documents, settings.model_version.gate),
    )
    told += (
        f", fewer than the {gate.minimum_documents} that the gate needs, so it could not promote a "
        "model. "
    )
    if not documents:
        told += "Add documents: some of the new ones are held out, too."
    elif share and share > settings.clean_corpus.split.held_out:
        told += f"Set `clean_corpus.split.held_out: {share:.2f}`, or add text."
    else:
        told += (
            f"Add text: at least {documents_needed(gate)} different documents of "
            f"{settings.clean_corpus.minimum_characters} characters or more are needed; a document "
            "is a file, or a row of a table."
        )
    version = "1" if documents else "VERSION"
    return f"{told} {UNJUDGED} `llm-assets approve {version} --reason REASON`"


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


def describe_base(settings: base_model.BaseModelSettings) -> Base:
    """What is known of a base model without loading it.

    Raises:
        UserError: the package or the folder is not there.
    """
    files = base_model.source_files(settings)
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
    """The most that a first run has on disk at a time.

    Args:
        steps: 0 where the text decides them and is not known: as many as fill what is kept.
    """
    saving = settings.checkpoint.checkpointing
    states = saving.keep + 1
    if steps:
        states = min(states, -(-steps // (saving.every_steps or 8)))
    export = MASTER_BYTES if settings.checkpoint.export.dtype == "float32" else 2
    model = base.parameters * max(states * STATE_BYTES, STATE_BYTES + 2 * export + SERVED_BYTES)
    return base.bytes + model + TEXT_COPIES * text_bytes


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
    looked_at: Callable[[TextEstimate], None] | None = None,
) -> Preflight:
    """Look at all that a run needs, and at its text for so many seconds.

    Args:
        seconds: None reads all of the text, 0 nothing of it.
        is_judged: whether the run is to end with a verdict, for which it needs enough documents.
        messages: of each kind of what is left out, how many are named.
        looked_at: is given the text as soon as it is known, before it may be refused.

    Raises:
        UserError: the run could not succeed: a source, a table of facts or the base model is not
            there, text cannot be read, rows are too long for the model, documents are too few or
            too short, the port is another's, or the disk is too small.
    """
    for source in settings.raw_corpus.sources:
        _need_source(source)
    for section in (settings.exam, settings.study):
        for name, read in (("facts", read_facts), ("placebo", read_facts), ("forms", read_forms)):
            if path := getattr(section, name, None):
                read(path)
    base = _base(settings)
    base_model.check_row_length(settings.tokenized_shards.input_length(settings.form), base.config)
    if settings.platform == "local":
        bearer_token(settings.endpoint)
        _need_port(settings)
    text = look_at(settings, seconds, messages)
    if looked_at:
        looked_at(text)
    if refusal := all_too_short(settings, text):
        raise UserError(refusal)
    if settings.platform == "local":
        steps = -(-_planned_tokens(settings, text) // _step_tokens(settings))
        _need_space(settings.store, bytes_written(settings, base, text.bytes, steps))
    held_out = _held_out(settings, text, is_judged)
    return Preflight(text, [*_coverage(settings, text), *held_out, *_unset(settings)])


def _unset(settings: PipelineSettings) -> list[str]:
    """Variables without which messages are not sent; where the daemon runs they may be set."""
    told = settings.notifications
    named = {
        "webhook_variable": told.webhook_variable,
        "email.password_variable": told.email and told.email.password_variable,
    }
    return [
        f"`notifications.{key}` names {variable}, which is not set here; without it where "
        "`llm-assets up` or the daemon is started, nothing is sent that way."
        for key, variable in named.items()
        if variable and not os.environ.get(variable)
    ]


def _need_source(source: Source) -> None:
    if isinstance(source, PackageDocs):
        for name in source.packages:
            find_package(name)
    elif isinstance(source, Facts):
        open_facts(source)
    elif isinstance(source, HuggingFaceDataset):
        is_folder = source.dataset.startswith(("/", "."))
        if is_folder and not Path(source.dataset).is_dir():
            raise UserError(
                f"Source {source.name!r}: there is no folder {source.dataset}. Correct `dataset`."
            )


def seconds_before_run(settings: PipelineSettings) -> float:
    """How long a run looks at its text: not where it was read before, and much is held out of it.

    Where little is, a few documents fewer leave too little.
    """
    if not is_local(settings.store):
        return 0
    with suppress(DamagedArtifact):  # Whoever needs it says so.
        divided = _record(settings).find_current("clean_corpus")
        held_out = divided.stats["splits"].get("held_out", 0) if divided else 0
        return 0 if held_out >= 4 * settings.model_version.gate.minimum_documents else RUN_SECONDS
    return 0


def _record(settings: PipelineSettings) -> Pipeline:
    return Pipeline(Store(settings.store), settings.name)


def _find_whole(settings: PipelineSettings, asset: str) -> Artifact | None:
    """The asset's current artifact; None where there is none, or its manifest is damaged."""
    with suppress(DamagedArtifact):  # Whoever needs it says so.
        return _record(settings).find_current(asset)
    return None


def _base(settings: PipelineSettings) -> Base:
    """The base model, as it was prepared here or as its source has it."""
    made = _find_whole(settings, "base_model") if is_local(settings.store) else None
    if made and (config := Path(made.url) / "config.json").exists():
        return Base(0, made.stats["parameters"], json.loads(config.read_bytes()))
    return describe_base(settings.base_model)


def _need_port(settings: PipelineSettings) -> None:
    host, port = settings.endpoint.host, settings.endpoint.port
    if port == 0 or process.status(endpoint_folder(settings)) is not None:
        return
    listen(host, port).close()


def _need_space(store: str, needed: float) -> None:
    if not is_local(store):
        return
    folder = need_writable(Path(Store(store).root))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"`store`: {folder} has {decimal(free)} free, and a run with this text and base model "
            f"needs up to {decimal(int(needed))} there at a time. Free some space, or set `store` "
            "to another disk."
        )


def _coverage(settings: PipelineSettings, text: TextEstimate) -> list[str]:
    budget = settings.checkpoint.budget
    if text.documents is None or not text.tokens:
        return []
    own, row_tokens = _own_share(settings), _step_tokens(settings)
    planned = _planned_tokens(settings, text)
    steps = -(-planned // row_tokens)
    share = own * planned / text.tokens
    speed = _tokens_per_second(settings)

    def time(tokens: float) -> str:
        return f" in about {format_duration(tokens / speed)}" if speed else ""

    told = f"{steps:,} steps read about {share:.1%} of the text{time(steps * row_tokens)}"
    if share < 0.95:
        tokens = text.tokens / own
        whole = round(tokens / row_tokens) or 1
        # In the unit in which the budget is given, as two units are refused.
        amounts = {"steps": whole, "tokens": round(tokens), "epochs": 1}
        name = next(name for name in BUDGETS if getattr(budget, name) is not None)
        told += f"; one pass takes about {whole:,} steps (`checkpoint.budget.{name}: "
        told += f"{amounts[name]}`){time(tokens)}"
    return [f"{told}, at the speed of the last training run." if speed else f"{told}."]


def _step_tokens(settings: PipelineSettings) -> int:
    return settings.tokenized_shards.sequence_length * settings.checkpoint.budget.global_batch_size


def _planned_tokens(settings: PipelineSettings, text: TextEstimate) -> int:
    """What the budget comes to; of epochs over text that nobody looked at, 0."""
    budget = settings.checkpoint.budget
    if budget.epochs:
        return round(budget.epochs * text.tokens / _own_share(settings))
    return budget.tokens or (budget.steps or 0) * _step_tokens(settings)


def _own_share(settings: PipelineSettings) -> float:
    """Rows that replay other text are a share of all, and no text of the pipeline's own."""
    return 1 - settings.checkpoint.replay_share


def _tokens_per_second(settings: PipelineSettings) -> float | None:
    """Of the training that made the current checkpoint here; None where there is none."""
    trained = _find_whole(settings, "checkpoint") if settings.platform == "local" else None
    return trained.stats["tokens_per_second"] if trained else None


def _held_out(settings: PipelineSettings, text: TextEstimate, is_judged: bool) -> list[str]:
    """What is held out and the gain that shows; raises UserError where that is too little."""
    divided, is_trained = None, False
    if is_local(settings.store):
        with suppress(DamagedArtifact):  # Whoever needs it says so.
            divided = _record(settings).find_current("clean_corpus")
            is_trained = _record(settings).recorded("checkpoint") is not None
    share = settings.clean_corpus.split.held_out
    before = divided.manifest.settings["split"]["held_out"] if divided else share
    is_certain = True
    if divided is None or (before != share and not is_trained):
        told, obstacle = describe_held_out(settings, text)
    else:
        told, obstacle, is_certain = _still_held_out(settings, text, divided, is_trained)
    if before != share and is_trained:
        told += (
            f" Existing splits do not change: `held_out: {share:g}` instead of {before:g} "
            "applies to new text only. To split all text again, stop the endpoint "
            "(`llm-assets stop`) and give the pipeline another `name`: versions and verdicts "
            "of this one stay."
        )
    if obstacle and is_certain and is_judged:
        raise UserError(obstacle)
    if obstacle and not is_judged:
        obstacle = obstacle.replace(UNJUDGED, "Once a model is trained, decide yourself:")
    return list(filter(None, [told.strip(), obstacle]))


def _still_held_out(
    settings: PipelineSettings, text: TextEstimate, divided: Artifact, is_trained: bool
) -> tuple[str, str | None, bool]:
    """What is held out of text that was divided before, and has changed since.

    Returns:
        It in words; why it is too little, if it is; and whether that is certain.
    """
    counts = divided.stats["splits"]
    new, left = _new_and_left(settings, text)
    then = counts.get("held_out", 0)
    now = left * then + settings.clean_corpus.split.held_out * new
    all_now = left * (sum(counts.values()) - counts.get("replay", 0)) + new
    documents = 0 if is_trained else int(all_now)
    told = f"{then:,} documents are held out."
    obstacle = held_out_obstacle(int(now), documents, settings)
    if left < 1:
        told = f"Since text was removed, about {now:,.0f} of {then:,} held-out documents remain"
        obstacle = obstacle and _obstacle(told, documents, settings)
        told = "" if obstacle else f"{told}."
    # Text that was not looked at may have grown, and which documents are gone is not known yet;
    # before training both will be.
    is_whole = text.documents is not None and text.share == 1
    most = now + 2 * math.sqrt(then * left * (1 - left)) if is_whole else math.inf
    return told, obstacle, most < settings.model_version.gate.minimum_documents


def _new_and_left(settings: PipelineSettings, text: TextEstimate) -> tuple[int, float]:
    """About how many documents came since the text was read last, or the share that is left."""
    raw = _record(settings).find_current("raw_corpus")
    if raw is None or text.documents is None:
        return 0, 1.0
    replayed = settings.clean_corpus.split.replayed
    read = sum(of["documents"] for name, of in raw.stats["sources"].items() if name not in replayed)
    found = round(text.documents + text.held_out + text.copies + text.short)
    # An estimate from some of the bytes does not tell few documents less from none.
    return max(0, found - read), min(1.0, found / read) if read and text.share == 1 else 1.0
