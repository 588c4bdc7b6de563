"""Approving, rejecting, going back, and asking what stands behind a version."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import UserError
from artifacts.identity import Identity
from artifacts.store import Draft, Store
from llm_assets.gate.settings import GateSettings
from llm_assets.gate.verdict import Outcome, Reason, Verdict
from llm_assets.registry.base import ModelEntry
from llm_assets.registry.decisions import approve, reject, roll_back
from llm_assets.registry.explain import explain, find_text
from llm_assets.registry.local import LocalRegistry
from tests.tiny import tiny_shards, tiny_texts


def entry(model: str, lineage: dict[str, str] | None = None) -> ModelEntry:
    verdict = Verdict(
        promoted=False,
        reasons=[Reason(outcome=Outcome.NOT_BETTER, text="It is not better.")],
        comparisons=[],
        thresholds=GateSettings(),
        evaluation_fingerprint="evaluation",
        judged_before=0,
    )
    return ModelEntry(
        model_fingerprint=model,
        model_url=f"/models/{model}",
        license="Apache-2.0",
        lineage=lineage or {},
        evaluation={"models": {"candidate": model}},
        verdict=verdict,
    )


@pytest.fixture
def registry(tmp_path: Path) -> LocalRegistry:
    registry = LocalRegistry(tmp_path, "manual")
    base = entry("base").model_copy(update={"verdict": None})
    registry.register_base(base)
    registry.register(entry("a"))
    registry.register(entry("b"))
    return registry


def champion(registry: LocalRegistry) -> int:
    found = registry.find("champion")
    assert found is not None
    return found.version


def test_approval_by_name_promotes_and_is_recorded(registry: LocalRegistry) -> None:
    approve(registry, 1, "Ada", "reads well")
    assert champion(registry) == 1
    verdict = registry.get(1).verdict
    assert verdict is not None and verdict.accepted
    assert registry.history()[-1].reason == "approved by Ada: reads well"


def test_rejection_of_the_champion_brings_the_one_before_back(registry: LocalRegistry) -> None:
    approve(registry, 1, "Ada", "reads well")
    approve(registry, 2, "Ada", "reads better")
    reject(registry, 2, "Bo", "it swears")
    assert champion(registry) == 1
    reject(registry, 2, "Bo", "it still does")
    assert champion(registry) == 1


def test_decision_without_name_or_reason_is_refused(registry: LocalRegistry) -> None:
    for name, reason in (("", "why"), ("Ada", " ")):
        with pytest.raises(UserError, match="name and a reason"):
            approve(registry, 1, name, reason)
    assert champion(registry) == 0


def test_roll_back_needs_somewhere_to_go(registry: LocalRegistry) -> None:
    with pytest.raises(UserError, match="no version to go back to"):
        roll_back(registry, "errors")
    approve(registry, 1, "Ada", "reads well")
    assert roll_back(registry, "errors").version == 0
    assert champion(registry) == 0


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


def test_explanation_goes_down_to_the_text_and_its_rows(
    store: Store, registry: LocalRegistry
) -> None:
    lineage = {
        "clean_corpus": Identity(kind="clean_corpus", code_version="7").fingerprint,
        "tokenized_shards": Identity(
            kind="tokenized_shards", code_version="1", settings={"seed": 3}
        ).fingerprint,
        "raw_corpus": "gone",
    }
    version = registry.register(entry("c", lineage))
    text = explain(store, version)
    assert "rejected. It is not better." in text
    assert f"clean_corpus {lineage['clean_corpus']}" in text and "code version 7" in text
    assert '"seed": 3' in text
    assert "raw_corpus gone (no longer in" in text

    (found,) = find_text(store, version, "Section  9.")
    assert (found.document, found.split, found.shard) == ("manual/9", "held_out", "held_out-00000")
    assert found.rows
    training = find_text(store, version, "Section 1")
    assert training[0].split == "train" and len(training) > 10
    assert find_text(store, version, "nobody wrote this") == []
