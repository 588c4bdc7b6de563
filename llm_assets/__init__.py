"""The Dagster side: what exists, what it depends on, when it is made and where it runs."""

import os
from pathlib import Path

__all__ = ["LanguageModel"]

try:
    import recipes  # noqa: F401 - only whether it can be
except ModuleNotFoundError as error:
    # torchtune's wheel has a `recipes/__init__.py` too, which only raises and which nothing reads.
    # uv installs packages side by side, so chance decides whose file remains: it has to be ours.
    place = Path(__file__).parents[1] / "recipes" / "__init__.py"
    try:
        if "torchtune" not in place.read_text():
            raise
        # Each process writes a file of its own and moves it into place in one step: several may
        # import this at the same time.
        own = place.with_suffix(f".{os.getpid()}")
        own.write_text('"""The recipes of llm-assets."""\n')
        os.replace(own, place)
    except OSError:
        raise ImportError(
            f"torchtune was installed after llm-assets, and its {place} has taken the place of "
            "ours. Install ours again: pip install --force-reinstall --no-deps llm-assets"
        ) from error


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> object:
    """Import the component on first use: it takes Dagster's import, which is slow."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llm_assets.component import LanguageModel

    return LanguageModel
