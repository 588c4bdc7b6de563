"""The files beside a pipeline file that make a folder a project of its own."""

from pathlib import Path

TEMPLATES = Path(__file__).with_name("project_files")
FILES = {
    "dagster.yaml": "dagster.yaml",
    "workspace.yaml": "workspace.yaml",
    "env.sh": "env.sh",
    "README.md": "README.md",
    "gitignore.txt": ".gitignore",
}
"""Template to the file's name in the project."""


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
