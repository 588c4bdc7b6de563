"""The Dagster side: what exists, what it depends on, when it is made and where it runs."""

try:
    import recipes  # noqa: F401 - only whether it can be
except ModuleNotFoundError as error:
    # torchtune's wheel has a `recipes/__init__.py` too, which only raises. pip installs torchtune
    # before this package, whose file then stands, until torchtune is installed again by itself.
    raise ImportError(
        "torchtune was installed after llm-assets, and its recipes/__init__.py has taken the place "
        "of ours. Install ours again: pip install --force-reinstall --no-deps llm-assets"
    ) from error
