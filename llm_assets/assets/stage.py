"""What every asset of the graph has in common."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dagster import (
    AssetKey,
    AssetsDefinition,
    DataVersion,
    Failure,
    MarkdownMetadataValue,
    MaterializeResult,
    MetadataValue,
    asset,
)

from artifacts.program.temporary import use_own_temporary_folder
from artifacts.reasons import reason_of
from artifacts.shown import shown_in_line
from artifacts.store.store import Artifact
from llm_assets.config import PipelineSettings
from llm_assets.pipeline import PipelineResource

INTERRUPTIONS = ("DagsterExecutionInterruptedError", "KeyboardInterrupt")
BUCKETS = "https://console.cloud.google.com/storage/browser"
_MARKDOWN = re.compile(r"[\\`*\[\]|!#~]|(?<!\w)_|_(?!\w)")
"""Characters by which Markdown formats, links or ends a cell; not the `_` within a name."""


def stage(**asset_arguments: Any) -> Callable[[Callable[..., Any]], AssetsDefinition]:
    """`dagster.asset` whose foreseeable faults end the step with their message alone."""

    def decorate(function: Callable[..., Any]) -> AssetsDefinition:
        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            use_own_temporary_folder()
            with user_faults(keywords.get("pipeline")):
                return function(*arguments, **keywords)

        return asset(**asset_arguments)(run)

    return decorate


@contextmanager
def user_faults(pipeline: PipelineResource | None = None) -> Iterator[None]:
    """Turn what has a known reason into a Dagster failure that says it, never retried.

    Where an error names no file, the pipeline's store is what was written to.

    Such a failure carries no stack trace: it would bury the message, which has what to do. What is
    not known keeps its trace.
    """
    vars(sys).pop("tracebacklimit", None)
    try:
        yield
    except Exception as error:
        # Which errors have a known reason, `reason_of` tells.
        store = pipeline.settings.store if pipeline and isinstance(error, OSError) else "."
        reason = reason_of(error, "." if "://" in store else store)
        if reason is None:
            raise
        sys.tracebacklimit = 0
        raise Failure(description=reason, allow_retries=False) from None


def was_interrupted(failure: Any) -> bool:
    """Whether a step failed because somebody ended it, from its failure event's data."""
    return bool(failure.error and failure.error.cls_name in INTERRUPTIONS)


def failure_reason(failure: Any) -> str:
    """Why a step failed, from its failure event's data; Dagster's own error names only the step."""
    if failure.user_failure_data and failure.user_failure_data.description:
        return failure.user_failure_data.description
    error = failure.error
    if error is None:
        return "failed without a reason"
    while error.cause or error.context:
        error = error.cause or error.context
    return str(error.message).strip()


def asset_key(settings: PipelineSettings, name: str) -> AssetKey:
    """The key of one of the pipeline's assets."""
    return AssetKey([settings.key_prefix, name] if settings.key_prefix else [name])


def materialization(artifact: Artifact, metadata: Mapping[str, Any]) -> MaterializeResult:
    """The result of a stage: its fingerprint is the data version."""
    told: dict[str, Any] = {
        "fingerprint": artifact.fingerprint,
        "folder": folder_link(artifact.url),
        "bytes_stored": sum(entry.bytes for entry in artifact.manifest.files),
    }
    # In this order the UI shows them: what was made before where it lies.
    return MaterializeResult(
        data_version=DataVersion(artifact.fingerprint), metadata=readable(metadata) | told
    )


def readable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata whose figures have six digits; the manifest has them all."""
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in metadata.items()
    }


def folder_link(url: str) -> MetadataValue:
    """A folder of the store: a path to copy, or Google's page of a bucket's folder."""
    if url.startswith("gs://"):
        return MetadataValue.url(f"{BUCKETS}/{url.removeprefix('gs://')}")
    return MetadataValue.path(from_here(url))


def from_here(url: str) -> str:
    """A path within the project as its commands take it: a whole one is too long for the UI."""
    here = f"{os.getcwd()}/"
    return url.removeprefix(here)


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> MarkdownMetadataValue:
    """A table for the UI; `none` where it has no rows."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    filled = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return MetadataValue.md("\n".join([*lines, *filled]) if filled else "none")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else escape_markdown(str(value))


def escape_markdown(text: str) -> str:
    """Untrusted text as one line of Markdown that shows it and does nothing."""
    return _MARKDOWN.sub(r"\\\g<0>", shown_in_line(text)).replace("<", "&lt;").replace(">", "&gt;")
