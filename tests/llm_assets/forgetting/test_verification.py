"""What a certificate states, held against a store and a training that is repeated."""

import shutil
import uuid
from pathlib import Path

import fsspec
import pytest

from artifacts.storage.transfer import remote_entries
from artifacts.store import layout
from artifacts.store.rewrite import rewrite
from llm_assets.forgetting.certificate import (
    Forgetting,
    Reading,
    Replacement,
    weights_of,
)
from llm_assets.forgetting.erase import REASON, _without_tokens
from llm_assets.forgetting.forgotten_list import ForgottenDocument, add_to_list
from llm_assets.forgetting.verification import examine, train_again
from llm_assets.tracing.training_text import lessons_of, runs_behind
from recipes.data.records import TRAINED_NAME
from recipes.spec import MODEL_FOLDER
from tests.llm_assets.trained_store import TrainedStore
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.tiny import tiny_texts


@pytest.fixture
def trained(tmp_path: Path, tiny_model_folder: Path) -> TrainedStore:
    """Version 2 serves; it was trained from version 1."""
    trained = TrainedStore(tmp_path, tiny_model_folder, tiny_texts())
    trained.train(steps=3)
    trained.train(steps=3)
    return trained


def _text_read_by(trained: TrainedStore, runs: list[int]) -> str:
    state = trained.registry.state()
    lessons = lessons_of(runs_behind(trained.store, state, state.get(2)), trained.texts)
    texts = (text for text, of in lessons.items() if [one.run.version for one in of] == runs)
    return next(texts)


def _stated(trained: TrainedStore, text: str, read_by: list[Reading]) -> Forgetting:
    """A certificate of a text, which is on the list."""
    document = ForgottenDocument(
        id="manual/0", source="manual", text_hash=text, by="Ada", reason="asked to"
    )
    add_to_list(trained.store, "manual", [document])
    return Forgetting(
        pipeline="manual",
        at=document.at,
        documents=[document],
        read_by=read_by,
        replaced=[],
        erased=False,
    )


def _find_versions(trained: TrainedStore, text: str) -> list[tuple[bool | None, str]]:
    """What is found of versions, of a text that is to be forgotten."""
    stated = _stated(trained, text, [])
    findings = examine(trained.record, trained.registry.state(), stated, lambda line: None)
    return [(holds, told) for holds, told in findings if told.startswith("version")]


TRAINED = (False, "version 2, which serves, was trained on some of them")
UNKNOWN = "may have been trained on some of them: there is no record of version 1"


def _record_of_first(trained: TrainedStore) -> Path:
    first = trained.registry.state().get(1)
    return Path(trained.store.folder_url("checkpoint", first.model_fingerprint), TRAINED_NAME)


def test_where_a_record_behind_what_serves_is_gone_nobody_knows_what_it_was_trained_on(
    trained: TrainedStore,
) -> None:
    text = _text_read_by(trained, [1])
    assert _find_versions(trained, text) == [TRAINED]
    # Of a version that does not serve, but whose weights are there, nobody knows it either.
    record = _record_of_first(trained)
    record.unlink()
    assert _find_versions(trained, text) == [(None, f"version {one} {UNKNOWN}") for one in (1, 2)]
    shutil.rmtree(record.parent)
    assert _find_versions(trained, text) == [(None, f"version 2 {UNKNOWN}")]


def test_of_a_version_that_was_trained_on_a_text_it_is_not_also_said_that_it_may_have_been(
    trained: TrainedStore,
) -> None:
    text = _text_read_by(trained, [2])
    _record_of_first(trained).unlink()
    assert _find_versions(trained, text) == [TRAINED, (None, f"version 1 {UNKNOWN}")]


def test_what_another_registry_calls_by_a_number_is_not_taken_for_a_version_here(
    trained: TrainedStore,
) -> None:
    """As with a certificate of another store."""
    read_by = [Reading(version=one, checkpoint=f"{one:020}", steps={}) for one in (1, 7)]
    known = next(one for one in trained.registry.state().versions if not one.is_base)
    read_by.append(Reading(version=9, checkpoint=known.model_fingerprint, steps={}))
    stated = _stated(trained, _text_read_by(trained, [2]), read_by)
    findings = list(examine(trained.record, trained.registry.state(), stated, lambda line: None))
    for one in (1, 7):
        told = f"checkpoint {one:020}, trained on them, is no version here"
        assert (None, told) in findings
    its_number = f"version {known.version}, which was trained on them, is not withdrawn; "
    assert (False, f"{its_number}its weights are still there") in findings


def test_of_a_run_whose_text_was_forgotten_since_nobody_knows_whether_it_would_come_out_again(
    trained: TrainedStore,
) -> None:
    made = trained.store.load("checkpoint", trained.registry.state().get(1).model_fingerprint)
    text = _text_read_by(trained, [1])
    shards = trained.store.load("tokenized_shards", made.manifest.inputs["tokenized_shards"])
    rewrite(shards, _without_tokens(shards, [text]), shards.stats | {"erased": [text]}, REASON)
    stated = weights_of(made)
    one = Replacement(
        before="none", after=made.fingerprint, weights_before={}, weights_after=stated, masked=[]
    )
    holds, told = train_again(trained.store, one, lambda line: None)
    assert holds is None and told.endswith("have lost 1 text(s) that were forgotten since")
    shutil.rmtree(Path(trained.store.root, layout.run(made.fingerprint)))
    holds, told = train_again(trained.store, one, lambda line: None)
    assert holds is None and "cannot be trained again: runs/" in told


def test_the_same_weights_are_recognized_by_the_checksum_that_was_stated(
    google: LocalGoogle, tmp_path: Path, tiny_model_folder: Path
) -> None:
    trained = TrainedStore(tmp_path, tiny_model_folder, tiny_texts())
    made = trained.store.load("checkpoint", trained.train(steps=3).model_fingerprint)
    sha256 = weights_of(made)
    by_a_job = f"gs://{BUCKET}/{uuid.uuid4().hex}"
    fsspec.filesystem("gs").put(f"{made.url}/", by_a_job, recursive=True)
    entries = {entry.path: str(entry.crc32c) for entry in remote_entries(by_a_job)}
    crc32c = {path: entries[path] for path in sha256}
    weights = f"{MODEL_FOLDER}/model.safetensors"

    def comes_out_as(stated: dict[str, str]) -> bool | None:
        one = Replacement(
            before="none",
            after=made.fingerprint,
            weights_before={},
            weights_after=stated,
            masked=[],
        )
        return train_again(trained.store, one, lambda line: None)[0]

    assert comes_out_as(sha256)
    assert comes_out_as(crc32c)
    assert not comes_out_as(sha256 | {weights: "0" * 64})
    assert not comes_out_as(crc32c | {weights: crc32c[f"{MODEL_FOLDER}/config.json"]})
