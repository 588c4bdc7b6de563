"""What runs were trained on, read from rows, beside all that the project itself says of it."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from artifacts.store import layout
from recipes.spec import SPEC_NAME, TrainingSpec


class Oracle:
    """Reads the rows that each run wrote down (`audit_rows`), and what stands in them.

    A document is known by its name, with which each of its words begins (`story`).
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._names_of: dict[str, set[str]] = {}
        self.started_from: dict[str, str | None] = {}
        """Run to the run whose weights it went on from."""
        self.steps: dict[str, dict[str, set[int]]] = {}
        """Run to the steps that each document was in."""

    def look(self) -> list[str]:
        """Read the runs that are new; their names."""
        for path in self._store.glob("clean_corpus/*/**/part-*.parquet"):
            for row in pq.read_table(path, columns=["text_hash", "text"]).to_pylist():
                self._names_of[row["text_hash"]] = names_in(row["text"])
        new = []
        for path in self._store.glob(f"checkpoint/*/{layout.MANIFEST_NAME}"):
            run = path.parent.name
            if run not in self.steps and (self._store / layout.run(run)).exists():
                self.started_from[run] = json.loads(path.read_bytes())["inputs"].get("start")
                self.steps[run] = self._read(self._store / layout.run(run))
                new.append(run)
        return new

    def _read(self, folder: Path) -> dict[str, set[int]]:
        spec = TrainingSpec.model_validate_json((folder / SPEC_NAME).read_text())
        shards = spec.open_shards("train")
        tokenizer = AutoTokenizer.from_pretrained(spec.base_model_folder)
        steps: dict[str, set[int]] = defaultdict(set)
        for line in map(json.loads, (folder / "rows-0.jsonl").read_text().splitlines()):
            for row in line["rows"]:
                tokens, segments = shards[row]
                names = names_in(tokenizer.decode(tokens))
                place = int(np.searchsorted(shards.ends, row, side="right"))
                texts = shards.shard(place).documents(["text_hash"])["text_hash"].to_pylist()
                marked = {n for s in segments for n in self._names_of[texts[s["document"]]]}
                assert names <= marked, "every text in a row is marked as what it is"
                for name in marked:
                    steps[name].add(line["step"])
        return steps

    def lineage(self, run: str | None) -> Iterator[str]:
        """The runs behind a checkpoint, newest first."""
        while run in self.steps:
            yield run
            run = self.started_from[run]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{6}(?=\d)", text))
