"""Which format a file has, by the ending of its name."""

from dataclasses import dataclass
from typing import Literal, get_args

FormatName = Literal[
    "text", "html", "pdf", "docx", "notebook", "json", "csv", "parquet", "archive", "code"
]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}

_ENDINGS: dict[FormatName, str] = {
    "text": "txt text md markdown mdx rst adoc asciidoc org tex",
    "html": "html htm xhtml",
    "pdf": "pdf",
    "docx": "docx",
    "notebook": "ipynb",
    "json": "jsonl ndjson json",
    "csv": "csv tsv",
    "parquet": "parquet",
    "archive": "zip tar tgz",
}
LANGUAGES = {
    "bash": "sh bash",
    "c": "c h",
    "c++": "cc cpp cxx hh hpp hxx",
    "c#": "cs",
    "clojure": "clj",
    "css": "css scss",
    "cuda": "cu cuh",
    "dart": "dart",
    "elixir": "ex exs",
    "erlang": "erl",
    "fortran": "f90 f95",
    "go": "go",
    "graphql": "graphql",
    "haskell": "hs",
    "java": "java",
    "javascript": "js jsx mjs",
    "julia": "jl",
    "kotlin": "kt kts",
    "lua": "lua",
    "ocaml": "ml mli",
    "perl": "pl pm",
    "php": "php",
    "powershell": "ps1",
    "protobuf": "proto",
    "python": "py pyi",
    "r": "r",
    "ruby": "rb",
    "rust": "rs",
    "scala": "scala",
    "sql": "sql",
    "swift": "swift",
    "terraform": "tf",
    "toml": "toml",
    "typescript": "ts tsx",
    "yaml": "yaml yml",
}
_BY_ENDING: dict[str, tuple[FormatName, str | None]] = {
    f".{ending}": (name, None) for name, endings in _ENDINGS.items() for ending in endings.split()
} | {f".{ending}": ("code", name) for name, found in LANGUAGES.items() for ending in found.split()}
_BY_NAME: dict[str, str] = {"dockerfile": "dockerfile", "makefile": "makefile"}


@dataclass(frozen=True)
class Format:
    """How a file is read."""

    name: FormatName
    ending: str
    """In lower case, such as `.md`; the compression's is taken off."""
    language: str | None = None
    """The programming language of code."""
    compression: str | None = None


def format_of(path: str) -> Format | None:
    """The format that a file's name says, or None where it says none that can be read."""
    name = path.rpartition("/")[2].lower()
    compression = None
    for ending, kind in COMPRESSIONS.items():
        if name.endswith(ending):
            name, compression = name.removesuffix(ending), kind
    if name in _BY_NAME:
        return Format("code", name, _BY_NAME[name], compression)
    dot, ending = name.rpartition(".")[1:]
    found = _BY_ENDING.get(dot + ending)
    if found is None:
        return None
    if name.endswith(".tgz"):
        compression = "gzip"
    return Format(found[0], dot + ending, found[1], compression)


def kind_of(path: str) -> str:
    """What a file that is not read is counted under: its ending, in lower case."""
    name = path.rpartition("/")[2].lower()
    stem, dot, ending = name.rpartition(".")
    return dot + ending if dot and stem and len(ending) <= 12 else "no ending"
