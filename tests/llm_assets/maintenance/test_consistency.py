"""What another hand did to a registry is told."""

from collections.abc import Callable

import pytest

from llm_assets.maintenance.doctor import find_contradictions
from llm_assets.registry.state import Decision, RegistryState
from tests.llm_assets.registry.conftest import base_entry, entry, verdict


@pytest.fixture
def state() -> RegistryState:
    """Version 1 serves, version 2 lost against it."""
    state = RegistryState()
    state.register_base(base_entry())
    state.enter(entry("first"), verdict("first", "base"))
    state.confirm(1)
    state.enter(entry("second"), verdict("second", "first", promoted=False))
    return state


def promote_without_a_verdict(state: RegistryState) -> None:
    state._want(2, "the gate", "somebody wrote this")


def reject_what_is_wanted(state: RegistryState) -> None:
    said = Decision(weights="first", approved=False, name="Ada", reason="it swears")
    state.decisions = [*state.decisions, said]


CHANGES: dict[str, Callable[[RegistryState], object]] = {
    "the gate moved to version 2 without a verdict": promote_without_a_verdict,
    "version 1 is wanted, though a person rejected it": reject_what_is_wanted,
    "version 2 is the champion, but another one": lambda state: setattr(state, "champion", 2),
    "version 2 is wanted, but `wanted` last moved": lambda state: state.succession.append(2),
    "version 7 is in the history, but not": lambda state: state.succession.append(7),
    "version 2 exists, but 2 would be the next": lambda state: setattr(state, "next_version", 2),
    "the model second is registered 2 times": lambda state: state.versions.append(state.get(2)),
}


@pytest.mark.parametrize("said", CHANGES)
def test_every_contradiction_is_named(state: RegistryState, said: str) -> None:
    assert list(find_contradictions(state)) == []
    CHANGES[said](state)
    assert any(found.startswith(said) for found in find_contradictions(state))
