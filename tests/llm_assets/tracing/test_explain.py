"""Asking what stands behind a version."""

from pathlib import Path

from artifacts.store.identity import Identity
from artifacts.store.layout import RETIRED_FOLDER
from llm_assets.maintenance.cleaning import Removal, remove
from llm_assets.tracing.explain import Exposure, explain, find_passages
from recipes.data.records import TRAINED_NAME
from recipes.spec import read_metrics
from tests.llm_assets.trained_store import TrainedStore
from tests.tiny import tiny_texts


def test_explanation_goes_down_to_the_text_and_its_rows(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    trained = TrainedStore(tmp_path, tiny_model_folder, tiny_texts())
    version = trained.train(steps=3)
    store, state = trained.store, trained.registry.state()
    kinds = {f".{kind}": 2 for kind in ("bak", "doc", "dwg", "jpg", "mov", "msg", "png")}
    read = Identity(kind="raw_corpus", code_version="2")
    stats = {"unread": kinds, "unread_examples": {".doc": ["plan.doc"]}}
    raw, _ = store.make(read, lambda draft: draft.stats.update(stats))
    lineage = version.lineage | {"raw_corpus": raw.fingerprint}
    told = explain(store, state, version.model_copy(update={"lineage": lineage}))
    assert all(f"  unread.{kind}: 2\n" in told for kind in kinds) and "plan.doc" not in told
    lineage = version.lineage | {"raw_corpus": "gone"}
    version = version.model_copy(update={"lineage": lineage, "coverage": 0.013})
    text = explain(store, state, version)
    assert "promoted by the gate: Measured against base." in text
    assert f"clean_corpus {lineage['clean_corpus']}, made " in text and "code version 1" in text
    assert "budget.steps: 3" in text and "trained on 1.3% of the training split" in text
    assert "raw_corpus gone (no longer in" in text
    lines = read_metrics(store.folder_url("checkpoint", version.model_fingerprint))
    assert f"training_seconds: {sum(line['seconds'] for line in lines)}" in text

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

    name = ("checkpoint", version.model_fingerprint)
    remove(store, [Removal("/".join(name), "nothing needs it", 0, name, explains=True)])
    # In another order: without the tokenizer nobody knows which passages were read.
    steps = {one.document: one.lessons[0].steps for one in found if one.lessons}
    assert steps == {
        one.document: one.lessons[0].steps for one in find("Section") if one.lessons
    }, "the record outlives the weights"
    told = explain(store, state, version)
    assert f"checkpoint {name[1]} was removed on " in told
    assert " by `llm-assets clean` (nothing needs it)" in told
    Path(store.root, RETIRED_FOLDER, *name, TRAINED_NAME).unlink()
    assert "no record of version 1" in str(find("Section")[0])
