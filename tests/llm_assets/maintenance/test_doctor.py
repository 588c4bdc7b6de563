"""The doctor says in words what is wrong in a store, and mends it when told."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from artifacts import checkpoints
from artifacts.errors import DamagedArtifact
from artifacts.store import manifest
from artifacts.store.identity import hash_json
from artifacts.store.manifest import CHECKSUM
from artifacts.store.store import Store
from llm_assets.cli.main import commands
from llm_assets.registry.base import LocalRegistry
from spark_jobs.runtime.parquet import write_table
from tests.damage import DAMAGES, cut, delete, flip_bit
from tests.llm_assets.maintenance.weeks import Weeks


def doctor(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(commands, ["doctor", *arguments])
    return ended.exit_code, ended.output


def test_a_whole_store_is_in_order(configured: Weeks) -> None:
    code, said = doctor()
    assert code == 0 and said.endswith("everything is in order.\n")


@pytest.mark.fault(
    "store",
    "doctor, `clean_corpus`: {damage}",
    sees="the artifact, and what the repair does",
    then="`--repair` moves it to `damaged/`",
)
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "missing"])
def test_a_damaged_artifact_is_set_aside(configured: Weeks, damage: str) -> None:
    artifact = configured.current("clean_corpus")
    DAMAGES[damage](artifact)
    code, said = doctor()
    assert code == 1 and f"clean_corpus/{artifact.fingerprint}: " in said
    assert "With --repair: moved to damaged/clean_corpus" in said
    assert artifact.path.exists()

    code, said = doctor("--repair")
    assert code == 0 and "1 of 1 faults repaired" in said
    assert not artifact.path.exists()
    code, said = doctor()
    assert code == 0 and "is current and no longer there" in said


def test_programs_read_the_same_as_json(configured: Weeks) -> None:
    code, said = doctor("--json")
    assert code == 0 and json.loads(said)["in_order"]
    damaged = configured.current("clean_corpus")
    DAMAGES["flipped bit"](damaged)

    code, said = doctor("--json")
    (finding,) = json.loads(said)["findings"]
    assert code == 1 and not json.loads(said)["in_order"]
    assert finding["place"] == f"clean_corpus/{damaged.fingerprint}"
    assert finding["can_be_mended"] and not finding["mended"]

    code, said = doctor("--json", "--repair")
    assert code == 0 and json.loads(said)["in_order"]
    assert json.loads(said)["findings"][0]["mended"]


def test_one_artifact_can_be_examined_alone(configured: Weeks) -> None:
    whole, damaged = configured.current("raw_corpus"), configured.current("checkpoint")
    DAMAGES["flipped bit"](damaged)
    assert doctor(f"raw_corpus/{whole.fingerprint}")[0] == 0
    assert doctor(f"checkpoint/{damaged.fingerprint}")[0] == 1


def _damage_checkpoint_of_a_run(weeks: Weeks) -> None:
    url = f"{weeks.store.root}/runs/{weeks.current('checkpoint').fingerprint}"
    committed = checkpoints.commit(url, 8, {"settings": {}, "inputs": {}}, {})
    flip_bit(Path(committed.url) / "state")


def _cut_metrics_of_a_run(weeks: Weeks) -> None:
    run = Path(weeks.store.root) / "runs" / weeks.current("checkpoint").fingerprint
    (run / "metrics.jsonl").write_text("{\n")


def _flip_bit_in_a_cache(weeks: Weeks) -> None:
    path = Path(weeks.store.root) / "cache" / "manual" / "table.parquet"
    write_table(str(path), pa.table({"text": [os.urandom(50).hex() for _ in range(1000)]}))
    flip_bit(path)


def _cut_decisions(weeks: Weeks) -> None:
    LocalRegistry.of(weeks.record).reject(1, "Ada", "it reads badly")
    cut(Path(weeks.store.root, "decisions", "manual.json"))


NOTE = "making/raw_corpus-0123456789abcdef0123.json"
FAULTS: dict[str, tuple[str, Callable[[Weeks], None]]] = {
    "record of the pipeline cut": (
        "pipelines/manual.json: cannot be read",
        lambda weeks: cut(Path(weeks.store.root, "pipelines/manual.json")),
    ),
    "record of a trial cut": (
        "manual/0123.json: cannot be read",
        lambda weeks: weeks.write("experiments/manual/0123.json", 20),
    ),
    "record of the pipeline names an artifact that is gone": (
        "it names artifacts that are no longer there: model_extra/",
        lambda weeks: delete(weeks.store.load("model_extra", weeks.record.known("model_extra")[1])),
    ),
    "checkpoint of a training run with a flipped bit": (
        "state has another checksum",
        _damage_checkpoint_of_a_run,
    ),
    "metrics of a training run cut": (
        "metrics.jsonl: cannot be read",
        _cut_metrics_of_a_run,
    ),
    "cached table with a flipped bit": (
        "cache/manual/table.parquet: cannot be read",
        _flip_bit_in_a_cache,
    ),
    "half-written note of an artifact that is being built": (
        f"{NOTE}: cannot be read",
        lambda weeks: weeks.write(NOTE, 20),
    ),
    "record under `editions/` cut": (
        "editions/raw_corpus/",
        lambda weeks: cut(next(Path(weeks.store.root, "editions/raw_corpus").glob("*.json"))),
    ),
    "record of people's decisions cut": ("decisions/manual.json: cannot be read", _cut_decisions),
}
"""What is wrong, to what is said of it and what does it."""


@pytest.mark.fault(
    "store",
    "doctor, {what}",
    sees="the file, and what is wrong with it",
    then="`--repair` repairs it; the next check finds everything in order",
)
@pytest.mark.parametrize("what", FAULTS)
def test_every_fault_is_told_and_mended(configured: Weeks, what: str) -> None:
    said, damage = FAULTS[what]
    for number in range(2):
        configured.make("model_extra", {"number": str(number)}, 10)
    damage(configured)
    code, told = doctor()
    assert code == 1 and said in told
    assert doctor("--repair")[0] == 0
    assert doctor()[0] == 0


@pytest.mark.parametrize("name", ["clean_corpus/*/manifest.json", "registry/*/registry.json"])
def test_what_another_version_wrote_is_told_as_such_and_stays(configured: Weeks, name: str) -> None:
    place = next(Path(configured.store.root).glob(name))
    fields = json.loads(place.read_text()) | {"of_next_year": 1}
    fields[CHECKSUM] = hash_json({name: fields[name] for name in fields if name != CHECKSUM})
    place.write_text(json.dumps(fields))
    DAMAGES["flipped bit"](configured.current("tokenized_shards"))
    ended = CliRunner().invoke(commands, ["doctor", "--repair"])
    said = f"{ended.output}{ended.exception}"
    assert ended.exit_code == 1
    assert f"{place} was written by another version of llm-assets (of_next_year" in said
    assert "use the version that wrote it" in said or "until it can be read" in said
    assert "1 of 2 faults repaired" in said, "what is damaged beside it"
    assert json.loads(place.read_text()) == fields


def test_file_that_may_not_be_read_is_told_beside_all_other_faults(
    configured: Weeks, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable = configured.current("clean_corpus")
    DAMAGES["flipped bit"](configured.current("tokenized_shards"))
    digest = manifest.sha256_of

    def refuse(url: str) -> str:
        if url.startswith(unreadable.url):
            raise PermissionError(errno.EACCES, "Permission denied", url)
        return digest(url)

    monkeypatch.setattr(manifest, "sha256_of", refuse)
    for arguments in ((), ("--repair",)):
        code, said = doctor(*arguments)
        assert code == 1 and f"{unreadable.url}/content: this user (uid" in said
        assert "not checked" in said and "tokenized_shards/" in said
    assert "1 of 2 faults repaired" in said and unreadable.path.exists()


def test_what_lies_behind_a_link_is_told_to_be_unchecked(configured: Weeks, tmp_path: Path) -> None:
    corpus = configured.current("clean_corpus").path
    corpus.rename(tmp_path / "elsewhere")
    corpus.symlink_to(tmp_path / "elsewhere")
    (corpus.parent / "circle").symlink_to(corpus.parent)
    code, said = doctor()
    assert code == 0
    for name in (corpus.name, "circle"):
        assert f"clean_corpus/{name}: it is a link to a folder" in said


def test_what_cannot_be_mended_keeps_nothing_else_from_it(
    configured: Weeks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a part of the store was made by another user."""
    for kind in ("clean_corpus", "tokenized_shards"):
        DAMAGES["flipped bit"](configured.current(kind))
    set_aside = Store.set_aside

    def refuse(store: Store, place: str) -> None:
        if place.startswith("clean_corpus"):
            raise PermissionError(errno.EACCES, "Permission denied", f"{store.root}/{place}")
        set_aside(store, place)

    monkeypatch.setattr(Store, "set_aside", refuse)
    code, said = doctor("--repair")
    assert code == 1 and "1 of 2 faults repaired" in said and "ermission" in said


@pytest.mark.fault(
    "store",
    "record of the pipeline cut",
    sees="the file and `llm-assets doctor --repair`",
    then="rewritten from the artifacts of the versions",
)
def test_a_lost_record_is_written_anew_from_what_versions_stand_on(configured: Weeks) -> None:
    kinds = ("clean_corpus", "checkpoint", "eval_metrics")
    before = {kind: configured.current(kind).fingerprint for kind in kinds}
    FAULTS["record of the pipeline cut"][1](configured)
    with pytest.raises(DamagedArtifact, match="llm-assets doctor --repair; llm-assets run"):
        configured.current("checkpoint")
    assert doctor("--repair")[0] == 0
    # By it an older registry is known, of a backup.
    generation = LocalRegistry.of(configured.record).state().generation
    assert configured.record.registry().generation == generation > 0
    assert {kind: configured.current(kind).fingerprint for kind in kinds} == before


@pytest.mark.fault(
    "store",
    "every file of the registry cut",
    sees="the registry, and that it cannot be restored",
    then="nothing is guessed, nothing is changed",
)
def test_a_registry_that_cannot_be_read_is_told(configured: Weeks) -> None:
    for path in (Path(configured.store.root) / "registry").rglob("*.json"):
        cut(path)
    (said,) = [line for line in doctor()[1].splitlines() if line.startswith("registry/manual: ")]
    assert said.endswith(").") and "cannot be read (" in said, "a whole sentence, however long"
    code, told = doctor("--repair")
    assert code == 1 and "registry/manual" in told and "0 of 1 faults repaired" in told
    assert "cannot be read either. Restore" in " ".join(told.split())


@pytest.mark.fault(
    "store",
    "model behind the champion deleted",
    sees="which alias lost its model, and the command that rebuilds it",
    then="nothing is changed",
)
def test_a_lost_model_of_the_champion_is_told(configured: Weeks) -> None:
    delete(configured.base)
    code, told = doctor()
    assert code == 1 and "behind champion and wanted, is no longer there" in told
    assert told.rstrip().endswith('--select "*base_model".')
