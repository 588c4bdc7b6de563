"""Asking what stands behind a version."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from artifacts.store.identity import Identity
from artifacts.store.layout import RETIRED_FOLDER
from artifacts.store.store import Draft, Store
from llm_assets.maintenance.retention import Removal, remove
from llm_assets.registry.local import LocalRegistry
from llm_assets.tracing.explain import explain, find_text
from recipes.data.trained import TRAINED_NAME, record_trained
from tests.llm_assets.registry.conftest import base_entry, entry, verdict
from tests.tiny import tiny_shards, tiny_texts

SHARDS = Identity(kind="tokenized_shards", code_version="1", settings={"seed": 3})
CHECKPOINT = Identity(kind="checkpoint", code_version="1")


@pytest.fixture
def store(tmp_path: Path, tiny_model_folder: Path) -> Store:
    """A store with a corpus and its shards."""
    store = Store(str(tmp_path / "store"))
    texts = tiny_texts()

    def corpus(draft: Draft) -> None:
        numbers = range(len(texts))
        split = {8: "validation", 9: "held_out"}
        columns = {
            "id": [f"manual/{number}" for number in numbers],
            "text": texts,
            "source": ["manual"] * len(texts),
            "split": [split.get(number % 10, "train") for number in numbers],
            "text_hash": [f"text-{number}" for number in numbers],
        }
        table = pa.table(columns)
        pq.write_table(table, draft.path / "part-0.parquet")
        draft.stats |= {"documents": len(texts)}

    def shards(draft: Draft) -> None:
        stats = tiny_shards(draft.path, tiny_model_folder, texts)
        draft.stats |= stats.model_dump()

    store.make(Identity(kind="clean_corpus", code_version="7"), corpus)
    made, _ = store.make(SHARDS, shards)

    def checkpoint(draft: Draft) -> None:
        train = ShardSet(made.path, ShardStats.model_validate(made.stats), "train")
        steps = np.array([1, 1, 2, 3])
        record_trained(train, np.arange(4), steps, str(draft.path / TRAINED_NAME))

    store.make(CHECKPOINT, checkpoint)
    return store


def test_explanation_goes_down_to_the_text_and_its_rows(store: Store, tmp_path: Path) -> None:
    lineage = {
        "clean_corpus": Identity(kind="clean_corpus", code_version="7").fingerprint,
        "tokenized_shards": SHARDS.fingerprint,
        "checkpoint": CHECKPOINT.fingerprint,
        "raw_corpus": "gone",
    }
    registry = LocalRegistry(tmp_path, "manual")
    registry.register_base(base_entry())
    candidate = entry("c").model_copy(
        update={"lineage": lineage, "model_fingerprint": CHECKPOINT.fingerprint, "coverage": 0.013}
    )
    version = registry.enter(candidate, verdict("c", "base", promoted=False))
    text = explain(store, registry.state(), version)
    assert "rejected by the gate: Measured against base." in text
    assert f"clean_corpus {lineage['clean_corpus']}" in text and "code version 7" in text
    assert "seed: 3" in text and "trained on 1.3 % of the text" in text
    assert "raw_corpus gone (no longer in" in text

    state = registry.state()
    (held_out,) = find_text(store, state, version, "Section  9.")
    assert str(held_out) == "manual/9 (manual): held out text, never trained on"
    found = find_text(store, state, version, "Section")
    assert found[0].lessons and found[0].split == "train" and len(found) == 120
    (lesson,) = found[0].lessons
    assert lesson.run.version == 1 and set(lesson.steps) <= {1, 2, 3}
    assert "trained on by version 1 at step" in str(found[0])
    assert str(found[-1]).endswith("never trained on") and not found[-1].lessons
    assert find_text(store, state, version, "nobody wrote this") == []

    name = ("checkpoint", CHECKPOINT.fingerprint)
    remove(store, [Removal("/".join(name), "", 0, name, explains=True)])
    after = find_text(store, state, version, "Section")
    assert [one.lessons[0].steps for one in after if one.lessons] == [
        one.lessons[0].steps for one in found if one.lessons
    ], "the record outlives the weights"
    Path(store.root, RETIRED_FOLDER, *name, TRAINED_NAME).unlink()
    assert "no record of version 1" in str(find_text(store, state, version, "Section")[0])
