"""When the versions of a lineage were trained on a text, by the records of their runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.texts import text_numbers
from artifacts.store.store import Store
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.retired import find_manifest, find_record
from llm_assets.registry.start import START_INPUT
from llm_assets.registry.state import RegistryState
from recipes.data.trained import TRAINED_NAME, TRAINED_SCHEMA, read_trained

Reader = Callable[[str, Sequence[int] | np.ndarray], pa.Table]
"""Gives the records of some texts, of a run whose `trained.parquet` lies at a URL."""
_STEPS_SHOWN = 8
_STRETCH_SCHEMA = pa.schema(
    [("record", pa.int64()), *(TRAINED_SCHEMA.field(name) for name in ("text", "start", "end"))]
)


@dataclass(frozen=True)
class Run:
    """A training run behind a version."""

    checkpoint: str
    """Fingerprint."""
    version: int | None
    """The version whose weights it made; None where these were never registered."""
    record: str | None
    """URL of `trained.parquet`; None where it is gone, so that nobody knows."""

    @property
    def name(self) -> str:
        return (
            f"checkpoint {self.checkpoint}" if self.version is None else f"version {self.version}"
        )


@dataclass(frozen=True)
class Lesson:
    """That a run was trained on a text."""

    run: Run
    steps: list[int]
    """Those whose weights' update it was part of, in order, counted from 1."""
    rows: list[int]
    """Numbers among the rows of the run, in order."""
    tokens: int
    """How many of its tokens were read, each as often as it was."""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.steps[:_STEPS_SHOWN]))
        left = len(self.steps) - _STEPS_SHOWN
        more = f" and {left} more" if left > 0 else ""
        noun = "step" if len(self.steps) == 1 else "steps"
        return f"{self.run.name} at {noun} {shown}{more} ({self.tokens:,} tokens)"


def runs_behind(store: Store, state: RegistryState, version: ModelVersion) -> list[Run]:
    """The runs that a version's weights went through, oldest first; none for a base model."""
    runs = []
    fingerprint: str | None = version.model_fingerprint
    while fingerprint:
        manifest = find_manifest(store, "checkpoint", fingerprint)
        if manifest is None:
            if version.lineage.get("checkpoint") == fingerprint:
                runs.append(_run(store, state, fingerprint))
            break
        runs.append(_run(store, state, fingerprint))
        fingerprint = manifest.inputs.get(START_INPUT)
    return runs[::-1]


def all_runs(store: Store, state: RegistryState) -> list[Run]:
    """The runs behind all registered versions, each once, those of older versions first."""
    runs = (run for version in state.versions for run in runs_behind(store, state, version))
    return list({run.checkpoint: run for run in runs}.values())


def lessons_of(runs: Sequence[Run], text_hashes: Sequence[str]) -> dict[str, list[Lesson]]:
    """What the runs were trained on of each text, those that were not left out.

    Args:
        text_hashes: of the texts, as the clean corpus and the shards have them.
    """
    numbers = text_numbers(text_hashes).tolist()
    found = lessons_by_text(runs, numbers)
    return {one: found[number] for one, number in zip(text_hashes, numbers, strict=True)}


def lessons_by_text(
    runs: Sequence[Run], texts: Sequence[int], read: Reader = read_trained
) -> dict[int, list[Lesson]]:
    """The same of texts as `artifacts.shards.texts` numbers them.

    Args:
        read: gives the records of some texts, as `read_trained` does.
    """
    found: dict[int, list[Lesson]] = {text: [] for text in texts}
    for run in runs:
        if run.record:
            for text, lesson in _lessons(run, read(run.record, texts)):
                found[text].append(lesson)
    return found


def stretches_of(
    records: Sequence[str], texts: Sequence[int] | np.ndarray, read: Reader = read_trained
) -> pa.Table:
    """The stretches that were trained on of some texts, each once.

    Args:
        records: URLs of `trained.parquet`.
        texts: as `artifacts.shards.texts` numbers them.
        read: gives the records of some texts, as `read_trained` does.

    Returns:
        `record` (its place among them), `text`, `start` and `end`.
    """
    found = [_STRETCH_SCHEMA.empty_table()]
    for number, url in enumerate(records):
        table = read(url, texts).select(_STRETCH_SCHEMA.names[1:])
        found.append(table.add_column(0, "record", pa.repeat(number, table.num_rows)))
    return pa.concat_tables(found).group_by(_STRETCH_SCHEMA.names).aggregate([])


def _lessons(run: Run, table: pa.Table) -> Iterator[tuple[int, Lesson]]:
    for text in table["text"].unique().to_pylist():
        of_text = table.filter(pc.equal(table["text"], pa.scalar(text, pa.uint64())))
        tokens = pc.sum(pc.subtract(of_text["end"], of_text["start"])).as_py()
        steps, rows = (np.unique(of_text[name].to_numpy()).tolist() for name in ("step", "row"))
        yield text, Lesson(run, steps, rows, tokens)


def _run(store: Store, state: RegistryState, checkpoint: str) -> Run:
    versions = (one for one in state.versions if one.model_fingerprint == checkpoint)
    version = next((one.version for one in versions), None)
    return Run(checkpoint, version, find_record(store, checkpoint, TRAINED_NAME))
