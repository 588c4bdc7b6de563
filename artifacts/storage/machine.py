"""Folders of this machine that its other users may not look into."""

import os
from pathlib import Path

CACHE_VARIABLE = "LLM_ASSETS_CACHE"
"""Where files of a store in the cloud are kept on this machine; `~/.cache/llm_assets` if absent."""


def make_private(folder: Path) -> Path:
    """Make a folder that its owner alone may enter; one that exists stays as its owner set it."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def cache_folder() -> Path:
    """Where this machine keeps what belongs to stores in the cloud; its owner's alone."""
    named = os.environ.get(CACHE_VARIABLE)
    return make_private(Path(named) if named else Path.home() / ".cache" / "llm_assets")
