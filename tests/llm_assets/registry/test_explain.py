"""Asking what stands behind a version."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.store.identity import Identity
from artifacts.store.store import Draft, Store
from llm_assets.registry.explain import explain, find_text
from llm_assets.registry.local import LocalRegistry
from tests.llm_assets.registry.conftest import base_entry, entry, verdict
from tests.tiny import tiny_shards, tiny_texts


@pytest.fixture
def store(tmp_path: Path, tiny_model_folder: Path) -> Store:
    """A store with a corpus and its shards."""
    store = Store(str(tmp_path / "store"))
    texts = tiny_texts()

    def corpus(draft: Draft) -> None:
        table = pa.table({"id": [f"manual/{n}" for n in range(len(texts))], "text": texts})
        pq.write_table(table, draft.path / "part-0.parquet")
        draft.stats |= {"documents": len(texts)}

    def shards(draft: Draft) -> None:
        stats = tiny_shards(draft.path, tiny_model_folder, texts)
        draft.stats |= stats.model_dump()

    store.make(Identity(kind="clean_corpus", code_version="7"), corpus)
    store.make(Identity(kind="tokenized_shards", code_version="1", settings={"seed": 3}), shards)
    return store


def test_explanation_goes_down_to_the_text_and_its_rows(store: Store, tmp_path: Path) -> None:
    lineage = {
        "clean_corpus": Identity(kind="clean_corpus", code_version="7").fingerprint,
        "tokenized_shards": Identity(
            kind="tokenized_shards", code_version="1", settings={"seed": 3}
        ).fingerprint,
        "raw_corpus": "gone",
    }
    registry = LocalRegistry(tmp_path, "manual")
    registry.register_base(base_entry())
    candidate = entry("c").model_copy(update={"lineage": lineage})
    version = registry.enter(candidate, verdict("c", "base", promoted=False))
    text = explain(store, registry.state(), version)
    assert "rejected by the gate: Measured against base." in text
    assert f"clean_corpus {lineage['clean_corpus']}" in text and "code version 7" in text
    assert '"seed": 3' in text
    assert "raw_corpus gone (no longer in" in text

    (found,) = find_text(store, version, "Section  9.")
    assert (found.document, found.split, found.shard) == ("manual/9", "held_out", "held_out-00000")
    assert found.rows
    training = find_text(store, version, "Section 1")
    assert training[0].split == "train" and len(training) > 10
    assert find_text(store, version, "nobody wrote this") == []
