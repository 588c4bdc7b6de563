"""Datasets of the Hugging Face Hub and of folders in buckets, and what is said when one fails."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.storage import files
from recipes.model.base_model import BaseModelSettings, prepare
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import fingerprints_of, open_sources, write_snapshot
from tests.spark_jobs.read.test_snapshot import settings_of
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.stand_ins.http_server import Answer
from tests.stand_ins.hub import Hub, Repository, running_hub

ROWS = [{"text": f"Document {number} of the valve."} for number in range(500)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
REVISION = "0" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub(tmp_path / "hub-cache") as hub:
        hub.repositories["team/web"] = Repository(private=False, files={"train.jsonl": LINES})
        yield hub


def of_hub(dataset: str) -> RawCorpusSettings:
    return settings_of(type="hugging_face", name="web", dataset=dataset)


def test_a_dataset_of_the_hub_is_read_at_the_revision_of_its_fingerprint(
    hub: Hub, tmp_path: Path
) -> None:
    settings, commit = of_hub("team/web"), hub.repositories["team/web"].commit
    opened = open_sources(settings)
    assert fingerprints_of(opened) == {"web": commit}
    asked: list[str] = []
    # Which tells of what is asked and answers nothing itself.
    hub.fault = lambda method, path: asked.append(path)
    raw = tmp_path / "raw"
    assert write_snapshot(settings, raw, opened=opened)["documents"] == len(ROWS)
    assert f"/api/datasets/team/web/revision/{commit}" in asked
    assert not any("/main" in path for path in asked)


def refused(status: int, code: str) -> Callable[[str, str], Answer]:
    return lambda method, path: (status, [("x-error-code", code)], b"{}")


def half(method: str, path: str) -> Answer | None:
    """A file whose connection ends in its middle."""
    if not path.endswith((".jsonl", ".safetensors")):
        return None
    headers = [("etag", '"1"'), ("x-repo-commit", REVISION), ("content-length", str(len(LINES)))]
    return 200, headers, b"" if method == "HEAD" else LINES[: len(LINES) // 2]


FAULTS = {
    "gated": refused(401, "GatedRepo"),
    "busy": refused(429, ""),
    "moved": refused(404, "RepoNotFound"),
    "half a file": half,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("what", ["dataset", "model"])
def test_what_the_hub_does_not_give_is_named_with_what_to_do(
    what: str, fault: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.repositories["team/web"].files |= {"model.safetensors": LINES, "config.json": b"{}"}
    hub.fault = FAULTS[fault]
    with pytest.raises(UserError, match=r"team/web.*.*If it is gated .* HF_TOKEN.*try again"):
        if what == "dataset":
            write_snapshot(of_hub("team/web"), tmp_path / "raw")
        else:
            prepare(BaseModelSettings(hub="team/web", revision=REVISION), tmp_path / "out")


def test_a_saved_dataset_in_a_bucket_is_read(google: LocalGoogle, tmp_path: Path) -> None:
    import datasets

    url = f"gs://{BUCKET}/saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    for file in (tmp_path / "saved").iterdir():
        files.write(f"{url}/{file.name}", file.read_bytes())
    settings = of_hub(url)
    before = fingerprints_of(open_sources(settings))
    assert write_snapshot(settings, tmp_path / "raw")["documents"] == len(ROWS)
    files.write(f"{url}/more.txt", b"")
    assert fingerprints_of(open_sources(settings)) != before
    with pytest.raises(UserError, match=r"no file in gs://.*/absent.*save_to_disk"):
        open_sources(of_hub(f"gs://{BUCKET}/absent"))
