"""A store with versions that real runs have trained, each from the one before."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Draft, Store
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.start import START_INPUT
from llm_assets.registry.state import ModelVersion
from llm_assets.runners.training import train_into
from llm_assets.tracing.training_text import lessons_of, runs_behind
from recipes.data.records import SEEN_NAME
from recipes.spec import MODEL_FOLDER, SPEC_NAME, TrainingSpec
from tests.llm_assets.registry.conftest import base_entry, entry, verdict
from tests.recipes.conftest import settings_of, train_here
from tests.tiny import tiny_shards

LICENSE = "CC-BY-4.0"


class TrainedStore:
    """The store, its registry, and its text; versions come with `train`."""

    def __init__(self, folder: Path, model: Path, texts: Sequence[str]) -> None:
        self.store = Store(str(folder / "store"))
        self.record = Pipeline(self.store, "manual")
        self.registry = LocalRegistry(Path(self.store.root), "manual")
        self._model, self._texts = model, texts
        raw = self._make("raw_corpus", {}, lambda draft: write_raw(draft, texts))
        self._clean = self._make(
            "clean_corpus", {"raw_corpus": raw}, lambda draft: write_clean(draft, texts)
        )
        self.cut(2)
        self.registry.register_base(base_entry())

    def cut(self, shards_per_split: int) -> None:
        """Pack the text into so many shards, which the next version is trained on."""

        def write(draft: Draft) -> None:
            stats = tiny_shards(
                draft.path, self._model, self._texts, shards_per_split=shards_per_split
            )
            draft.stats.update(stats.model_dump())

        inputs = {"clean_corpus": self._clean, "cut": str(shards_per_split)}
        self._shards = self.store.load(
            "tokenized_shards", self._make("tokenized_shards", inputs, write)
        )

    def train(self, **training: object) -> ModelVersion:
        """The version of a real run from the newest version on; it serves."""
        start = self.registry.state().versions[-1]
        inputs = {"tokenized_shards": self._shards.fingerprint}
        changes = {"base_model_folder": str(self._model)}
        if not start.is_base:
            folder = self.store.folder_url("checkpoint", start.model_fingerprint)
            inputs = inputs | {START_INPUT: start.model_fingerprint}
            changes = {
                "base_model_folder": f"{folder}/{MODEL_FOLDER}",
                "seen": f"{folder}/{SEEN_NAME}",
            }
        settings = settings_of(precision="float32", learning_rate=3e-3, **training)
        identity = Identity(
            kind="checkpoint", code_version="1", settings=settings.content(), inputs=inputs
        )
        spec = TrainingSpec(
            run_id=identity.fingerprint,
            shards_folder=self._shards.url,
            shards=ShardStats.model_validate(self._shards.stats),
            run_folder=f"{self.store.root}/{layout.run(identity.fingerprint)}",
            export_folder="",
            training=settings,
            inputs=inputs,
            **changes,
        )

        def build(draft: Draft) -> None:
            ours = spec.model_copy(update={"export_folder": f"{draft.url}/{MODEL_FOLDER}"})
            train_into(self.store, draft, ours, train_here)

        made, _ = self.store.make(identity, build)
        name = f"weights-{start.version + 1}"
        candidate = entry(name).model_copy(
            update={
                "model_fingerprint": made.fingerprint,
                "lineage": {
                    "checkpoint": made.fingerprint,
                    "tokenized_shards": self._shards.fingerprint,
                    "clean_corpus": self._clean,
                },
            }
        )
        version = self.registry.enter(candidate, verdict(name, start.weights))
        self.registry.confirm(version.version)
        return version

    def spec(self, version: ModelVersion) -> TrainingSpec:
        """What its run was given."""
        folder = self.run_folder(version.model_fingerprint)
        return TrainingSpec.model_validate_json((folder / SPEC_NAME).read_bytes())

    def run_folder(self, checkpoint: str) -> Path:
        return Path(self.store.root, layout.run(checkpoint))

    def first_step(self, version: ModelVersion, text: str) -> int:
        """The first step of its run, or of those before it, that met a text; 0 for none."""
        runs = runs_behind(self.store, self.registry.state(), version)
        lessons = lessons_of(runs, [text])[text]
        return lessons[0].steps[0] if lessons else 0

    @property
    def texts(self) -> list[str]:
        """Hashes of the texts that may be trained on."""
        stats = ShardStats.model_validate(self._shards.stats)
        shards = ShardSet(self._shards.url, stats, "train").shards
        return [text for shard in shards for text in shard.documents()["text_hash"].to_pylist()]

    def _make(self, kind: str, inputs: dict[str, str], build) -> str:
        identity = Identity(kind=kind, code_version="1", inputs=inputs)
        return self.store.make(identity, build)[0].fingerprint


def write_raw(draft: Draft, texts: Sequence[str]) -> None:
    ids = [f"manual/{number}" for number in range(len(texts))]
    columns = {"id": ids, "text": texts, "source": ["manual"] * len(ids)}
    table = pa.table(columns | {"license": [LICENSE] * len(ids)})
    pq.write_table(table, draft.path / "part-00000.parquet")


def write_clean(draft: Draft, texts: Sequence[str]) -> None:
    """A clean corpus of the documents that `tests.tiny.tiny_shards` makes of texts."""
    numbers, split = range(len(texts)), {8: "validation", 9: "held_out"}
    columns = {
        "id": [f"manual/{number}" for number in numbers],
        "text": texts,
        "source": ["manual"] * len(texts),
        "split": [split.get(number % 10, "train") for number in numbers],
        "text_hash": [f"text-{number}" for number in numbers],
        "cluster": [f"text-{number}" for number in numbers],
    }
    pq.write_table(pa.table(columns), draft.path / "part-00000.parquet")
    draft.stats |= {
        "documents": len(texts),
        "dropped": {"too_short": 1},
        "length_histogram": {"64": len(texts)},
        "splits": {"train": len(texts)},
    }
