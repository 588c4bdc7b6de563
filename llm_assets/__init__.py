"""The Dagster side: what exists, what it depends on, when it is made and where it runs."""

__all__ = ["LanguageModel"]

try:
    import recipes  # noqa: F401 - only whether it can be
except ModuleNotFoundError as error:
    # torchtune's wheel has a `recipes/__init__.py` too, which only raises. pip installs torchtune
    # before this package, whose file then stands, until torchtune is installed again by itself.
    raise ImportError(
        "torchtune was installed after llm-assets, and its recipes/__init__.py has taken the place "
        "of ours. Install ours again: pip install --force-reinstall --no-deps llm-assets"
    ) from error


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> object:
    """The component, whose import takes Dagster's."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llm_assets.component import LanguageModel

    return LanguageModel
