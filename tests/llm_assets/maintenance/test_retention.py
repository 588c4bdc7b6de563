"""What is needed never goes; what is not goes, so that a store stops growing."""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from click.testing import CliRunner
from dagster import AssetKey, DagsterInstance, DefaultScheduleStatus, build_hook_context, op
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifacts.checkpoints import commit, newest_step
from artifacts.errors import DamagedArtifact
from artifacts.leases import Lease
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Draft, Store
from llm_assets.automation.jobs import build_jobs, build_schedules
from llm_assets.cli.main import commands
from llm_assets.config import load_settings
from llm_assets.definitions import build_definitions
from llm_assets.forgetting.forgotten_list import WithdrawnVersion, add_to_list
from llm_assets.maintenance.cleaning import (
    Name,
    Removal,
    plan_removals,
    reach,
    read_contents,
    remove,
    take_inventory,
)
from llm_assets.operation_settings import RetentionSettings
from llm_assets.tracing.explain import explain
from tests.damage import cut_manifest, flip_bit
from tests.llm_assets.maintenance.weeks import KB, KINDS, Weeks

USUAL: dict[str, object] = RetentionSettings().model_dump(include={"days", "versions"})


@st.composite
def stores(draw: st.DrawFn) -> tuple[dict[Name, dict[str, str]], dict[Name, str]]:
    """Artifacts whose inputs were made before them, some under a name of their own, and roots."""
    names = [(kind, f"{kind}-{n}") for kind in KINDS for n in range(draw(st.integers(0, 4)))]
    inputs: dict[Name, dict[str, str]] = {}
    for number, name in enumerate(names):
        chosen = draw(st.lists(st.sampled_from(names[:number]), max_size=3)) if number else []
        role = draw(st.sampled_from(["", "start", "earlier"]))
        inputs[name] = {role or kind: fingerprint for kind, fingerprint in chosen}
    roots = draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
    return inputs, dict.fromkeys(roots, "root")


# On a busy machine a single draw may take a second.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(stores())
def test_roots_and_all_that_they_were_made_from_stay_and_nothing_else(
    case: tuple[dict[Name, dict[str, str]], dict[Name, str]],
) -> None:
    inputs, roots = case
    kept = reach(inputs, roots)
    behind = set(roots)
    while more := {i for name in behind for i in inputs[name].items() if i in inputs} - behind:
        behind |= more
    beside = {fingerprint for name in behind for fingerprint in inputs[name].values()}
    assert set(kept) == behind | {name for name in inputs if name[1] in beside}


def test_a_listing_says_what_goes_and_why_and_removes_nothing(weeks: Weeks) -> None:
    weeks.pass_by(5, promoted=True)
    before = weeks.bytes
    lines = weeks.clean(delete=False)
    assert weeks.bytes == before
    (line,) = [line for line in lines if f"  checkpoint/{first_checkpoint(weeks)}" in line]
    assert "0.1 MB" in line and "nothing that stays needs it" in line
    assert lines[-1].startswith("To delete: ")


def first_checkpoint(weeks: Weeks) -> str:
    return weeks.record.known("checkpoint")[-1]


def test_thirty_weeks_level_off_and_every_version_explains_itself(weeks: Weeks) -> None:
    sizes = []
    for week in range(30):
        weeks.retrain(week, promoted=week % 3 != 2)
        weeks.clean(cache_gb=100 * KB / 1e9)
        sizes.append(weeks.bytes)
        for alias in ("champion", "previous"):
            found = weeks.registry.find(alias)  # type: ignore[arg-type]
            for kind, fingerprint in found.lineage.items() if found else ():
                weeks.store.load(kind, fingerprint).verify()
    # A version's manifests stay: a few kilobytes a week, where a week's artifacts are 300.
    growth = (sizes[-1] - sizes[9]) / 20
    assert growth < 12 * KB, f"grows by {growth:,.0f} bytes a week"
    assert max(sizes) < 2.0e6
    for version in weeks.registry.state().versions[1:]:
        told = explain(weeks.store, weeks.registry.state(), version)
        assert "no longer in" not in told
        for kind in KINDS:
            assert f"{kind} {version.lineage[kind]}, made" in told
            assert f"of: {kind}" in told


def test_a_training_that_was_broken_off_keeps_the_state_that_it_goes_on_from(weeks: Weeks) -> None:
    """As much as three models, beside the three that any pipeline keeps."""
    weeks.pass_by(5, promoted=True)
    run = break_off(weeks, permanent=[])
    weeks.clean(**USUAL)
    assert [path.name for path in run.glob("step-*")] == ["step-24"]
    assert newest_step(str(run)) == 24 and (run / "metrics.jsonl").exists()
    assert bytes_of_models(weeks) < 6.5 * 50 * KB
    run = break_off(weeks, permanent=[8])
    weeks.clean(**USUAL)
    assert {path.name for path in run.glob("step-*")} == {"step-8", "step-24"}
    run = break_off(weeks, permanent=[])
    flip_bit(run / "step-24" / "state")
    weeks.clean(**USUAL)
    assert {path.name for path in run.glob("step-*")} == {"step-16", "step-20", "step-24"}


def test_the_state_of_another_pipelines_training_is_for_that_pipeline_to_drop(weeks: Weeks) -> None:
    other, inputs = Pipeline(weeks.store, "other"), {"base_model": weeks.base.fingerprint}
    identity = Identity(kind="checkpoint", code_version="1", settings={"of": 2}, inputs=inputs)
    made, _ = weeks.store.make(identity, lambda draft: None)
    other.advance(made)
    weeks.write(f"runs/{made.fingerprint}/step-8/state", 150 * KB)

    weeks.clean(optimizer_state=False)

    assert (Path(weeks.store.root) / f"runs/{made.fingerprint}/step-8/state").exists()


def break_off(weeks: Weeks, permanent: list[int]) -> Path:
    """A training's folder with the states of three steps and a begun fourth, its model not made."""
    run = Path(weeks.store.root) / "runs" / f"{len(permanent):020x}"
    for step in (8, 16, 24):
        weeks.write(f"runs/{run.name}/step-{step}/state", 150 * KB)
        commit(str(run), step, {}, {}, permanent=step in permanent)
    weeks.write(f"runs/{run.name}/step-20/state", 150 * KB)
    weeks.write(f"runs/{run.name}/metrics.jsonl", KB)
    return run


def bytes_of_models(weeks: Weeks) -> int:
    folders = (Path(weeks.store.root) / kind for kind in ("base_model", "checkpoint", "runs"))
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


def test_five_trainings_leave_less_than_four_models_by_the_usual_rules(weeks: Weeks) -> None:
    for week in range(5):
        weeks.retrain(week, promoted=True)
        weeks.clean(**USUAL)
    # Weights of 50 KB and states of 150 KB: the base, what serves and what served before.
    assert bytes_of_models(weeks) < 4 * 50 * KB
    for name in weeks.record.known("clean_corpus"):
        weeks.store.load("clean_corpus", name).verify()


def _promote_the_oldest(weeks: Weeks) -> dict[str, object]:
    weeks.registry.approve(1, "Ada", "reads well")
    return {}


def _make_the_oldest_previous(weeks: Weeks) -> dict[str, object]:
    for version in (1, 6):
        weeks.registry.approve(version, "Ada", "reads well")
        weeks.registry.confirm(version)
    return {}


@pytest.mark.parametrize(
    "reason",
    [
        _promote_the_oldest,
        _make_the_oldest_previous,
        lambda weeks: {"keep": [1]},
        lambda weeks: {"versions": 6},
    ],
)
def test_what_a_rule_keeps_stays_with_all_behind_it(
    weeks: Weeks, reason: Callable[[Weeks], dict[str, object]]
) -> None:
    weeks.pass_by(6, promoted=False)
    settings = reason(weeks)
    weeks.clean(**settings)
    oldest = weeks.registry.get(1)
    for kind, fingerprint in oldest.lineage.items():
        weeks.store.load(kind, fingerprint).verify()


def test_what_is_young_stays_but_the_weights_of_older_versions(weeks: Weeks) -> None:
    weeks.pass_by(6, promoted=False)
    weeks.clean(days=1)
    oldest = dict(weeks.registry.get(1).lineage)
    assert weeks.store.find_named("checkpoint", oldest.pop("checkpoint")) is None
    for kind, fingerprint in oldest.items():
        weeks.store.load(kind, fingerprint).verify()


def test_what_running_work_reads_stays(weeks: Weeks) -> None:
    weeks.pass_by(6, promoted=False)
    oldest = weeks.registry.get(1).lineage
    identity = Identity(kind="eval_metrics", code_version="2", inputs=oldest)

    def build(draft: Draft) -> None:
        (draft.path / "half").write_text("half")
        name = f"drafts/{identity.kind}-{identity.fingerprint}-1/half"
        weeks.write(name, KB)
        weeks.write("drafts/checkpoint-of-a-dead-maker/half", KB)
        weeks.clean(cache_gb=1 / 1e9)
        assert (draft.path / "half").exists() and (Path(weeks.store.root) / name).exists()
        assert not (Path(weeks.store.root) / "drafts/checkpoint-of-a-dead-maker").exists()

    artifact, _ = weeks.store.make(identity, build)
    artifact.verify()
    assert weeks.store.exists("checkpoint", oldest["checkpoint"])
    assert list(Path(weeks.store.root).glob("cache/manual/clean_corpus/*")), "no cache goes"
    weeks.clean()
    assert not weeks.store.exists("checkpoint", oldest["checkpoint"])


def test_what_another_pipeline_made_stays(weeks: Weeks) -> None:
    weeks.pass_by(6, promoted=False)
    oldest = weeks.store.load("checkpoint", first_checkpoint(weeks))
    other = Pipeline(weeks.store, "other")
    other.advance(oldest)
    other.advance(weeks.current("checkpoint"))
    weeks.clean()
    oldest.verify()


def test_optimizer_state_goes_once_the_model_is_exported_unless_asked_for(weeks: Weeks) -> None:
    weeks.retrain(1, promoted=True)
    run = Path(weeks.store.root) / "runs" / weeks.current("checkpoint").fingerprint
    unfinished = Path(weeks.store.root) / "runs" / ("0" * 20)
    shutil.copytree(run, unfinished)

    weeks.clean(optimizer_state=True, days=1)
    assert (run / "step-8" / "state").exists()
    weeks.clean(days=1)
    assert not (run / "step-8").exists() and (run / "metrics.jsonl").exists()
    assert (unfinished / "step-8" / "state").exists(), "it may go on"
    weeks.clean(days=0)
    assert not unfinished.exists()


def test_of_the_caches_the_least_recently_used_goes(weeks: Weeks) -> None:
    for week in range(4):
        weeks.write(f"cache/manual/clean_corpus/{week}.bin", 30 * KB)
        used = time.time() - 1000 + (week if week else 10)
        os.utime(Path(weeks.store.root) / f"cache/manual/clean_corpus/{week}.bin", (used, used))
    weeks.clean(cache_gb=70 * KB / 1e9)
    left = Path(weeks.store.root).glob("cache/manual/clean_corpus/*")
    assert sorted(path.stem for path in left) == ["0", "3"]


def test_what_takes_no_room_to_remove_goes_first(weeks: Weeks) -> None:
    """A full disk has none for the lease of an artifact, nor for the manifest that stays of it."""
    leases = Path(weeks.store.root, "leases")
    shutil.rmtree(leases)
    leases.write_text("where no lock can be written")
    cached = Path(weeks.store.root, "cache", "entry")
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_text("text")
    artifact = Removal("raw_corpus/a", "old", 1, artifact=("raw_corpus", "a"))
    with pytest.raises(OSError):
        remove(weeks.store, [artifact, Removal("cache/entry", "old", 1)])
    assert not cached.exists()


def test_what_was_waited_for_stays_with_all_behind_it_if_it_is_needed_by_then(
    weeks: Weeks, monkeypatch: pytest.MonkeyPatch
) -> None:
    weeks.pass_by(5, promoted=True)
    needed = weeks.store.load("checkpoint", first_checkpoint(weeks))
    lease = Store.lease

    def lease_after_work(
        store: Store, name: str, on_wait: Callable[[str], None] | None = None
    ) -> AbstractContextManager[Lease]:
        if on_wait and name == layout.artifact_lease("checkpoint", needed.fingerprint):
            weeks.record.advance(needed)
            on_wait("another process")
        return lease(store, name, on_wait)

    monkeypatch.setattr(Store, "lease", lease_after_work)
    lines = weeks.clean()
    needed.verify()
    for kind in ("tokenized_shards", "base_model"):
        weeks.store.load(kind, needed.manifest.inputs[kind]).verify()
    assert "4 of them came to be needed meanwhile, and stay." in lines
    assert lines[-1].startswith("Deleted: "), "all that was not waited for"


def test_nothing_goes_where_a_manifest_cannot_be_read(weeks: Weeks) -> None:
    weeks.pass_by(6, promoted=True)
    cut_manifest(weeks.current("clean_corpus"))
    before = weeks.bytes
    with pytest.raises(DamagedArtifact, match="llm-assets doctor --repair clean_corpus/"):
        weeks.clean()
    assert weeks.bytes == before


def places(weeks: Weeks, days: float) -> set[str]:
    """What goes so many days from now."""
    contents, state = read_contents(weeks.store), weeks.registry.state()
    settings, then = RetentionSettings(days=7), time.time() + days * 86_400
    return {one.place for one in plan_removals(contents, "manual", state, settings, then, {})}


def test_what_was_never_finished_goes_when_it_is_old(weeks: Weeks) -> None:
    weeks.write(f"checkpoint/{'a' * 20}/model/weights", KB)
    assert places(weeks, days=0) == set()
    assert places(weeks, days=8) == {f"checkpoint/{'a' * 20}"}


@pytest.mark.parametrize(
    ("place", "file"),
    [
        (f"model_extra/{'a' * 20}", "/manifest.json"),
        (f"runs/{'a' * 20}", "/step-9/state"),
        (f"runs/{'a' * 20}/step-9", "/state"),
        (f"retired/model_extra/{'a' * 20}", "/manifest.json"),
        ("registry/manual/b.json", ""),
        ("pipelines/other.json", ""),
    ],
)
def test_what_is_set_aside_is_as_old_as_that(weeks: Weeks, place: str, file: str) -> None:
    root = Path(weeks.store.root)
    places = [place, place.replace("a" * 20, "b" * 20).replace("json", "txt").replace("-9", "-8")]
    for number, name in enumerate(places):
        weeks.write(name + file, KB)
        for path in (root / name, *(root / name).rglob("*")):
            os.utime(path, (1e9, 1e9))
        weeks.store.set_aside(name)
        if not number:  # As if it had been set aside long ago: the other one keeps it no longer.
            for path in (root / "damaged" / name, *(root / "damaged" / name).rglob("*")):
                os.utime(path, (1e9, 1e9))
    old, new = (root / "damaged" / (name + file) for name in places)
    weeks.clean(days=30)
    assert new.exists() and not old.exists()
    weeks.clean(days=0)
    assert not new.exists()


def test_what_a_job_needed_meanwhile_goes_when_it_is_old(weeks: Weeks) -> None:
    """A job in the cloud that was killed leaves it beside its output."""
    weeks.retrain(0, promoted=True)
    kept = f"clean_corpus/{weeks.current('clean_corpus').fingerprint}"
    for name in (kept, f"clean_corpus/{'a' * 20}"):
        weeks.write(f"{name}.scratch/prepared/part-0.parquet", KB)
    gone = {place for place in places(weeks, days=8) if ".scratch" in place}
    assert gone == {f"{kept}.scratch", f"clean_corpus/{'a' * 20}.scratch"}


def test_a_folder_that_goes_while_the_store_is_listed_is_passed_over(
    weeks: Weeks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training removes a state that a newer one replaces."""
    weeks.write("runs/one/step-1/weights", KB)
    weeks.write("runs/one/step-2/weights", KB)
    going = Path(weeks.store.root) / "runs/one/step-1"
    scandir = os.scandir

    def remove_then_list(folder: str | int) -> object:
        if folder == str(going):
            going.rename(Path(weeks.store.root).with_name("gone"))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", remove_then_list)
    assert ("runs/one", "step-2") in take_inventory(weeks.store).folders
    assert not going.exists()


def test_the_command_lists_first_and_removes_when_told(configured: Weeks) -> None:
    checkpoint = first_checkpoint(configured)
    listed = CliRunner().invoke(commands, ["clean"])
    assert listed.exit_code == 0, listed.output
    assert f"checkpoint/{checkpoint}" in listed.output
    file = os.environ["LLM_ASSETS_CONFIG"]
    assert listed.output.endswith(f"of this: llm-assets --config {file} clean --yes\n")
    assert configured.store.exists("checkpoint", checkpoint)
    told = json.loads(CliRunner().invoke(commands, ["clean", "--json"]).output)
    assert not told["removed"] and told["bytes"] and told["bytes_kept"]
    assert f"checkpoint/{checkpoint}" in [one["place"] for one in told["removals"]]
    removed = CliRunner().invoke(commands, ["clean", "--yes"])
    assert removed.exit_code == 0 and "Deleted: " in removed.output
    assert not configured.store.exists("checkpoint", checkpoint)
    nothing = CliRunner().invoke(commands, ["clean"]).output
    assert nothing.startswith("Nothing to delete; ") and "--yes" not in nothing


def test_the_job_does_what_the_command_does_every_week_in_a_store_of_ones_own(
    configured: Weeks, tmp_path: Path
) -> None:
    path = tmp_path / "project" / "manual.yaml"
    defs = build_definitions(load_settings(path), str(path))
    schedule = defs.resolve_schedule_def("weekly_cleaning")
    assert schedule.default_status is DefaultScheduleStatus.RUNNING
    in_cloud = load_settings(path).model_copy(update={"store": "gs://bucket/store"})
    (retraining, cleaning, _) = build_schedules(in_cloud)
    assert cleaning.default_status is DefaultScheduleStatus.STOPPED
    assert retraining.default_status is DefaultScheduleStatus.STOPPED
    with DagsterInstance.ephemeral() as instance:
        assert defs.resolve_job_def("cleaning").execute_in_process(instance=instance).success
    assert not configured.store.exists("checkpoint", first_checkpoint(configured))


def test_the_job_that_automation_launches_cleans_a_store_of_ones_own_at_its_end(
    configured: Weeks, tmp_path: Path
) -> None:
    path = tmp_path / "project" / "manual.yaml"
    defs, first = build_definitions(load_settings(path), str(path)), first_checkpoint(configured)
    training = defs.resolve_job_def("retraining")
    (hook,) = training.hook_defs
    assert defs.resources is not None
    resources = {key: defs.resources[key] for key in hook.required_resource_keys}
    for name in ("checkpoint", "endpoint"):
        assert training.has_node_named(name)

        @op(name=name)
        def ended() -> None: ...

        assert configured.store.exists("checkpoint", first)
        hook(build_hook_context(resources, ended))
    assert not configured.store.exists("checkpoint", first)
    in_cloud = load_settings(path).model_copy(update={"store": "gs://bucket/store"})
    assert build_jobs(in_cloud, [AssetKey("endpoint")])[0].hooks is None


@pytest.mark.soak
def test_a_hundred_thousand_files_are_listed_within_five_seconds(weeks: Weeks) -> None:
    root = Path(weeks.store.root)
    for folder in range(100):
        place = root / "cache" / "manual" / f"{folder:03d}"
        place.mkdir(parents=True)
        for number in range(1000):
            (place / str(number)).touch()
    began = time.process_time()
    weeks.clean(delete=False)
    # Processor time: other processes on the machine do not count.
    assert time.process_time() - began < 5


def test_weights_that_read_forgotten_text_go_after_their_time_whatever_keeps_them(
    weeks: Weeks,
) -> None:
    versions = [weeks.retrain(week, promoted=True) for week in range(2)]
    first, serving = (weeks.registry.get(version) for version in versions)
    withdrawn = [
        WithdrawnVersion(version=one.version, checkpoint=one.model_fingerprint)
        for one in (first, serving)
    ]
    add_to_list(weeks.store, "manual", withdrawn=withdrawn)
    kept: dict[str, object] = {"keep": versions}
    weeks.clean(**kept)
    assert weeks.store.exists("checkpoint", first.model_fingerprint)

    lines = weeks.clean(grace_days=0, **kept)

    assert any("it was trained on forgotten text" in line for line in lines)
    assert not weeks.store.exists("checkpoint", first.model_fingerprint)
    assert not Path(weeks.store.root, "runs", first.model_fingerprint).exists()
    assert weeks.store.exists("checkpoint", serving.model_fingerprint), "it still serves"
    assert first.model_fingerprint in explain(weeks.store, weeks.registry.state(), first)
