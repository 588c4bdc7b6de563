"""Another release of an installed library, as a folder that goes first on the path."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import Project


def release(folder: Path, name: str, version: str, code: str = "") -> Path:
    """A copy of a library under another version, some code added at the end of its package."""
    found = importlib.metadata.distribution(name)
    package = Path(str(found.locate_file(name)))
    shutil.copytree(package, folder / name)
    with (folder / name / "__init__.py").open("a") as file:
        file.write(f"\n{code}\n")
    number_as(folder, name, version)
    return folder


def number_as(folder: Path, name: str, version: str) -> None:
    """Let a release say of itself that it has a version."""
    about = folder / f"{name}-{version}.dist-info"
    for other in folder.glob(f"{name}-*.dist-info"):
        other.rename(about)
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def start(project: Project, release: Path, *command: str) -> subprocess.Popen[str]:
    """Start a command, as a user does, in an environment that holds a release."""
    environment = project.environment() | {"PYTHONPATH": str(release)}
    return subprocess.Popen(
        [str(Path(sys.executable).with_name(command[0])), *command[1:]],
        cwd=project.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(project: Project, release: Path, *command: str) -> str:
    """What a command says that ends well."""
    process = start(project, release, *command)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    return said


def materialize(project: Project, release: Path, select: str) -> str:
    return run(project, release, "dagster", "asset", "materialize", "--select", select)
