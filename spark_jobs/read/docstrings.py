"""Reads the docstrings of installed packages from their source files; nothing is imported."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import UserError
from artifacts.libraries import PYTHON
from artifacts.progress import CountedProgress
from artifacts.store.identity import hash_json
from spark_jobs.read.document import Document
from spark_jobs.read.files.streams import SourceChanged
from spark_jobs.read.opened import Chunks, OpenedSource, group
from spark_jobs.read.settings import PackageDocs


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
    """An installed package, which is not imported; raises UserError where it is not installed, or
    not as Python source."""
    spec = None
    with suppress(ImportError, ValueError):
        # A name with dots is refused: `find_spec` would import the package before the dot.
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec and spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
    elif spec and spec.origin and spec.origin.endswith(".py"):
        root = Path(spec.origin)
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
        # A distribution may have the name of a package that another one installs.
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
    """The packages in the order given, modules in name order; small packages share a chunk. Raises
    as `find_package`, and from reading SourceChanged where a file changed since it was hashed."""
    packages = [find_package(name) for name in source.packages]
    # Before hashing, so that reading notices what changes meanwhile.
    states = {package.name: _state(package) for package in packages}
    hashes = {package.name: fingerprint_package(package) for package in packages}
    chunks = group(
        packages, lambda package: (package.name, sum(size for _, size, _ in states[package.name]))
    )
    # What is not valid Python is left out, and that depends on the version of Python.
    version = platform.python_version()
    keys = [hash_json({"python": version, **{p.name: hashes[p.name] for p in c}}) for c in chunks]

    def read(numbers: list[int]) -> Iterator[tuple[int, Document]]:
        numbered = [(number, package) for number in numbers for package in chunks[number]]
        total = sum(len(states[package.name]) for _, package in numbered)
        progress, done = CountedProgress(report, source.name, total, "source files"), 0
        for number, package in numbered:
            for file in package.source_files():
                module = f"{package.name}/{package.module_name(file)}"
                about = (source.name, package.name, package.version, package.license)
                for name, text in docstrings_of(file.read_bytes()):
                    if len(text) >= source.minimum_characters:
                        yield number, Document(f"{module}:{name}" if name else module, text, *about)
                done += 1
                progress.advance(done)
            if _state(package) != states[package.name]:
                raise SourceChanged(f"the package {package.name} changed while it was read")

    fingerprints = {f"{source.name}/{name}": digest for name, digest in hashes.items()}
    return OpenedSource(fingerprints, lambda: Chunks(keys, read), libraries=frozenset({PYTHON}))


def _state(package: Package) -> list[tuple[str, int, int]]:
    """Differs whenever a source file was written since."""
    files = ((file, file.stat()) for file in package.source_files())
    return [(str(file), status.st_size, status.st_mtime_ns) for file, status in files]


def docstrings_of(content: bytes) -> Iterator[tuple[str, str]]:
    """`(qualified name, docstring)` of a module (empty name) and of all that it defines.

    A name that is defined several times, such as an overload, comes as often.
    A file that is no valid Python of this version yields nothing.
    """
    if b'"""' not in content and b"'''" not in content:
        return
    try:
        with warnings.catch_warnings():
            # Python warns of each invalid escape in the package's strings.
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
    # Definitions also stand under `if`, `try` and `match`, as of optional dependencies.
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, block, None)
        for child in children if isinstance(children, list) else ():
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _walk(child, f"{name}.{child.name}" if name else child.name)
            else:
                yield from _walk(child, name)


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
