"""What a certificate states, held against a training that is repeated."""

import uuid
from pathlib import Path

import fsspec

from artifacts.storage.transfer import remote_entries
from llm_assets.forgetting.certificate import Replacement, weights_of
from llm_assets.forgetting.verification import train_again
from recipes.spec import MODEL_FOLDER
from tests.llm_assets.trained_store import TrainedStore
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.tiny import tiny_texts


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
