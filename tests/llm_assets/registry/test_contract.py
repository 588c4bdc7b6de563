"""What every registry promises, in a folder and in Vertex AI."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, tzinfo

import pytest

from artifacts.errors import UserError
from artifacts.storage import files
from artifacts.store import layout
from llm_assets.gate.verdict import GateSettings, Outcome
from llm_assets.maintenance.doctor import find_contradictions
from llm_assets.registry.base import BACKUP_NAME, STATE_NAME, Registry, read_decisions
from llm_assets.registry.card import describe_outcome
from llm_assets.registry.state import (
    Alias,
    IncumbentChanged,
    ModelVersion,
    RegistryDamaged,
    UnknownVersion,
)
from tests.llm_assets.registry.conftest import base_entry, entry, judge, verdict

UNJUDGED = (
    *(Outcome.TOO_FEW_DOCUMENTS, Outcome.NOT_FINITE),
    *(Outcome.MISSING, Outcome.CANDIDATE_UNREADABLE),
)
"""What keeps a candidate from being compared."""


class ClockAhead(datetime):
    """A clock that is five minutes ahead."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "ClockAhead":
        return super().now(tz) + timedelta(minutes=5)


def number(registry: Registry, alias: Alias) -> int | None:
    found = registry.find(alias)
    return None if found is None else found.version


def serve(registry: Registry) -> None:
    """What the endpoint does: serve what is wanted, and say so."""
    wanted = registry.find("wanted")
    assert wanted is not None
    registry.confirm(wanted.version)


def test_base_model_is_version_0_and_wanted_until_a_candidate_is_better(
    open_registry: Callable[[], Registry],
) -> None:
    registry = open_registry()
    assert registry.state().versions == [] and registry.find("wanted") is None
    for _ in range(2):
        registry.register_base(base_entry())
    (base,) = open_registry().state().versions
    assert base.version == 0 and base.is_base and number(registry, "wanted") == 0


def test_another_base_model_is_another_version(registry: Registry) -> None:
    registry.register_base(base_entry("newer"))
    assert [found.weights for found in registry.state().versions] == ["base", "newer"]
    assert number(registry, "wanted") == 1
    judge(registry, "a")
    registry.register_base(base_entry("newest"))
    assert number(registry, "wanted") == 2


def test_an_earlier_base_model_is_wanted_again_unless_a_person_wants_the_other(
    registry: Registry,
) -> None:
    for model, wanted in (("newer", 1), ("base", 0), ("base", 0), ("newer", 1)):
        registry.register_base(base_entry(model))
        assert number(registry, "wanted") == wanted
        serve(registry)
    assert list(find_contradictions(registry.state())) == []
    registry.roll_back("Ada", "it rambles")
    registry.register_base(base_entry("newer"))
    assert number(registry, "wanted") == 0
    judge(registry, "a")
    registry.register_base(base_entry("newer"))
    assert number(registry, "wanted") == 2, "a candidate was better"


def test_a_model_keeps_its_number_whatever_measured_it_and_wherever_it_lies(
    open_registry: Callable[[], Registry], registry: Registry
) -> None:
    assert judge(registry, "a").version == 1
    assert judge(registry, "b", promoted=False).version == 2
    elsewhere = entry("a", figure=0.5).model_copy(update={"model_fingerprint": "made again"})
    again = open_registry().enter(elsewhere, verdict("a", "base", evaluation="newer"))
    assert again.version == 1 and again.model_fingerprint == "made again"
    assert [found.version for found in open_registry().state().versions] == [0, 1, 2]
    with pytest.raises(UnknownVersion, match="no version 7"):
        registry.get(7)


def test_alias_champion_moves_only_when_the_version_serves(registry: Registry) -> None:
    serve(registry)
    judge(registry, "a")
    assert (number(registry, "wanted"), number(registry, "champion")) == (1, 0)
    serve(registry)
    assert (number(registry, "champion"), number(registry, "previous")) == (1, 0)
    moves = [(move.alias, move.version, move.by) for move in registry.state().history]
    assert moves[-2:] == [("wanted", 1, "the gate"), ("champion", 1, "the endpoint")]


def test_what_serves_after_another_was_wanted_is_no_champion(registry: Registry) -> None:
    serve(registry)
    judge(registry, "a")
    registry.reject(1, "ben", "wrong dosages")
    assert not registry.confirm(1, wanted=1)
    assert number(registry, "champion") == 0
    # What serves in place of a wanted version that cannot is confirmed as long as that is wanted.
    registry.approve(1, "anna", "dosages checked")
    assert registry.confirm(0, wanted=1) and registry.confirm(1, wanted=1)
    assert number(registry, "champion") == 1


def test_a_candidate_is_judged_against_the_champion_of_the_moment(registry: Registry) -> None:
    """Once rejected against the base, a model does not pass it by to replace a better one."""
    judge(registry, "weak", promoted=False)
    judge(registry, "strong")
    assert registry.state().incumbent_of("weak").weights == "strong"
    with pytest.raises(IncumbentChanged, match="version 2 is wanted"):
        registry.enter(entry("weak"), verdict("weak", "base", evaluation="looser"))
    assert number(registry, "wanted") == 2


def test_a_comparison_recorded_meanwhile_leaves_less_of_the_error(registry: Registry) -> None:
    """Two runs on different machines were judged at one moment, each as the first."""
    judge(registry, "a", promoted=False)
    with pytest.raises(IncumbentChanged, match="meanwhile 1 are on record"):
        registry.enter(entry("b"), verdict("b", "base", look=1))
    assert number(registry, "wanted") == 0 and not registry.state().verdicts_of("b")
    registry.enter(entry("b"), verdict("b", "base", look=2))
    assert number(registry, "wanted") == 2


def test_the_wanted_model_asked_for_again_is_held_against_the_one_it_replaced(
    registry: Registry,
) -> None:
    judge(registry, "a")
    judge(registry, "b")
    assert registry.state().incumbent_of("b").weights == "a"
    before = registry.state()
    judge(registry, "b")
    assert registry.state() == before


def test_other_thresholds_evaluations_and_code_give_a_verdict_beside_the_old_one(
    registry: Registry,
) -> None:
    judge(registry, "a", promoted=False)
    judge(registry, "a", promoted=False)
    judge(registry, "a", promoted=False, evaluation="another")
    other = verdict("a", "base", promoted=False, thresholds=GateSettings(general_tolerance=0.5))
    registry.enter(entry("a"), other)
    registry.enter(entry("a"), other.model_copy(update={"gate_code_version": "next"}))
    assert len(registry.state().verdicts_of("a")) == 4
    registry.enter(entry("a"), verdict("a", "base", thresholds=GateSettings(smallest_effect=0.001)))
    assert number(registry, "wanted") == 1, "a candidate is not stuck with its first verdict"


def test_looks_are_counted_over_the_whole_life_and_asking_again_is_no_new_one(
    registry: Registry,
) -> None:
    judge(registry, "a", promoted=False)
    judge(registry, "a", promoted=False)
    judge(registry, "b", promoted=False)
    judge(registry, "a", promoted=False, evaluation="another")
    state = registry.state()
    assert state.look_of("a", "base", "evaluation") == 1
    assert state.look_of("a", "base", "another") == 3
    assert state.look_of("c", "base", "evaluation") == state.look_of("c", "base") == 4
    assert state.look_of("b", "base") == 4, "to be measured once more"
    assert state.evaluations_of("a") == ["evaluation", "another"]


def test_another_metric_is_another_look_which_pays_for_what_the_first_told(
    registry: Registry,
) -> None:
    held_out = verdict("a", "base", promoted=False, procedure="held-out text decides")
    registry.enter(entry("a"), held_out)
    state, exam = registry.state(), GateSettings(metric="exam")
    asked = ("a", "base", "evaluation")
    assert state.look_of(*asked) == 1 and state.look_of(*asked, exam) == 2
    assert state.readable_before(*asked, "the exam decides", "exam") == 1
    with pytest.raises(IncumbentChanged, match="meanwhile 1 are on record"):
        registry.enter(entry("a"), verdict("a", "base", thresholds=exam))
    registry.enter(entry("a"), verdict("a", "base", thresholds=exam, look=2))
    assert number(registry, "wanted") == 1
    assert registry.state().look_of(*asked, exam) == 2, "asking again is no new one"


def test_a_promotion_spends_nothing(registry: Registry) -> None:
    judge(registry, "a", promoted=False)
    judge(registry, "b")
    judge(registry, "c")
    state = registry.state()
    looks = [("b", "base", "evaluation"), ("c", "b", "evaluation"), ("d", "c", None)]
    assert [state.look_of(*asked) for asked in looks] == [2, 2, 2]
    judge(registry, "d", promoted=False)
    assert registry.state().look_of("e", "c") == 3


@pytest.mark.parametrize(
    "outcome", [*UNJUDGED, Outcome.INCUMBENT_UNREADABLE, Outcome.OTHER_EVALUATION]
)
def test_what_was_not_compared_spends_nothing_and_may_be_read(
    registry: Registry, outcome: Outcome
) -> None:
    for number in range(3):
        judge(registry, f"unjudged {number}", promoted=False, outcome=outcome)
    state = registry.state()
    assert state.look_of("new", "base") == 1, "the first that could be promoted"
    assert state.readable_before("new", "base", None, "another") == 3

    judge(registry, "new", promoted=False)
    assert registry.state().look_of("newer", "base") == 2


@pytest.mark.parametrize("outcome", UNJUDGED)
def test_who_picks_the_best_of_what_was_not_compared_spends_for_all_of_it(
    registry: Registry, outcome: Outcome
) -> None:
    many = GateSettings(minimum_documents=60)
    few = {"promoted": False, "outcome": outcome, "thresholds": many}
    for number in range(5):
        judge(registry, f"unjudged {number}", **few)
    asked = ("unjudged 2", "base", "evaluation")
    before = registry.state()
    judge(registry, "unjudged 2", **few)
    assert registry.state() == before and before.look_of(*asked, many) == 1, "as it was"
    assert before.look_of("unjudged 2", "base", "of more text", many) == 6

    assert before.look_of(*asked) == 5
    with pytest.raises(IncumbentChanged, match="meanwhile 4 are on record"):
        registry.enter(entry("unjudged 2"), verdict("unjudged 2", "base"))
    judge(registry, "unjudged 2", promoted=False)
    state = registry.state()
    assert state.look_of(*asked) == state.look_of(*asked, GateSettings(smallest_effect=0.1)) == 5
    assert state.look_of("new", "base") == 2


def test_what_can_be_read_again_is_compared_at_a_look_of_its_own(registry: Registry) -> None:
    """Its question is the same, as its files were restored."""
    asked = ("broken", "base", "evaluation")
    judge(registry, "broken", promoted=False, outcome=Outcome.CANDIDATE_UNREADABLE)
    assert registry.state().look_of(*asked) == 1
    judge(registry, "a", promoted=False)
    assert registry.state().look_of(*asked) == 2
    judge(registry, "broken", promoted=False)
    assert registry.state().look_of("new", "base") == 3


def test_a_promotion_has_its_verdict_on_record_though_the_question_was_answered_by_no(
    registry: Registry,
) -> None:
    """As where the settings are again those of a procedure that had read fewer scores."""
    registry.enter(entry("a"), verdict("a", "base", promoted=False, procedure="tried"))
    for _ in range(2):
        registry.enter(entry("a"), verdict("a", "base", procedure="weekly"))
    state = registry.state()
    assert number(registry, "wanted") == 1 and list(find_contradictions(state)) == []
    assert [found.promoted for found in state.verdicts_of("a")] == [False, True]
    assert state.look_of("b", "a") == 1, "one comparison, which promoted"


def test_what_came_of_a_verdict_says_who_overruled_it(registry: Registry) -> None:
    def outcome(model: str, promoted: bool, evaluation: str) -> str:
        judge(registry, model, promoted, evaluation=evaluation)
        return describe_outcome(registry.state(), registry.state().verdicts[-1])

    assert outcome("a", False, "first") == "rejected"
    registry.approve(1, "Ada", "reads better")
    assert outcome("a", False, "second") == "rejected by the verdict, but Ada approved it"
    registry.reject(1, "Bo", "it swears")
    assert outcome("a", False, "third") == "rejected"
    assert outcome("a", True, "fourth") == "promoted by the verdict, but Bo rejected it"
    assert outcome("b", True, "first") == "promoted"
    told = "rejected by the verdict, but it was promoted before and stays wanted"
    assert outcome("b", False, "second") == told
    serve(registry)
    registry.roll_back("Ada", "errors")
    assert outcome("b", True, "third") == "promoted by the verdict, but version 0 is wanted"


def test_scores_can_be_read_only_by_who_chooses_after_them(registry: Registry) -> None:
    for model, chosen in (("a", ""), ("b", "weekly"), ("c", "tried")):
        registry.enter(entry(model), verdict(model, "base", promoted=False, procedure=chosen))
    state = registry.state()

    def readable(model: str, procedure: str) -> int:
        return state.readable_before(model, "base", "evaluation", procedure)

    assert readable("new", "weekly") == 1, "what it makes of new text is no choice"
    assert readable("new", "tried") == 2
    assert readable("new", "another") == readable("new", "") == 3
    assert readable("b", "weekly") == readable("b", "another") == 1


def test_what_a_person_rejected_comes_back_only_by_a_person(registry: Registry) -> None:
    judge(registry, "a")
    serve(registry)
    registry.reject(1, "Bo", "it swears")
    assert number(registry, "wanted") == 0
    judge(registry, "a", evaluation="another")
    assert number(registry, "wanted") == 0
    registry.approve(1, "Ada", "it no longer does")
    assert number(registry, "wanted") == 1
    assert [said.approved for said in registry.state().decisions_of("a")] == [False, True]


def test_the_last_word_holds_though_another_persons_clock_is_ahead(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        judge(registry, name)
        serve(registry)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("llm_assets.registry.state.datetime", ClockAhead)
        registry.roll_back("Ada", "errors")
        registry.approve(1, "Ada", "reads well")
    registry.approve(2, "Bo", "mended")
    assert number(registry, "wanted") == 2
    registry.reject(1, "Bo", "it swears")
    said = [(one.name, one.approved) for one in read_decisions(registry._store, "manual")]
    assert said == [("Ada", True), ("Bo", True), ("Bo", False)]


def test_rollback_goes_back_step_by_step_past_what_was_rejected_and_never_forward(
    registry: Registry,
) -> None:
    for name in "abc":
        judge(registry, name)
        serve(registry)
    registry.reject(2, "Bo", "it swears")
    assert registry.roll_back("Ada", "errors").version == 1
    assert registry.roll_back("Ada", "errors").version == 1, "does not serve yet: tried again"
    serve(registry)
    assert registry.roll_back("Ada", "errors").version == 0
    serve(registry)
    with pytest.raises(UserError, match="no earlier version"):
        registry.roll_back("Ada", "errors")
    judge(registry, "c", evaluation="another")
    assert number(registry, "wanted") == 0, "what was left by a person stays left"


def test_a_rollback_leaves_what_serves_not_what_waits(registry: Registry) -> None:
    for name in "ab":
        judge(registry, name)
        serve(registry)
    judge(registry, "c")
    assert registry.roll_back("Ada", "version 2 fails").version == 1


def test_what_is_wanted_and_cannot_serve_gives_way_to_the_base_that_serves(
    registry: Registry,
) -> None:
    judge(registry, "a", promoted=False)
    serve(registry)
    registry.approve(1, "Ada", "reads well")
    registry.roll_back("Ada", "its weights are gone")
    assert number(registry, "wanted") == number(registry, "champion") == 0
    with pytest.raises(UserError, match="no earlier version"):
        registry.roll_back("Ada", "once more")


def test_people_give_name_and_reason_and_leave_the_base_alone(registry: Registry) -> None:
    judge(registry, "a", promoted=False)
    for decide in (registry.approve, registry.reject):
        with pytest.raises(UserError, match="name and a reason"):
            decide(1, "", "why")
        with pytest.raises(UnknownVersion, match=r"base model.*`llm-assets versions`"):
            decide(0, "Ada", "old")
    for words, told in ((" ", "name and a reason"), ("it swears\n# a lot", "on one line")):
        with pytest.raises(UserError, match=told):
            registry.roll_back("Ada", words)
    assert registry.state().decisions == []


@pytest.mark.fault(
    "model_version",
    "two decisions at once",
    sees="that the incumbent has changed",
    then="the second sees the first",
)
def test_of_two_changes_at_one_time_the_second_sees_the_first(
    open_registry: Callable[[], Registry], registry: Registry
) -> None:
    together = threading.Barrier(2)

    def enter(model: str) -> ModelVersion:
        own = open_registry()
        together.wait()
        return own.enter(entry(model), verdict(model, "base"))

    with ThreadPoolExecutor(2) as people:
        entered = [people.submit(enter, model) for model in ("a", "b")]
    refused = [future.exception() for future in entered if future.exception()]
    assert [type(error) for error in refused] == [IncumbentChanged]
    assert number(registry, "wanted") == 1
    base, first = registry.state().versions
    assert base.weights == "base" and first.weights in ("a", "b")


@pytest.mark.fault(
    "model_version",
    "registry file: {damage}",
    sees="the file and `llm-assets doctor --repair`",
    then="nothing is promoted; once restored, no number is assigned twice",
)
@pytest.mark.parametrize("damage", ["lost", "cut", "wrong fields"])
def test_a_lost_or_damaged_state_is_named_and_its_way_out_works(
    open_registry: Callable[[], Registry], registry: Registry, damage: str
) -> None:
    judge(registry, "a")
    judge(registry, "b")
    path = f"{registry.folder}/{STATE_NAME}"
    whole = files.find(path) or b""
    if damage == "lost":
        files.remove(path)
    else:
        files.write(path, whole[:-40] if damage == "cut" else b'{"versions": 3}')
    for use in (registry.state, lambda: registry.register_base(base_entry())):
        with pytest.raises(RegistryDamaged, match=f"{STATE_NAME} .*doctor --repair"):
            use()
    restored = open_registry().restore()
    assert [found.weights for found in restored.versions] == ["base", "a"]
    assert judge(registry, "c").version == 3, "number 2 was given before"
    with pytest.raises(UserError, match="nothing to restore"):
        registry.restore()


@pytest.mark.fault(
    "model_version",
    "registry restored from an old backup",
    sees="that it is older, by how many changes, and `llm-assets doctor --repair`",
    then="nothing is promoted or served from it; if it is used anyway, no number is assigned twice",
)
@pytest.mark.parametrize("brought_back", [[STATE_NAME], [STATE_NAME, BACKUP_NAME]])
def test_an_older_state_is_known_and_taken_only_on_demand(
    open_registry: Callable[[], Registry], registry: Registry, brought_back: list[str]
) -> None:
    judge(registry, "a")
    old = files.find(f"{registry.folder}/{STATE_NAME}")
    assert old is not None
    judge(registry, "b")
    registry.reject(2, "Ada", "it reads badly")
    for name in brought_back:
        files.write(f"{registry.folder}/{name}", old)

    older = f"{STATE_NAME} is an older one: it reflects 2 of 4 changes.*repair"
    for use in (registry.state, lambda: judge(registry, "b"), lambda: registry.confirm(1)):
        with pytest.raises(RegistryDamaged, match=older):
            use()
    restored = open_registry().restore()
    # Of the two that are there, the newer one; what came after it is not known any more.
    known = ["base", "a"] if BACKUP_NAME in brought_back else ["base", "a", "b"]
    assert [found.weights for found in restored.versions] == known
    assert judge(registry, "c").version == 3
    assert number(registry, "wanted") == 3


@pytest.mark.fault(
    "model_version",
    "registry and `pipelines` restored from a backup that is older than a decision",
    sees="the versions of the backup, with the decisions made since",
    then="a rejected version stays rejected, even if a run registers it again; an approved one is "
    "wanted",
)
@pytest.mark.parametrize("knows_the_models", [True, False])
def test_a_registry_from_a_backup_follows_what_people_decided_since(
    registry: Registry, knows_the_models: bool
) -> None:
    def names() -> dict[str, bytes | None]:
        places = [f"{registry.folder}/{name}" for name in (STATE_NAME, BACKUP_NAME)]
        places.append(f"{registry.root}/{layout.pipeline_record('manual')}")
        return {place: files.find(place) for place in places}

    judge(registry, "a")
    backup = names()
    judge(registry, "b")
    judge(registry, "c", promoted=False)
    if knows_the_models:
        backup = names()
    registry.reject(2, "Ada", "it reads badly")
    registry.approve(3, "Ada", "it reads well")
    decided = registry.state().decisions
    for place, content in backup.items():
        files.write(place, content or b"")

    if knows_the_models:
        assert number(registry, "wanted") == 3
    assert judge(registry, "b").version == 2
    assert number(registry, "wanted") in (1, 3)
    assert judge(registry, "c", promoted=False).version == 3

    state = registry.state()
    assert number(registry, "wanted") == 3 and state.is_rejected("b")
    assert state.decisions == decided and not list(find_contradictions(state))
    registry.approve(1, "Bo", "it was better")
    assert number(registry, "wanted") == 1

    # What an older artifact half lacks is written down by the next run.
    files.remove(f"{registry.root}/{layout.decisions('manual')}")
    registry.register_base(base_entry())
    assert read_decisions(registry._store, "manual") == registry.state().decisions


@pytest.mark.fault(
    "model_version",
    "registry edited by hand",
    sees="that it was changed after it was written",
    then="nothing is promoted or served from it; `llm-assets doctor --repair` restores the newest "
    "state that can be read",
)
@pytest.mark.parametrize("has_checksum", [True, False])
def test_an_edited_state_is_refused(registry: Registry, has_checksum: bool) -> None:
    judge(registry, "a")
    content = files.find(f"{registry.folder}/{STATE_NAME}")
    assert content is not None
    fields = json.loads(content.replace(b"models/a", b"models/base"))
    if not has_checksum:
        del fields["checksum"]
    files.write(f"{registry.folder}/{STATE_NAME}", json.dumps(fields).encode())
    with pytest.raises(RegistryDamaged, match=r"(written|no checksum).*doctor --repair"):
        registry.find("wanted")


@pytest.mark.parametrize("newest_has_one", [False, True])
def test_a_registry_of_a_release_without_checksums_is_taken_over_by_a_repair(
    registry: Registry, newest_has_one: bool
) -> None:
    """Unless one that has its checksum is left: the other may be that one, edited."""
    for weights in ("a", "b"):
        judge(registry, weights)
    expected = registry.state()
    for name in (STATE_NAME, BACKUP_NAME):
        content = files.find(f"{registry.folder}/{name}")
        assert content is not None
        fields = json.loads(content)
        if name == STATE_NAME or not newest_has_one:
            del fields["checksum"]
        files.write(f"{registry.folder}/{name}", json.dumps(fields).encode())
    with pytest.raises(RegistryDamaged, match=r"an early release .*doctor --repair"):
        registry.state()
    registry.restore()
    found = registry.state()
    assert len(found.versions) == len(expected.versions) - newest_has_one
    if not newest_has_one:
        assert found.aliases == expected.aliases and found.verdicts == expected.verdicts


@pytest.mark.fault(
    "model_version",
    "registry and its backup lost",
    sees="that nothing is left, and what to do",
    then="nothing is guessed",
)
def test_where_nothing_is_left_to_restore_the_message_says_so(registry: Registry) -> None:
    judge(registry, "a")
    for name in (STATE_NAME, BACKUP_NAME):
        files.remove(f"{registry.folder}/{name}")
    with pytest.raises(RegistryDamaged, match="start over from the base model"):
        registry.restore()


def test_who_asks_again_is_told_of_changes_of_others_and_keeps_none_of_their_own(
    open_registry: Callable[[], Registry],
) -> None:
    one, other = open_registry(), open_registry()
    one.register_base(base_entry())
    assert one.state().versions[0] is one.state().versions[0], "what is the same is parsed once"
    asked = one.state()
    asked.register(entry("of nobody"))
    asked.approve(1, "Ada", "not meant")
    assert len(one.state().versions) == 1 and one.state().find("wanted").version == 0
    judge(other, "candidate")
    assert [version.weights for version in one.state().versions] == ["base", "candidate"]
