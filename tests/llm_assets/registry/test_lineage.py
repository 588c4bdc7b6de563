"""What is behind a model, and what it cost."""

from pathlib import Path

from artifacts.store.identity import Identity
from artifacts.store.manifest import COST
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.registry.card import dollars_of, lineage


def test_a_model_costs_what_all_behind_it_cost_each_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))

    def made(kind: str, dollars: float | None, *inputs: Artifact) -> Artifact:
        def build(draft: Draft) -> None:
            if dollars is not None:
                draft.provenance[COST] = dollars

        behind = {one.manifest.kind: one.fingerprint for one in inputs}
        return store.make(Identity(kind=kind, code_version="1", inputs=behind), build)[0]

    base = made("base_model", None)
    assert dollars_of(base) is None, "made on one's own machine"
    shards = made("tokenized_shards", 0.5, base)
    checkpoint = made("checkpoint", 4.0, shards, base)
    evaluation = made("eval_metrics", 0.25, checkpoint, shards)
    assert lineage(evaluation).keys() == {
        "eval_metrics",
        "checkpoint",
        "tokenized_shards",
        "base_model",
    }
    assert dollars_of(evaluation) == 4.75
