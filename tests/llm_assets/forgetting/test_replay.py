"""The runs behind a version made once more from the store, without what was forgotten."""

import json
import shutil
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.store.store import Artifact, Store
from llm_assets.forgetting.certificate import replacements
from llm_assets.forgetting.forgotten_list import ForgottenDocument, add_to_list, read_list
from llm_assets.forgetting.replay import check_replay, replay, train_once_more
from llm_assets.registry.start import retire
from llm_assets.registry.state import ModelVersion
from llm_assets.runners.training import Train
from llm_assets.tracing.training_text import TrainingRun, lessons_of, runs_behind
from recipes.spec import MODEL_FOLDER, SPEC_NAME, TrainingResult, TrainingSpec, read_metrics
from tests.llm_assets.trained_store import TrainedStore
from tests.recipes.conftest import kill_at, train_here
from tests.tiny import tiny_texts

WEIGHTS = "model.safetensors"
STEPS = 20
LATE = (19, 20)
"""The steps after nine tenths of the run."""


class Lab(TrainedStore):
    """A store with three versions, the first of which kept some of its checkpoints."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model, tiny_texts())
        saves = {"every_steps": 9, "permanent_every_steps": 9}
        self.first = self.train(steps=STEPS, checkpointing=saves)
        self.second = self.train(steps=6, checkpointing={"every_steps": 2})
        self.third = self.train(steps=6)
        met = {text: self.first_step(self.first, text) for text in self.texts}
        self.never = next(text for text, step in met.items() if not step)
        self.late = next(text for text, step in met.items() if step in LATE)
        self.early = next(text for text, step in met.items() if 1 < step < LATE[0])
        self.second_alone = next(
            text
            for text, step in met.items()
            if not step and text != self.never and self.first_step(self.second, text)
        )

    def forget(self, *texts: str) -> None:
        listed = [
            ForgottenDocument(id=text, source="s", text_hash=text, by="Ada", reason="asked to")
            for text in texts
        ]
        add_to_list(self.store, "manual", listed)

    def once_more(self, version: ModelVersion, train: Train, said: list[str]) -> Artifact:
        state = self.registry.state()
        return train_once_more(self.record, state, version.version, train, said.append)

    def masked_from_scratch(self, folder: Path, *versions: ModelVersion) -> list[bytes]:
        """The weights of the versions' runs, each whole and from the one before, texts masked."""
        weights, start = [], {}
        for version in versions:
            places = {
                "run_folder": str(folder / f"run-{version.version}"),
                "export_folder": str(folder / f"model-{version.version}"),
                "masked": (self.late, self.never),
            }
            train_here(self.spec(version).model_copy(update=places | start))
            start = {"base_model_folder": places["export_folder"]}
            weights.append(Path(folder, f"model-{version.version}", WEIGHTS).read_bytes())
        return weights

    def weights(self, checkpoint: str) -> bytes:
        artifact = self.store.load("checkpoint", checkpoint)
        return (artifact.path / MODEL_FOLDER / WEIGHTS).read_bytes()

    def runs_behind(self, checkpoint: str) -> list[TrainingRun]:
        """Those that a checkpoint's weights went through."""
        version = self.third.model_copy(update={"model_fingerprint": checkpoint})
        return runs_behind(self.store, self.registry.state(), version)

    def steps_of(self, checkpoint: str) -> list[int]:
        """The steps that its run has taken itself."""
        return [line["step"] for line in read_metrics(self.run_folder(checkpoint))]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Lab:
    return Lab(tmp_path_factory.mktemp("forgetting"), tiny_model_folder)


@pytest.fixture(scope="module")
def scratch(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Weights of the three versions, had none of them ever read the forgotten texts."""
    folder = tmp_path_factory.mktemp("scratch")
    return lab.masked_from_scratch(folder, lab.first, lab.second, lab.third)


def test_a_version_is_made_once_more_without_what_was_forgotten(
    lab: Lab, scratch: list[bytes]
) -> None:
    said: list[str] = []
    lab.forget(lab.never)
    with pytest.raises(UserError, match="Version 1 was not trained on anything that was forgotten"):
        lab.once_more(lab.first, train_here, said)

    lab.forget(lab.late)
    made = lab.once_more(lab.first, train_here, said)

    assert any("goes on from its checkpoint of step 18;" in line for line in said), said
    assert any("To train: 2 of 20 steps." in line for line in said), said
    assert lab.record.current("checkpoint", needed_by="test").fingerprint == made.fingerprint
    assert lab.steps_of(made.fingerprint) == [19, 20], (
        "a text first met after 90% of a run costs a tenth of its steps"
    )
    assert lab.weights(made.fingerprint) == scratch[0]
    assert scratch[0] != lab.weights(lab.first.model_fingerprint)
    assert made.manifest.inputs.keys() == {"tokenized_shards", "masked"}


def test_a_chain_of_three_versions_comes_out_to_the_bit_across_a_kill(
    lab: Lab, scratch: list[bytes]
) -> None:
    lab.forget(lab.never, lab.late)

    def killed(spec: TrainingSpec) -> TrainingResult:
        """Kills the second run in its midst."""
        if spec.training.budget.steps == STEPS:
            return train_here(spec)
        kill_at(spec, 3)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        lab.once_more(lab.third, killed, [])
    made = lab.once_more(lab.third, train_here, [])

    chain = replacements(lab.store, made)
    assert [one.before for one in chain] == [
        version.model_fingerprint for version in (lab.first, lab.second, lab.third)
    ]
    assert [lab.weights(one.after) for one in chain] == scratch
    assert all(lab.weights(one.before) != lab.weights(one.after) for one in chain)
    assert lab.steps_of(chain[1].after) == [1, 2, 3, 4, 5, 6]


def test_without_the_early_checkpoints_it_says_from_where_it_starts_and_why_it_cannot(
    lab: Lab, tmp_path: Path
) -> None:
    said: list[str] = []
    runs = lab.runs_behind(lab.first.model_fingerprint)
    spec = lab.run_folder(lab.first.model_fingerprint) / SPEC_NAME
    spec.rename(tmp_path / SPEC_NAME)
    for look in (replay, check_replay):
        arguments = (train_here, said.append) if look is replay else ()
        with pytest.raises(UserError, match=r"version 1 cannot be trained once more: .*spec\.json"):
            look(lab.store, runs, [lab.late], *arguments)
    newer = json.loads((tmp_path / SPEC_NAME).read_text()) | {"dreams": True}
    spec.write_text(json.dumps(newer))
    with pytest.raises(UserError, match=r"spec\.json is not a TrainingSpec: dreams: .*release"):
        replay(lab.store, runs, [lab.late], train_here, said.append)
    (tmp_path / SPEC_NAME).rename(spec)
    check_replay(lab.store, runs, [lab.late])
    check_replay(lab.store, lab.runs_behind(lab.third.model_fingerprint), [lab.late])
    for early in (9, 18):
        shutil.rmtree(spec.parent / f"step-{early}")
    # Without the text's mask nothing is on record under this name yet.
    replay(lab.store, runs, [lab.early], train_here, said.append)
    told = next(line for line in said if "trained from its beginning, all 20 steps" in line)
    assert "permanent_every_steps" in told


def test_once_more_after_the_versions_before_were_removed(lab: Lab) -> None:
    lab.forget(lab.never, lab.late)
    made = lab.once_more(lab.third, train_here, [])
    for version in (lab.first, lab.second, lab.third):
        gone = lab.store.load("checkpoint", version.model_fingerprint)
        retire(lab.store, gone.manifest, "a test")
        shutil.rmtree(gone.path)
    runs, text = lab.runs_behind(made.fingerprint), lab.second_alone
    met = [lesson.run.checkpoint for lesson in lessons_of(runs, [text])[text]]
    assert met and met[0] == runs[1].checkpoint

    again = replay(lab.store, runs, [text], train_here, lambda line: None)

    runs = lab.runs_behind(again.fingerprint)
    assert len(runs) == 3 and lessons_of(runs, [text])[text] == []
    assert again.stats["masked"] == sorted([lab.never, lab.late, text])


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
