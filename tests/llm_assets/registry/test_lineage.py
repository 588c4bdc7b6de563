"""What is behind a model, and what it cost."""

from pathlib import Path

from artifacts.store.identity import Identity
from artifacts.store.manifest import COST
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.registry.card import CHOSEN, dollars_of, lineage, procedure


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


def test_facts_that_arrive_are_no_choice_and_how_they_are_told_is_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))

    def candidate(facts: str, forms: str) -> Artifact:
        """Trained on a study of so many facts, whose exam asks about them."""

        def build(draft: Draft) -> None:
            if draft.identity.kind == "study":
                draft.stats[CHOSEN] = {"facts": "facts.csv", "forms": forms}

        behind: dict[str, str] = {}
        for kind in ("exam", "study", "checkpoint"):
            settings = {"facts": facts, "forms": forms} if kind != "checkpoint" else {}
            identity = Identity(kind=kind, code_version="1", settings=settings, inputs=dict(behind))
            made, _ = store.make(identity, build)
            behind[kind] = made.fingerprint
        return made

    weekly = procedure(candidate("a digest", "told so"), {})
    assert procedure(candidate("another digest", "told so"), {}) == weekly
    assert procedure(candidate("a digest", "told otherwise"), {}) != weekly
