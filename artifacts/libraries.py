"""The code that decides an artifact: versions of installed libraries, and this project's source.

A module's source is a hash over it and all that it imports, apart from how it is written.
"""

import ast
import hashlib
import importlib.util
import platform
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from artifacts.errors import UserError

PYTHON, UNICODE = "python", "unicode"
"""What is no package but is versioned all the same: Python itself, and its Unicode tables."""
ABSENT = "absent"


def installed(names: Iterable[str]) -> dict[str, str]:
    """Name to version, without the build's own tag (`2.13.0+cpu`)."""
    return {name: _version(name) for name in sorted(names)}


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Name to `6.3.1 -> 6.3.2`, for every library whose version differs."""
    return {
        name: f"{old.get(name, 'not recorded')} -> {new.get(name, 'not used')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def refuse_changes(libraries: Mapping[str, str]) -> None:
    """Raise UserError unless these versions of packages are installed where this runs.

    Python is not asked for: nothing exchanges it under a program, and an image has its own. Nor is
    what was absent on the machine that asks a job of another to use it.
    """
    packages = {n: v for n, v in libraries.items() if n not in (PYTHON, UNICODE) and v != ABSENT}
    if changed := changes(packages, installed(packages)):
        raise UserError(
            "Libraries have changed since this work was begun: "
            + ", ".join(f"{name} {how}" for name, how in changed.items())
            + ". Nothing of it was kept, since nobody could say which of them made it. Run the "
            "same command again. An image on Google Cloud needs the versions of this machine: "
            "install those of requirements.lock here, or build the image again (images/build.sh)."
        )


def _version(name: str) -> str:
    if name == PYTHON:
        return platform.python_version()
    if name == UNICODE:
        return unicodedata.unidata_version
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return ABSENT


_ROOT = Path(__file__).parent.parent
_PACKAGES = ("artifacts", "llm_assets", "recipes", "serving", "spark_jobs")


def source_hash(*modules: str) -> str:
    """A hash over modules and all that they import of this project or of their own package.

    Comments, docstrings and layout do not enter it.
    """
    hashes: dict[str, str] = {}
    queue = list(modules)
    while queue:
        name = queue.pop()
        if name not in hashes:
            imports, hashes[name] = _source(name)
            queue += imports
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(f"{name} {hashes[name]}\n".encode())
    return digest.hexdigest()[:16]


@cache
def _source(module: str) -> tuple[list[str], str]:
    """What a module imports of this project or of its own package, and a hash of its source."""
    # Read once in a process: the modules that make the keys of a run of Spark import the same ones.
    # That takes 0.4 s of a processor, and 2.7 s if each of these modules reads them again.
    tree = parsed(_path_of(module).read_text())
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # What is imported may be a module itself or be defined in the one that is named: both
            # are looked for, and only files that exist count.
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    packages = {*_PACKAGES, module.split(".")[0]}
    imports = [n for n in names if n.split(".")[0] in packages and _path_of(n).exists()]
    return imports, hashlib.sha256(normalized(tree).encode()).hexdigest()


def normalized(tree: ast.Module) -> str:
    """Source code without comments, docstrings and layout."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return ast.dump(tree)


def parsed(source: str) -> ast.Module:
    """The syntax tree of source code."""
    try:
        return ast.parse(source)
    except SystemError:
        # Before 3.11.9 and 3.12.2 Python counts wrongly where another thread parses as well
        # (python/cpython issue 106905).
        return parsed(source)


def _path_of(module: str) -> Path:
    package, *rest = module.split(".")
    root = _ROOT
    if package not in _PACKAGES and (spec := importlib.util.find_spec(package)) and spec.origin:
        # Of a recipe that another package brings, which may be a single module.
        root = Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]
    return root.joinpath(package, *rest).with_suffix(".py")


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
