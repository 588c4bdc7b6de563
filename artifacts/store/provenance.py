"""Where and by what an artifact was made; recorded beside it, never part of its fingerprint."""

import functools
import os
import platform
import subprocess
from pathlib import Path

REVISION_VARIABLE = "LLM_ASSETS_REVISION"


def provenance() -> dict[str, str]:
    """Python's version and the revision of this code."""
    return {"python": platform.python_version(), "revision": code_revision()}


@functools.cache
def code_revision() -> str:
    """The git commit of this code, with `+changes` where files differ from it.

    An image without a git checkout names its revision in `LLM_ASSETS_REVISION`; without either the
    answer is `unknown`.
    """
    if named := os.environ.get(REVISION_VARIABLE):
        return named
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
