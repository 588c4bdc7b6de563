"""The runs behind a version made once more from the store, without what was forgotten."""

import shutil
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.forgetting.listed import ForgottenDocument, add_to_list, read_list
from llm_assets.forgetting.replay import replay, train_once_more
from llm_assets.registry.local import LocalRegistry
from llm_assets.tracing.lessons import lessons_of, runs_behind
from recipes.data.seen import SEEN_NAME
from recipes.data.trained import TRAINED_NAME
from recipes.spec import METRICS_NAME, MODEL_FOLDER, TrainingSpec, read_metrics
from tests.llm_assets.registry.conftest import base_entry, entry, verdict
from tests.recipes.conftest import settings_of, train_here
from tests.tiny import tiny_shards

STEPS = 20
LATE = (19, 20)
"""The steps after nine tenths of the run."""


class Lab:
    """A store with one version, trained by a real run that kept some of its checkpoints."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.store = Store(str(folder / "store"))
        self.registry = LocalRegistry(Path(self.store.root), "manual")
        made, _ = self.store.make(
            Identity(kind="tokenized_shards", code_version="1"),
            lambda draft: draft.stats.update(tiny_shards(draft.path, model).model_dump()),
        )
        self.stats = ShardStats.model_validate(made.stats)
        inputs = {"tokenized_shards": made.fingerprint}
        training = settings_of(
            steps=STEPS,
            precision="float32",
            learning_rate=3e-3,
            checkpointing={"every_steps": 9, "permanent_every_steps": 9},
        )
        identity = Identity(
            kind="checkpoint", code_version="1", settings=training.content(), inputs=inputs
        )
        self.run = f"{self.store.root}/{layout.run(identity.fingerprint)}"
        self.spec = TrainingSpec(
            run_id=identity.fingerprint,
            shards_folder=made.url,
            shards=self.stats,
            base_model_folder=str(model),
            run_folder=self.run,
            export_folder=str(folder / "unused"),
            training=training,
            inputs=inputs,
        )

        def build(draft: Draft) -> None:
            spec = self.spec.model_copy(update={"export_folder": f"{draft.url}/{MODEL_FOLDER}"})
            spec.write(Path(self.run, "spec.json"))
            draft.stats |= train_here(spec).model_dump()
            for name in (METRICS_NAME, SEEN_NAME, TRAINED_NAME):
                (draft.path / name).write_bytes(Path(self.run, name).read_bytes())

        self.checkpoint, _ = self.store.make(identity, build)
        self.registry.register_base(base_entry())
        candidate = entry("c").model_copy(
            update={
                "model_fingerprint": self.checkpoint.fingerprint,
                "lineage": {"checkpoint": self.checkpoint.fingerprint},
            }
        )
        self.version = self.registry.enter(candidate, verdict("c", "base"))
        self.runs = runs_behind(self.store, self.registry.state(), self.version)
        shards = ShardSet(made.path, self.stats, "train")
        self.texts = [t for s in shards.shards for t in s.documents()["text_hash"].to_pylist()]
        self.never = next(text for text in self.texts if not self.first_step(text))
        self.late = next(text for text in self.texts if self.first_step(text) in LATE)

    def forget(self, text: str) -> None:
        one = ForgottenDocument(id=text, source="s", text_hash=text, by="Ada", reason="asked to")
        add_to_list(self.store, "manual", [one])

    def first_step(self, text: str) -> int:
        """0 where the run never met the text."""
        lessons = lessons_of(self.runs, [text])[text]
        return lessons[0].steps[0] if lessons else 0

    @property
    def record(self) -> Pipeline:
        return Pipeline(self.store, "manual")

    def once_more(self, said: list[str]) -> Artifact:
        state = self.registry.state()
        return train_once_more(self.record, state, self.version.version, train_here, said.append)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Lab:
    return Lab(tmp_path_factory.mktemp("forgetting"), tiny_model_folder)


def test_a_version_is_made_once_more_without_what_was_forgotten(lab: Lab, tmp_path: Path) -> None:
    said: list[str] = []
    lab.forget(lab.never)
    with pytest.raises(UserError, match="Version 1 was trained on nothing that was forgotten"):
        lab.once_more(said)

    lab.forget(lab.late)
    lab.once_more(said)

    assert any("goes on from its checkpoint of step 18;" in line for line in said), said
    assert any("To train: 2 of 20 steps." in line for line in said), said
    made = lab.record.current("checkpoint", needed_by="test")
    trained = read_metrics(Path(lab.store.root, layout.run(made.fingerprint)))
    steps = [line["step"] for line in trained]
    assert steps == [19, 20], "a text first met after 90 % of a run costs a tenth of its steps"
    scratch = lab.spec.model_copy(
        update={
            "run_folder": str(tmp_path / "run"),
            "export_folder": str(tmp_path / "model"),
            "masked": (lab.late, lab.never),
        }
    )
    train_here(scratch)
    weights = "model.safetensors"
    remade = (made.path / MODEL_FOLDER / weights).read_bytes()
    assert remade == (tmp_path / "model" / weights).read_bytes()
    assert remade != (lab.checkpoint.path / MODEL_FOLDER / weights).read_bytes()
    assert made.manifest.inputs.keys() == {"tokenized_shards", "masked"}


def test_without_the_early_checkpoints_it_says_from_where_it_starts_and_why_it_cannot(
    lab: Lab, tmp_path: Path
) -> None:
    said: list[str] = []
    Path(lab.run, "spec.json").rename(tmp_path / "spec.json")
    with pytest.raises(UserError, match=r"version 1 cannot be trained once more: .*spec\.json"):
        replay(lab.store, lab.runs, [lab.late], train_here, said.append)
    (tmp_path / "spec.json").rename(Path(lab.run, "spec.json"))
    for early in (9, 18):
        shutil.rmtree(f"{lab.run}/step-{early}")
    # Without the text's mask nothing is on record under this name yet.
    other = next(t for t in lab.texts if t != lab.late and lab.first_step(t) in range(2, 19))
    replay(lab.store, lab.runs, [other], train_here, said.append)
    told = next(line for line in said if "trained from its beginning, all 20 steps" in line)
    assert "permanent_every_steps" in told


def test_the_list_decides_what_later_corpora_are_made_of(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert read_list(store, "manual").inputs() == {}
    one = ForgottenDocument(id="a", source="s", text_hash="t", by="Ada", reason="asked to")
    copy = ForgottenDocument(id="b", source="s", text_hash=None, by="Ada", reason="asked to")
    add_to_list(store, "manual", [one, copy])
    first = read_list(store, "manual")
    add_to_list(store, "manual", [one])
    assert read_list(store, "manual") == first and first.texts == ["t"]
    assert first.for_cleaning().ids == ("a", "b")
    add_to_list(store, "manual", [one.model_copy(update={"id": "c", "text_hash": "u"})])
    assert read_list(store, "manual").inputs() != first.inputs()
    assert read_list(store, "other").documents == []
