"""Reads the docstrings of installed packages from their source files; nothing is imported."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from artifacts.errors import UserError
from artifacts.libraries import PYTHON
from artifacts.progress import CountedProgress
from artifacts.store.identity import hash_json
from spark_jobs.read.document import Document
from spark_jobs.read.files.streams import SourceChanged
from spark_jobs.read.opened import Chunks, OpenedSource, group
from spark_jobs.read.settings import PackageDocs

FILES_PER_TASK = 48
POOL_WORTH_FILES = 400
"""Below this many files, starting worker processes costs more than they save."""


@dataclass(frozen=True)
class Package:
    """An installed package: where its source is, and what it says of itself."""

    name: str
    root: Path
    version: str
    license: str

    def source_files(self) -> list[Path]:
        """Its Python files in a fixed order; `root` is a file for a single-module package."""
        if self.root.is_file():
            return [self.root]
        return sorted(self.root.rglob("*.py"), key=lambda path: path.as_posix())

    def module_name(self, file: Path) -> str:
        """The dotted name a file would be imported by."""
        if self.root.is_file():
            return self.name
        parts = [self.name, *file.relative_to(self.root).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_package(name: str) -> Package:
    """Locate an installed package without importing it.

    Raises:
        UserError: no such package is installed, or it has no Python source.
    """
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    locations = list(spec.submodule_search_locations or []) if spec else []
    origin = spec.origin if spec else None
    if locations:
        root = Path(locations[0])
    elif origin and origin.endswith(".py"):
        root = Path(origin)
    else:
        raise UserError(
            f"Source `package_docs` names the package {name!r}, which is not installed here as "
            "Python source. Install it into this environment, or take it out of `packages`."
        )
    distribution = _find_distribution(name)
    if distribution:
        return Package(name, root, distribution.version, _license(distribution))
    if name in sys.stdlib_module_names:
        return Package(name, root, platform.python_version(), "PSF-2.0")
    return Package(name, root, "unknown", "unknown")


def _find_distribution(name: str) -> importlib.metadata.Distribution | None:
    """The distribution that brought a package, most often the one of its name."""
    with suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.distribution(name)
        if any(file.parts[0] == name for file in found.files or []):
            return found
    # This reads the list of files of everything that is installed, which takes a second.
    named = importlib.metadata.packages_distributions().get(name)
    return importlib.metadata.distribution(named[0]) if named else None


def fingerprint_package(package: Package) -> str:
    """A hash of the package's version and of every Python file's name and content."""
    digest = hashlib.sha256(f"{package.name} {package.version}".encode())
    for file in package.source_files():
        digest.update(package.module_name(file).encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def open_packages(source: PackageDocs, report: Callable[[str], None]) -> OpenedSource:
    """The packages in the order given, modules in name order; small packages share a chunk.

    Raises:
        UserError: a package is not installed as Python source.
        SourceChanged: from reading, a package's files changed since they were hashed.
    """
    packages = [find_package(name) for name in source.packages]
    states = {package.name: _state(package) for package in packages}
    hashes = {package.name: fingerprint_package(package) for package in packages}
    sizes = ((p.name, sum(f.stat().st_size for f in p.source_files())) for p in packages)
    chunks = [[packages[number] for number in numbers] for numbers in group(sizes)]
    # What is no valid Python is left out, which differs between versions of Python.
    version = platform.python_version()
    keys = [hash_json({"python": version, **{p.name: hashes[p.name] for p in c}}) for c in chunks]

    def read(numbers: list[int]) -> Iterator[tuple[int, Document]]:
        yield from _read(source, chunks, report, numbers)
        for package in (package for number in numbers for package in chunks[number]):
            if _state(package) != states[package.name]:
                raise SourceChanged(f"the package {package.name} changed while it was read")

    named = {f"{source.name}/{name}": one for name, one in hashes.items()}
    return OpenedSource(named, lambda: Chunks(keys, read), libraries=frozenset({PYTHON}))


def _state(package: Package) -> list[tuple[str, int, int]]:
    """Another value whenever a source file was written since."""
    files = ((file, file.stat()) for file in package.source_files())
    return [(str(file), found.st_size, found.st_mtime_ns) for file, found in files]


def _read(
    source: PackageDocs,
    chunks: list[list[Package]],
    report: Callable[[str], None],
    numbers: list[int],
) -> Iterator[tuple[int, Document]]:
    tasks = [
        (number, (source, package, files))
        for number in numbers
        for package in chunks[number]
        for files in _cut(package.source_files())
    ]
    files_in_all = sum(len(files) for _, (_, _, files) in tasks)
    progress = CountedProgress(report, source.name, files_in_all, "source files")
    done = 0
    results = _map_tasks([task for _, task in tasks], files_in_all)
    for (number, task), documents in zip(tasks, results, strict=True):
        done += len(task[2])
        progress.advance(done)
        for document in documents:
            yield number, document


def _map_tasks(
    tasks: list[tuple[PackageDocs, Package, list[Path]]], files: int
) -> Iterator[list[Document]]:
    workers = min(len(os.sched_getaffinity(0)), len(tasks))
    if workers < 2 or files < POOL_WORTH_FILES:
        yield from map(_read_files, tasks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_read_files, tasks)


def _read_files(task: tuple[PackageDocs, Package, list[Path]]) -> list[Document]:
    source, package, files = task
    about = (source.name, package.name, package.version, package.license)
    documents = []
    for file in files:
        module = f"{package.name}/{package.module_name(file)}"
        for name, text in docstrings_of(file.read_bytes()):
            if len(text) >= source.minimum_characters:
                documents.append(Document(f"{module}:{name}" if name else module, text, *about))
    return documents


def docstrings_of(content: bytes) -> Iterator[tuple[str, str]]:
    """`(qualified name, docstring)` of a module (name empty) and all it defines.

    A name defined twice, as overloads and conditional definitions are, comes as often as it is.
    A file that is no valid Python of this version yields nothing.
    """
    if b'"""' not in content and b"'''" not in content:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return
    yield from _walk(tree, "")


def _walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            yield name, docstring
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, block, None)
        for child in children if isinstance(children, list) else ():
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _walk(child, f"{name}.{child.name}" if name else child.name)
            else:
                yield from _walk(child, name)


def _cut(files: list[Path]) -> list[list[Path]]:
    firsts = range(0, len(files), FILES_PER_TASK)
    return [files[first : first + FILES_PER_TASK] for first in firsts]


def _license(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [
        line.rsplit("::", 1)[-1].strip()
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    if classifiers:
        return ", ".join(classifiers)
    stated = metadata["License"].strip().splitlines() if "License" in metadata else []
    return stated[0][:80] if stated else "unknown"
