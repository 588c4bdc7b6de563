"""What a module's code is, apart from how it is written: a hash over it and all that it imports."""

import ast
import hashlib
from functools import lru_cache
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("artifacts", "llm_assets", "recipes", "serving", "spark_jobs")


@lru_cache
def source_hash(module: str) -> str:
    """A hash over a module and all of this project's that it imports, directly or not.

    Comments, docstrings and layout do not enter it.
    """
    digest = hashlib.sha256()
    for name in sorted(reachable(module)):
        digest.update(f"{name}\0{normalized(_path_of(name).read_text())}\0".encode())
    return digest.hexdigest()[:16]


def reachable(module: str) -> set[str]:
    """The module and all of this project's that it imports, directly or not."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imported(name)
    return found


def normalized(source: str) -> str:
    """Source code without comments, docstrings and layout."""
    tree = _parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return ast.dump(tree)


def _imported(module: str) -> list[str]:
    names = []
    for node in ast.walk(_parsed(_path_of(module).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] in _PACKAGES and _path_of(name).exists()]


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SystemError:
        # Before 3.11.9 and 3.12.2 Python counts wrongly where another thread parses as well
        # (python/cpython issue 106905).
        return _parsed(source)


def _path_of(module: str) -> Path:
    return (_ROOT / module.replace(".", "/")).with_suffix(".py")


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
