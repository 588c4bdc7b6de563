"""Asking what stands behind a version."""

from pathlib import Path

import numpy as np
import pytest

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from artifacts.store.identity import Identity
from artifacts.store.layout import RETIRED_FOLDER
from artifacts.store.store import Draft, Store
from llm_assets.maintenance.cleaning import Removal, remove
from llm_assets.registry.base import LocalRegistry
from llm_assets.tracing.explain import explain
from llm_assets.tracing.passages import Exposure, find_passages
from recipes.data.records import TRAINED_NAME, record_trained
from tests.llm_assets.registry.conftest import base_entry, entry, verdict
from tests.llm_assets.trained_store import write_clean
from tests.tiny import tiny_shards, tiny_texts

CORPUS = Identity(kind="clean_corpus", code_version="7")
SHARDS = Identity(
    kind="tokenized_shards",
    code_version="1",
    settings={"seed": 3},
    inputs={"clean_corpus": CORPUS.fingerprint},
)
CHECKPOINT = Identity(
    kind="checkpoint", code_version="1", inputs={"tokenized_shards": SHARDS.fingerprint}
)


@pytest.fixture
def store(tmp_path: Path, tiny_model_folder: Path) -> Store:
    """A store with a corpus and its shards."""
    store = Store(str(tmp_path / "store"))
    texts = tiny_texts()

    def shards(draft: Draft) -> None:
        stats = tiny_shards(draft.path, tiny_model_folder, texts)
        draft.stats |= stats.model_dump()

    store.make(CORPUS, lambda draft: write_clean(draft, texts))
    made, _ = store.make(SHARDS, shards)

    def checkpoint(draft: Draft) -> None:
        train = ShardSet(made.path, ShardStats.model_validate(made.stats), "train")
        steps = np.array([1, 1, 2, 3])
        record_trained(train, np.arange(4), steps, str(draft.path / TRAINED_NAME))

    store.make(CHECKPOINT, checkpoint)
    return store


def test_explanation_goes_down_to_the_text_and_its_rows(store: Store, tmp_path: Path) -> None:
    lineage = {
        "clean_corpus": CORPUS.fingerprint,
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
    assert "seed: 3" in text and "trained on 1.3% of the training split" in text
    assert "raw_corpus gone (no longer in" in text

    state = registry.state()

    def find(text: str) -> list[Exposure]:
        return find_passages(store, state, version, text).documents

    (held_out,) = find("Section  9.")
    assert str(held_out) == "manual/9 (manual): held out text, never trained on"
    found = find("Section")
    assert found[0].lessons and found[0].split == "train" and len(found) == 120
    (lesson,) = found[0].lessons
    assert lesson.run.version == 1 and set(lesson.steps) <= {1, 2, 3}
    assert "trained on by version 1 at step" in str(found[0])
    assert str(found[-1]).endswith("never trained on") and not found[-1].lessons
    assert find("nobody wrote this") == []

    name = ("checkpoint", CHECKPOINT.fingerprint)
    remove(store, [Removal("/".join(name), "nothing needs it", 0, name, explains=True)])
    assert [one.lessons[0].steps for one in find("Section") if one.lessons] == [
        one.lessons[0].steps for one in found if one.lessons
    ], "the record outlives the weights"
    told = explain(store, state, version)
    assert f"checkpoint {name[1]} was removed on " in told
    assert " by `llm-assets clean` (nothing needs it)" in told
    Path(store.root, RETIRED_FOLDER, *name, TRAINED_NAME).unlink()
    assert "no record of version 1" in str(find("Section")[0])
