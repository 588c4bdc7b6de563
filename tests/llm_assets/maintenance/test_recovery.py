"""Anything can be deleted or damaged, is noticed before it is used, and is made again as it was."""

import itertools
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from artifacts.errors import DamagedArtifact
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.card import verify_model
from tests.conftest import Project
from tests.damage import DAMAGES, delete, flip_bit, largest_file, prescribed
from tests.llm_assets.in_process import ask, content, follow
from tests.llm_assets.maintenance.weeks import Weeks

READER = {
    "raw_corpus": "clean_corpus",
    "base_model": "tokenized_shards",
    "clean_corpus": "tokenized_shards",
    "tokenized_shards": "checkpoint",
    "checkpoint": "eval_metrics",
    "eval_metrics": "model_version",
}
"""Asset to one that reads its files."""
OF_ALL, ON_ALL = "clean_corpus", ("missing", "flipped bit")
"""The asset on which every damage is tried, and the damages that are tried on every asset; the
other pairs are left to `make soak`."""


@pytest.fixture
def whole(judged: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """The judged project, to be damaged; afterwards its store is as it was."""
    monkeypatch.setenv("LLM_ASSETS_CONFIG", str(judged.config))
    settings = judged.config.read_text()
    yield judged
    judged.config.write_text(settings)
    shutil.rmtree(judged.folder / "store")
    shutil.copytree(judged.folder / "as it was", judged.folder / "store")


@pytest.mark.fault(
    "{asset}",
    "artifact: {damage}",
    sees="the artifact and the command that repairs it",
    then="that command rebuilds it; a damaged one is set aside",
)
@pytest.mark.parametrize(
    ("asset", "damage"),
    [
        pytest.param(
            *pair, marks=() if pair[0] == OF_ALL or pair[1] in ON_ALL else pytest.mark.soak
        )
        for pair in itertools.product(READER, DAMAGES)
    ],
)
def test_damage_is_named_before_it_is_used_and_its_way_out_begins(
    whole: Project, asset: str, damage: str
) -> None:
    artifact, reader = whole.current(asset), READER[asset]
    delete(whole.current(reader))
    DAMAGES[damage](artifact)

    said = ask(whole, reader)
    line = prescribed(said)

    if damage == "missing":
        assert artifact.fingerprint in said and line.endswith(f'--select "*{reader}"')
        return
    assert f"{asset}/{artifact.fingerprint}" in said
    repair, _, again = line.partition(" && ")
    assert again == f'dagster asset materialize --select "*{asset}"'
    follow(whole, repair)
    assert whole.record.find_current(asset) is None, "set aside: as if it had been deleted"


@pytest.mark.fault(
    "{reader}",
    "a flipped bit in {asset}",
    sees="the file, and that its checksum differs",
    then="nothing is computed; start with `llm-assets doctor --repair`",
)
@pytest.mark.parametrize(
    ("asset", "reader"),
    [
        ("base_model", "checkpoint"),
        ("base_model", "eval_metrics"),
        ("tokenized_shards", "eval_metrics"),
        ("checkpoint", "model_version"),
        ("checkpoint", "endpoint"),
    ],
)
def test_one_flipped_bit_of_weights_or_evaluation_text_stops_all_who_read_it(
    whole: Project, asset: str, reader: str
) -> None:
    artifact = whole.current(asset)
    if reader != "endpoint":
        delete(whole.current(reader))
    damaged = largest_file(artifact)
    flip_bit(damaged)
    said = ask(whole, reader)
    assert f"{damaged} has another checksum than its manifest" in said
    assert prescribed(said).startswith(f"llm-assets doctor --repair {asset}/{artifact.fingerprint}")


@pytest.mark.fault(
    "endpoint",
    "a damaged champion that cannot be rebuilt",
    sees="the file, and `llm-assets rollback`",
    then="after the rollback, the previous version serves",
)
def test_a_champion_that_cannot_be_made_again_gives_way_to_the_version_before(
    weeks: Weeks,
) -> None:
    weeks.retrain(1, promoted=True)
    champion = weeks.current("checkpoint")
    weeks.retrain(2, promoted=False)
    verify_model(weeks.record, champion.url)
    DAMAGES["flipped bit"](champion)
    with pytest.raises(DamagedArtifact, match="another checksum") as damage:
        verify_model(weeks.record, champion.url)
    assert prescribed(str(damage.value)).startswith("llm-assets rollback --reason ")


@pytest.mark.fault(
    "checkpoint",
    "champion deleted, from which training was to start",
    sees="its fingerprint, and `llm-assets rollback`",
    then="after the rollback, training starts from the previous version",
)
def test_training_goes_on_though_the_model_that_it_starts_from_was_deleted(whole: Project) -> None:
    champion, base = whole.current("checkpoint"), whole.current("base_model")
    whole.configure(checkpoint={"initialize": "champion", "budget": {"steps": 2}})
    delete(champion)
    said = ask(whole, "checkpoint")
    assert champion.fingerprint in said
    assert prescribed(said).startswith("llm-assets rollback --reason ")

    registry = LocalRegistry(whole.folder / "store", "manual")
    registry.roll_back("Ada", "the weights are damaged")
    assert ask(whole, "checkpoint") == ""
    assert whole.current("checkpoint").manifest.inputs["start"] == base.fingerprint


@pytest.mark.fault(
    "checkpoint",
    "export deleted, resumable state removed by cleaning",
    sees="the stage runs",
    then="training again gives the same bytes",
)
def test_a_checkpoint_whose_state_was_cleaned_away_is_trained_again_to_the_same_bytes(
    whole: Project,
) -> None:
    before = whole.current("checkpoint")
    delete(before)
    assert ask(whole, "checkpoint") == ""
    run = whole.folder / "store" / "runs" / before.fingerprint
    assert list(run.glob("step-*"))
    follow(whole, "llm-assets clean --yes")
    assert not list(run.glob("step-*"))
    delete(before)
    assert ask(whole, "checkpoint") == ""
    assert content(whole.current("checkpoint")) == content(before)


@pytest.mark.fault(
    "{asset}",
    "artifact deleted by hand",
    sees="the stage runs",
    then="rebuilt under the same fingerprint, with the same content",
)
@pytest.mark.parametrize("asset", [*READER, "model_version"])
def test_what_was_deleted_is_made_again_as_it_was(whole: Project, asset: str) -> None:
    before = whole.current(asset)
    delete(before)
    assert ask(whole, asset) == ""
    again = whole.current(asset)
    assert again.fingerprint == before.fingerprint
    assert content(again) == content(before)


@pytest.mark.fault(
    "store",
    "every artifact deleted at once",
    sees="the graph runs",
    then="all fingerprints are unchanged",
)
@pytest.mark.soak
def test_everything_can_be_deleted_at_once(whole: Project) -> None:
    before = {asset: whole.current(asset).fingerprint for asset in [*READER, "model_version"]}
    for asset in before:
        shutil.rmtree(whole.folder / "store" / asset)
    assert ask(whole, "*model_version") == ""
    assert {asset: whole.current(asset).fingerprint for asset in before} == before


@pytest.mark.soak
def test_a_user_types_what_the_message_prescribes(whole: Project) -> None:
    before = whole.current("raw_corpus")
    delete(whole.current("clean_corpus"))
    DAMAGES["flipped bit"](before)
    ended = whole.materialize("clean_corpus")
    assert ended.returncode != 0
    (said,) = {line for line in ended.stderr.splitlines() if "llm-assets doctor" in line}
    repaired = subprocess.run(
        ["bash", "-c", prescribed(said)],
        cwd=whole.folder,
        env=whole.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert content(whole.current("raw_corpus")) == content(before)
