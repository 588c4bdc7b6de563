"""The sensor that looks at the source text: what it asks for, when, and how often."""

import json
import shutil
import time
from pathlib import Path

import pytest
from dagster import DagsterRunStatus, Definitions, RunRequest, asset

from artifacts.leases import describe_holder
from llm_assets.automation.launched import PROCESS_TAG
from llm_assets.gate.verdict import Outcome
from serving.state import Phase
from tests.llm_assets.automation.conftest import Automated
from tests.llm_assets.registry.conftest import base_entry, verdict

GONE = 2**22 + 1
"""The number of no process."""


def test_new_text_asks_for_one_run_that_goes_on_from_the_champion(automated: Automated) -> None:
    automated.add()
    request = automated.expect_run()
    assert request.run_config["ops"]["checkpoint"]["config"] == {
        "continue_from_champion": True,
        "longer": 1,
    }
    again = automated.expect_run()
    assert again.run_key == request.run_key
    run = automated.launch(request)
    assert f"{run[:8]} is under way" in str(automated.tick())


def test_text_that_is_still_changing_is_waited_for(automated: Automated) -> None:
    automated.automate(quiet_minutes=5)
    automated.add()
    assert "waiting until it is unchanged" in str(automated.tick())
    since = json.loads(automated.cursor or "")
    automated.cursor = json.dumps(since | {"since": since["since"] - 301})
    automated.expect_run()
    automated.cursor = json.dumps(since | {"since": since["since"] + 3600})
    assert "waiting until it is unchanged" in str(automated.tick())


@pytest.mark.parametrize("cursor", ["", "not json", '{"version": 1, "seen": "x"}'])
def test_cursor_of_another_version_begins_again(automated: Automated, cursor: str) -> None:
    automated.add()
    automated.cursor = cursor
    automated.expect_run()


def test_little_change_is_waited_for_until_it_is_enough(automated: Automated) -> None:
    automated.automate(minimum_changed_megabytes=0.001)
    automated.add()
    assert "minimum_changed_megabytes" in str(automated.tick())
    # Where the list of what was read cannot be, nobody knows how much has changed.
    surveys = automated.project.folder / "store" / "automation" / "manual"
    before = {path: path.read_bytes() for path in surveys.glob("*.npy")}
    for path, content in before.items():
        path.write_bytes(content[:-9])
    assert before and isinstance(automated.tick(), RunRequest)
    for path, content in before.items():
        path.write_bytes(content)
    automated.add("more.txt", times=20)
    automated.expect_run()


def test_renamed_text_teaches_nothing_and_deleted_text_counts(automated: Automated) -> None:
    first = automated.text / "0000.txt"
    first.rename(automated.text / "renamed.txt")
    assert "only renamed" in str(automated.tick())
    (automated.text / "renamed.txt").rename(first)
    assert "knows this text" in str(automated.tick())
    first.unlink()
    automated.expect_run()


def test_lists_of_files_are_kept_of_texts_that_can_still_be_compared(automated: Automated) -> None:
    """A tick notes the files of each new text. What no version knows goes at the next change, but
    not while a run may make a version of it."""
    folder = automated.project.folder / "store" / "automation" / "manual"
    assert "knows this text" in str(automated.tick())
    (wanted,) = folder.iterdir()
    # What was told lies beside them, and what another process is writing.
    beside = [folder / "told.json", folder / ".told.json.0123.tmp"]
    for file in beside:
        file.write_text("{}")
    automated.add("second.txt")
    run = automated.launch(automated.tick())
    automated.add("third.txt")
    assert "is under way" in str(automated.tick())
    assert len(list(folder.iterdir())) == 3 + len(beside)
    automated.end(run, succeeded=False)
    automated.add("fourth.txt")
    automated.expect_run()
    left = list(folder.iterdir())
    assert {wanted, *beside} <= {*left} and len(left) == 2 + len(beside)


def test_a_store_that_is_not_there_is_no_new_one(automated: Automated) -> None:
    automated.add()
    automated.end(automated.launch(automated.tick()), succeeded=True)
    store = automated.project.folder / "store"
    store.rename(automated.project.folder / "unmounted")
    store.mkdir()
    told = str(automated.tick())
    assert "no version of manual, though runs have made some: is its disk mounted" in told
    # Under another name, a new line of models begins.
    config = automated.project.config
    config.write_text(config.read_text().replace("name: manual\n", "name: second\n", 1))
    automated.expect_run()


def test_failed_run_is_tried_again_with_pauses_and_a_limit(automated: Automated) -> None:
    automated.automate(retries=1, retry_minutes=60)
    automated.add()
    first = automated.launch(automated.tick())
    automated.end(first, succeeded=False, reason="No space left\non device")
    told = str(automated.tick())
    assert "the next try is at" in told
    assert told.endswith(" It failed: No space left on device")
    automated.automate(retry_minutes=0)
    second = automated.launch(automated.tick())
    automated.end(second, succeeded=False, reason="killed " * 100)
    told = str(automated.tick())
    assert "2 runs did not resolve this" in told
    assert told.endswith(" killed killed …")


def test_a_run_that_somebody_deleted_holds_no_other_back(automated: Automated) -> None:
    """Dagster launches no run whose key another had, and says nothing of it."""
    automated.automate(retries=3, retry_minutes=0)
    automated.add()
    keys = []
    for number in range(3):
        request = automated.expect_run()
        keys.append(request.run_key)
        run = automated.launch(request)
        automated.end(run, succeeded=False)
        if number == 0:
            first = run
    automated.instance.delete_run(first)
    request = automated.expect_run()
    assert request.run_key not in keys


def test_canceled_run_is_a_persons_no_to_this_text_alone(automated: Automated) -> None:
    automated.add()
    automated.launch(automated.tick(), DagsterRunStatus.CANCELED)
    assert "was canceled" in str(automated.tick())
    automated.add("other.txt")
    automated.expect_run()


def test_run_launched_by_hand_is_waited_for_while_its_process_lives(automated: Automated) -> None:
    alive = automated.run_by_hand(process=describe_holder())
    automated.add()
    assert f"{alive[:8]} (retraining) is under way" in str(automated.tick())
    automated.end(alive, succeeded=False)
    gone = json.loads(describe_holder()) | {"started": "1"}
    automated.run_by_hand(process=json.dumps(gone))
    automated.expect_run()


@pytest.mark.parametrize(
    ("key", "is_ours"),
    [("checkpoint", True), ("sources/manual", True), ("letters/checkpoint", False)],
)
def test_assets_made_by_hand_are_waited_for_unless_they_are_of_another_pipeline(
    automated: Automated, key: str, is_ours: bool
) -> None:
    @asset(key=key.split("/"))
    def made_by_hand() -> None: ...

    automated.instance.create_run_for_job(
        Definitions([made_by_hand]).resolve_implicit_global_asset_job_def(),
        asset_selection=frozenset(made_by_hand.keys),
        status=DagsterRunStatus.STARTED,
    )
    automated.add()
    assert ("is under way" in str(automated.tick())) is is_ours


def test_gates_no_is_followed_by_longer_training_once(automated: Automated) -> None:
    automated.add()
    automated.end(automated.launch(automated.tick()), succeeded=True)
    second = automated.teach("second", Outcome.NOT_BETTER)
    # Measured on more text, it is one candidate still.
    against = automated.registry.state().incumbent_of("second").weights
    again = verdict("second", against, promoted=False, evaluation="larger")
    automated.registry.enter(second, again)
    longer = automated.expect_run()
    assert longer.run_config["ops"]["checkpoint"]["config"]["longer"] == 2
    automated.end(automated.launch(longer), succeeded=True)
    automated.teach("third", Outcome.TIE)
    assert "The gate rejected 2" in str(automated.tick())
    automated.add("more.txt")
    automated.expect_run()


def test_text_is_read_on_in_further_runs_until_it_is_covered(automated: Automated) -> None:
    """More text than one run reads: each run goes on from the version that the one before made."""
    automated.add("much.txt")
    automated.teach("second", coverage=0.1)
    assert "has read 10.0% of it (`automation.least_coverage`)" in str(automated.tick())
    automated.automate(least_coverage=0.9, minimum_changed_megabytes=1)
    request = automated.expect_run()
    assert request.run_config["ops"]["checkpoint"]["config"] == {
        "continue_from_champion": True,
        "longer": 1,
        "from_version": 2,
    }
    automated.end(automated.launch(request), succeeded=True)
    automated.teach("third", coverage=0.6)
    request = automated.expect_run()
    assert request.run_config["ops"]["checkpoint"]["config"]["from_version"] == 3
    automated.end(automated.launch(request), succeeded=True)
    automated.teach("fourth", coverage=0.95)
    assert "version 4, which is wanted, knows this text." in str(automated.tick()).lower()


def test_text_is_read_on_where_little_of_it_changed_until_the_gate_finds_nothing(
    automated: Automated,
) -> None:
    automated.automate(least_coverage=0.9, longer_attempts=0, minimum_changed_megabytes=1)
    automated.teach("second", coverage=0.5)
    first = automated.text / "0000.txt"
    first.rename(automated.text / "renamed.txt")
    request = automated.expect_run()
    assert "from_version" not in request.run_config["ops"]["checkpoint"]["config"]
    automated.end(automated.launch(request), succeeded=True)
    automated.teach("third", Outcome.NOT_BETTER, coverage=0.9)
    assert "The gate rejected 1 candidate" in str(automated.tick())
    (automated.text / "renamed.txt").rename(automated.text / "again.txt")
    assert "only renamed" in str(automated.tick())


def test_text_whose_rest_adds_nothing_is_not_read_on(automated: Automated) -> None:
    automated.automate(least_coverage=0.9, longer_attempts=0)
    automated.add()
    automated.teach("second", coverage=0.5)
    automated.end(automated.launch(automated.tick()), succeeded=True)
    automated.teach("third", Outcome.NOT_BETTER, coverage=0.9)
    assert "The gate rejected 1 candidate trained on this text" in str(automated.tick())


@pytest.mark.parametrize("outcome", [Outcome.NOT_BETTER, Outcome.TIE])
def test_what_would_be_trained_once_more_just_the_same_is_not_launched(
    automated: Automated, outcome: Outcome
) -> None:
    automated.automate(continue_from_champion=False)
    automated.add()
    automated.end(automated.launch(automated.tick()), succeeded=True)
    automated.teach("second", outcome)
    said = str(automated.tick())
    assert "The gate rejected 1" in said and "the same model" in said and "more text" in said
    automated.add("more.txt")
    automated.expect_run()


def test_persons_word_ends_the_asking(automated: Automated) -> None:
    automated.add()
    second = automated.teach("second")
    assert "version 2, which is wanted" in str(automated.tick()).lower()
    automated.registry.roll_back("Ada", "it rambles")
    assert "Ada took version 2" in str(automated.tick())
    # Nor is a version that a person took out of service followed by another that reads on.
    automated.automate(least_coverage=0.9)
    assert "Ada took version 2" in str(automated.tick())
    automated.registry.reject(second.version, "Ada", "it rambles")
    assert "Ada rejected version 2" in str(automated.tick())


def test_a_version_that_was_read_on_from_may_be_taken_out_of_service(automated: Automated) -> None:
    automated.automate(least_coverage=0.9)
    automated.add()
    for model, outcome in (
        ("second", Outcome.BETTER),
        ("third", Outcome.BETTER),
        ("fourth", Outcome.NOT_BETTER),
    ):
        automated.teach(model, outcome, coverage=0.5)
    automated.registry.roll_back("Ada", "it rambles")
    assert "Ada took version 3" in str(automated.tick())


def test_text_that_moves_back_is_asked_for_once_against_the_newer_champion(
    automated: Automated,
) -> None:
    automated.add()
    automated.teach("second")
    (automated.text / "new.txt").unlink()
    request = automated.expect_run()
    automated.end(automated.launch(request), succeeded=True)
    automated.teach("third", Outcome.TOO_FEW_DOCUMENTS)
    assert "The gate rejected" in str(automated.tick())
    automated.add()
    assert "knows this text" in str(automated.tick())


def test_blackout_and_budget_stop_launches_and_say_so(automated: Automated) -> None:
    automated.automate(blackouts=["00:00-24:00"])
    automated.add()
    assert "blackout 00:00-24:00" in str(automated.tick())
    automated.automate(blackouts=[])
    automated.end(automated.launch(automated.tick()), succeeded=False)
    automated.automate(retry_minutes=0, monthly_hours=1e-9)
    assert "The month's budget is spent" in str(automated.tick())
    automated.automate(monthly_cost=1000, cost_per_hour=2)
    assert "the limit is 1e-09 hours" in str(automated.tick())
    automated.automate(monthly_hours=1)
    automated.expect_run()


def test_time_in_which_the_machine_was_off_is_not_of_the_budget(automated: Automated) -> None:
    second = 1 / 3600
    automated.automate(retry_minutes=0, monthly_hours=second)
    automated.add()
    run = automated.launch(automated.tick())
    gone = json.loads(describe_holder()) | {"started": "1"}
    automated.instance.add_run_tags(run, {PROCESS_TAG: json.dumps(gone)})
    time.sleep(1.5)
    cursor = automated.cursor
    automated.tick("run_processes")
    automated.cursor = cursor
    again = automated.expect_run()
    died = automated.instance.get_run_by_id(run)
    assert died is not None
    # As Dagster does where it launches one again.
    later = automated.launch(again._replace(tags=died.tags))
    time.sleep(1.5)
    automated.end(later, succeeded=False)
    assert "budget is spent" in str(automated.tick())


def test_endpoint_that_serves_another_version_than_the_wanted_one_is_asked_again(
    automated: Automated,
) -> None:
    assert "is wanted and serving" in str(automated.tick("endpoint_follows"))
    automated.registry.roll_back("Ada", "it rambles")
    request = automated.expect_run("endpoint_follows")
    automated.end(automated.launch(request), succeeded=False)
    assert "the next try is at" in str(automated.tick("endpoint_follows"))


def test_no_run_is_asked_for_where_the_wanted_version_cannot_serve(
    automated: Automated, tmp_path: Path
) -> None:
    """As where a person rejects the first classifier: no run would change that."""
    (tmp_path / "config.json").write_text('{"architectures": ["RobertaForMaskedLM"]}')
    entry = base_entry().model_copy(update={"model_url": str(tmp_path)})
    automated.registry.register_base(entry)
    source = {"type": "files", "name": "manual", "path": str(automated.text)}
    labeled = {"sources": [{**source, "examples": {"form": "labeled"}}]}
    automated.project.configure(raw_corpus=labeled, checkpoint={"recipe": "classification"})
    automated.registry.roll_back("Ada", "it takes bugs for bills")
    assert "knows none of the classes" in str(automated.tick("endpoint_follows"))


@pytest.mark.parametrize("phase", ["serving", "stopped"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_endpoint_that_died_is_served_again_and_one_that_was_stopped_is_not(
    automated: Automated, phase: Phase, by_hand: bool
) -> None:
    """Also where another version is wanted: it may be what the endpoint was stopped for. A machine
    that goes down has its endpoint stop as well."""
    automated.say_endpoint(GONE, "long ago", phase)
    if by_hand:
        automated.endpoint.stopped_path.touch()
    for is_wanted in (True, False):
        if not is_wanted:
            automated.registry.roll_back("Ada", "it rambles")
        found = automated.tick("endpoint_follows")
        if by_hand:
            assert "stays so until `endpoint` is materialized" in str(found)
        else:
            assert isinstance(found, RunRequest)


def test_an_endpoint_that_died_is_not_left_dead_while_a_training_goes_on(
    automated: Automated,
) -> None:
    """Nor for good where it cannot start beside the training, which may have the memory."""
    automated.automate(retries=0)
    automated.add()
    training = automated.launch(automated.tick())
    automated.cursor = None
    automated.registry.roll_back("Ada", "it rambles")
    assert f"Run {training[:8]}" in str(automated.tick("endpoint_follows")), "something answers"
    automated.say_endpoint(GONE, "long ago", "serving")
    again = automated.launch(automated.tick("endpoint_follows"))
    assert f"Run {again[:8]} is under way for this" in str(automated.tick("endpoint_follows"))
    automated.end(training, succeeded=False)
    assert f"Run {again[:8]}" in str(automated.tick("endpoint_follows")), "one start at a time"
    automated.end(again, succeeded=False)
    automated.expect_run("endpoint_follows")


def test_an_endpoint_of_which_nothing_is_left_is_served_again(automated: Automated) -> None:
    """As on another machine, whose store is in a bucket: what it is doing is kept on each."""
    shutil.rmtree(automated.endpoint.folder)
    automated.expect_run("endpoint_follows")


def test_an_endpoint_that_cannot_start_is_tried_as_often_as_any_run(automated: Automated) -> None:
    automated.project.configure(automation={"retries": 1, "retry_minutes": 0})
    for _ in range(2):
        # Each start that fails writes its own.
        automated.say_endpoint(GONE, "long ago", "failed")
        automated.end(automated.launch(automated.tick("endpoint_follows")), succeeded=False)

    assert "2 runs did not resolve this" in str(automated.tick("endpoint_follows"))
