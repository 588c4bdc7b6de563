"""What every asset of the graph has in common."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dagster import (
    AssetsDefinition,
    DataVersion,
    Failure,
    MarkdownMetadataValue,
    MaterializeResult,
    MetadataValue,
    asset,
)

from artifacts.errors import UserError
from artifacts.store import Artifact


def stage(**asset_arguments: Any) -> Callable[[Callable[..., Any]], AssetsDefinition]:
    """`dagster.asset` whose user faults end the step with their message alone."""

    def decorate(function: Callable[..., Any]) -> AssetsDefinition:
        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with user_faults():
                return function(*arguments, **keywords)

        return asset(**asset_arguments)(run)

    return decorate


@contextmanager
def user_faults() -> Iterator[None]:
    """Turn a user's mistake into a Dagster failure with a clear message, never retried."""
    try:
        yield
    except UserError as error:
        raise Failure(description=str(error), allow_retries=False) from None


def materialization(artifact: Artifact, metadata: Mapping[str, Any]) -> MaterializeResult:
    """The result of a stage: its fingerprint is the data version."""
    return MaterializeResult(
        data_version=DataVersion(artifact.fingerprint),
        metadata={"fingerprint": artifact.fingerprint, "folder": artifact.url} | dict(metadata),
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> MarkdownMetadataValue:
    """A table for the UI."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return MetadataValue.md("\n".join(lines))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")
