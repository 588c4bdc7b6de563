"""Random histories of a registry, with what must hold after every step.

A hidden truth says how good each model is; the gate's verdicts follow it while settings change.
People, the endpoint, crashes and lost writes come in any order.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from artifacts.errors import UserError
from llm_assets.gate.verdict import GateSettings, Outcome
from llm_assets.maintenance.doctor import find_contradictions
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.state import GATE, IncumbentChanged, RegistryState, RegistryUnreachable
from tests.llm_assets.registry.conftest import base_entry, entry, verdict

MODELS = [f"model-{number}" for number in range(6)]
models = st.sampled_from(MODELS)
numbers = st.integers(0, 7)


class RegistryHistory(RuleBasedStateMachine):
    @initialize(quality=st.permutations(range(1, len(MODELS) + 1)))
    def begin(self, quality: list[int]) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=fast_folder())
        self.quality = {"base": 0} | dict(zip(MODELS, quality, strict=True))
        self.effect, self.evaluation, self.has_enough = 0, 0, True
        self.judged: dict[str, str] = {}
        self.numbers: dict[int, str] = {}
        self.registry.register_base(base_entry())
        self.before = self.registry.state()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @property
    def registry(self) -> LocalRegistry:
        """As another process opens it."""
        return LocalRegistry(Path(self.folder.name), "manual")

    @rule(model=models)
    def evaluate(self, model: str) -> None:
        """Measure a candidate against the incumbent of this moment; it may change until entered."""
        self.judged[model] = self.registry.state().incumbent_of(model).weights

    @rule(model=models)
    def enter(self, model: str) -> None:
        """Register, or register again under whatever settings there are now."""
        against = self.judged.get(model)
        if against is None:
            return
        thresholds = GateSettings(smallest_effect=self.effect)
        asked = (model, against, str(self.evaluation), thresholds)
        found = verdict(
            model,
            against,
            self.has_enough and self.quality[model] > self.quality[against] + self.effect,
            thresholds,
            str(self.evaluation),
            look=self.registry.state().look_of(*asked),
            outcome=None if self.has_enough else Outcome.TOO_FEW_DOCUMENTS,
        )
        try:
            self.registry.enter(entry(model), found)
        except IncumbentChanged:
            assert self.registry.state() == self.before

    @rule(effect=st.integers(0, 2), evaluation=st.integers(0, 2), has_enough=st.booleans())
    def change_settings(self, effect: int, evaluation: int, has_enough: bool) -> None:
        self.effect, self.evaluation, self.has_enough = effect, evaluation, has_enough

    @rule(version=numbers)
    def approve(self, version: int) -> None:
        refused(lambda: self.registry.approve(version, "Ada", "reads well"))

    @rule(version=numbers)
    def reject(self, version: int) -> None:
        refused(lambda: self.registry.reject(version, "Bo", "it swears"))

    @rule()
    def roll_back(self) -> None:
        before = self.registry.state()
        refused(lambda: self.registry.roll_back("Bo", "errors"))
        after = self.registry.state()
        assert after.succession == before.succession[: len(after.succession)], "only ever back"

    @rule()
    def serve(self) -> None:
        wanted = self.registry.find("wanted")
        assert wanted is not None
        self.registry.confirm(wanted.version)

    @rule(model=models, moment=st.integers(0, 3))
    def crash(self, model: str, moment: int) -> None:
        """The process ends at one of its writes; the next one finds all of it or nothing."""
        real, calls = os.replace, []

        def fail(*arguments: str) -> None:
            calls.append(arguments)
            if len(calls) > moment:
                raise OSError(errno.EIO, "the machine lost power")
            real(*arguments)

        before = self.registry.state()
        with mock.patch("os.replace", fail), contextlib.suppress(RegistryUnreachable):
            self.enter(model)
        assert self.registry.state().generation - before.generation in (0, 1)
        self.enter(model)

    @rule()
    def lose_the_state(self) -> None:
        """A damaged file is restored: one change is lost, and no number is given twice."""
        registry = self.registry
        path = Path(registry.folder) / "registry.json"
        if not (Path(registry.folder) / "registry.before.json").exists():
            return
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(UserError, match="doctor --repair"):
            registry.state()
        self.before = registry.restore()
        known = {found.version for found in self.before.versions}
        self.numbers = {
            number: weights for number, weights in self.numbers.items() if number in known
        } | {number: "lost" for number in self.numbers if number not in known}

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "folder"):
            return
        state = self.registry.state()
        assert list(find_contradictions(state)) == []
        self.one_model_one_number(state)
        self.nothing_on_record_is_taken_back(state)
        self.moves_by_the_gate_are_deserved(state)
        self.looks_spend_no_more_than_the_lifetimes_error(state)
        wanted = state.find("wanted")
        assert wanted is not None and not state.is_rejected(wanted.weights)
        assert len(set(state.succession)) == len(state.succession)
        served = [move.version for move in state.history if move.alias == "champion"]
        assert state.champion == (served[-1] if served else None)
        self.before = state

    def one_model_one_number(self, state: RegistryState) -> None:
        assert len({found.weights for found in state.versions}) == len(state.versions)
        for found in state.versions:
            assert self.numbers.setdefault(found.version, found.weights) == found.weights

    def nothing_on_record_is_taken_back(self, state: RegistryState) -> None:
        for name in ("verdicts", "decisions", "history"):
            old, new = getattr(self.before, name), getattr(state, name)
            assert new[: len(old)] == old
        assert len({found.answer for found in state.verdicts}) == len(state.verdicts)

    def looks_spend_no_more_than_the_lifetimes_error(self, state: RegistryState) -> None:
        """Of the comparisons that promoted nothing, the n-th was judged as the n-th at least."""
        looks: dict[object, list[int]] = {}
        promoted = set()
        for found in state.verdicts:
            if found.is_judged:
                asked = (found.weights, found.against, found.evaluation_fingerprint)
                looks.setdefault(asked, []).append(found.look)
                promoted |= {asked} if found.promoted else set()
        spent = [min(of) for asked, of in looks.items() if asked not in promoted]
        assert all(look >= number for number, look in enumerate(sorted(spent), 1)), spent

    def moves_by_the_gate_are_deserved(self, state: RegistryState) -> None:
        """The gate moves to a better model than the one of that moment, and to none twice."""
        moves = [move for move in state.history if move.alias == "wanted"]
        by_gate = [n for n, move in enumerate(moves) if n and move.by == GATE]
        for number in by_gate:
            new, old = (state.get(moves[n].version).weights for n in (number, number - 1))
            assert self.quality[new] > self.quality[old]
            assert any(found.promoted and found.against == old for found in state.verdicts_of(new))
            assert moves[number].version not in [move.version for move in moves[:number]]


def refused(change: Callable[[], object]) -> None:
    """Try what may be refused; the invariants say whether it was right."""
    with contextlib.suppress(UserError):
        change()


def fast_folder() -> str | None:
    """Memory where there is such a folder: thousands of histories sync thousands of files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]
TestHistories = RegistryHistory.TestCase
TestHistories.settings = settings(
    max_examples=60, stateful_step_count=25, suppress_health_check=QUIET
)


class LongHistory(RegistryHistory):
    """The same, ten thousand times."""


TestTenThousandHistories = pytest.mark.soak(LongHistory.TestCase)
TestTenThousandHistories.settings = settings(
    max_examples=10_000, stateful_step_count=25, suppress_health_check=QUIET
)
