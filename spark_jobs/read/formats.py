"""The formats of files, as their names say."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

FormatName = Literal[
    "text",
    "html",
    "pdf",
    "docx",
    "notebook",
    "mail",
    "subtitles",
    "xml",
    "rtf",
    "odt",
    "pptx",
    "xlsx",
    "epub",
    "json",
    "csv",
    "parquet",
    "archive",
    "code",
]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
TABLES: tuple[FormatName, ...] = ("json", "csv", "parquet")
"""Formats whose rows have columns."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}

_ENDINGS: dict[FormatName, str] = {
    "text": "txt text md markdown mdx rst adoc asciidoc org tex log",
    "html": "html htm xhtml",
    "pdf": "pdf",
    "docx": "docx",
    "notebook": "ipynb",
    "mail": "eml mbox",
    "subtitles": "srt vtt",
    "xml": "xml",
    "rtf": "rtf",
    "odt": "odt",
    "pptx": "pptx",
    "xlsx": "xlsx",
    "epub": "epub",
    "json": "jsonl ndjson json",
    "csv": "csv tsv",
    "parquet": "parquet",
    "archive": "zip tar tgz",
}
LANGUAGES = {
    # Those whose files end as they are called.
    **{name: name for name in ["dart", "go", "graphql", "java", "lua", "php", "r", "sql", "swift"]},
    "bash": "sh bash",
    "c": "c h",
    "c++": "cc cpp cxx hh hpp hxx",
    "c#": "cs",
    "clojure": "clj",
    "css": "css scss",
    "cuda": "cu cuh",
    "elixir": "ex exs",
    "erlang": "erl",
    "fortran": "f90 f95",
    "haskell": "hs",
    "javascript": "js jsx mjs",
    "julia": "jl",
    "kotlin": "kt kts",
    "ocaml": "ml mli",
    "perl": "pl pm",
    "powershell": "ps1",
    "protobuf": "proto",
    "python": "py pyi",
    "ruby": "rb",
    "rust": "rs",
    "scala": "scala",
    "terraform": "tf",
    "toml": "toml",
    "typescript": "ts tsx",
    "yaml": "yaml yml",
}
_LOCK = "~$"
"""Begins the name of the file that Office puts beside each document that somebody has open."""
_CONVERSIONS = {
    ".doc": "soffice --headless --convert-to docx FILE.doc",
    ".xls": "soffice --headless --convert-to xlsx FILE.xls",
    ".ppt": "soffice --headless --convert-to pptx FILE.ppt",
    ".msg": "msgconvert FILE.msg",
}
"""Kinds that are not read to what makes files of them that are."""
NUMBERED_ENDINGS = (*(e for name in TABLES for e in _ENDINGS[name].split()), "mbox")
"""Of files of many documents, whose ids end with the document's number unless a column names it;
pages of a wiki's dump have numbers of their own."""
_TEXT_NAMES = (
    *("authors", "changelog", "changes", "contributing", "copying", "install", "license"),
    *("news", "notice", "readme", "todo"),
)
"""Files without an ending."""


@dataclass(frozen=True)
class Format:
    """How a file is read."""

    name: FormatName
    ending: str
    """In lower case, such as `.md`; the compression's is taken off."""
    language: str | None = None
    """The programming language of code."""
    compression: str | None = None


def _formats() -> Iterator[Format]:
    for name, endings in _ENDINGS.items():
        for ending in endings.split():
            # One that names its compression, too, and is not among those of compressions.
            packed = "gzip" if ending == "tgz" else None
            yield Format(name, f".{ending}", compression=packed)
    for language, endings in LANGUAGES.items():
        yield from (Format("code", f".{ending}", language) for ending in endings.split())
    yield from (Format("code", name, name) for name in ("dockerfile", "makefile"))
    yield from (Format("text", name) for name in _TEXT_NAMES)


_BY_ENDING = {form.ending: form for form in _formats()}
"""Also by the names of files that have no ending."""


def format_of(path: str) -> Format | None:
    """The format that a file's name says, or None where it says none that can be read."""
    name = path.rpartition("/")[2].lower()
    if name.startswith(_LOCK):
        return None
    compression = None
    while (packed := "".join(name.rpartition(".")[1:])) in COMPRESSIONS:
        # The outermost one is named last; what it holds shows by its first bytes (`unpacked`).
        name, compression = name.removesuffix(packed), compression or COMPRESSIONS[packed]
    dot, ending = name.rpartition(".")[1:]
    form = _BY_ENDING.get(dot + ending)
    return replace(form, compression=compression or form.compression) if form else None


def kind_of(path: str) -> str:
    """What a file that is not read is counted under: its ending, in lower case."""
    name = path.rpartition("/")[2].lower()
    if name.startswith(_LOCK):
        return "lock file of an Office program"
    stem, dot, ending = name.rpartition(".")
    return dot + ending if dot and stem and len(ending) <= 12 else "no ending"


def advise_conversion(kinds: Collection[str]) -> list[str]:
    """What makes files of these kinds readable, as far as that is known."""
    advice = "to read {} files, convert them, for example with: {}"
    return [advice.format(kind, way) for kind, way in _CONVERSIONS.items() if kind in kinds]
