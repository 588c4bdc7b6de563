"""Whether what a registry says fits together."""

from collections import Counter
from collections.abc import Iterator

from llm_assets.registry.records import GATE, Alias, ModelVersion
from llm_assets.registry.state import RegistryState


def find_contradictions(state: RegistryState) -> Iterator[str]:
    """Name what cannot be true together; a state that only `RegistryState` changed has nothing."""
    yield from _repeated("number", [found.version for found in state.versions])
    yield from _repeated("model", [found.weights for found in state.versions])
    known = {found.version: found for found in state.versions}
    if known and max(known) >= state.next_version:
        yield f"version {max(known)} exists, but {state.next_version} would be the next number"
    named = {move.version for move in state.history} | {*state.succession}
    if unknown := sorted(named - known.keys()):
        yield f"version {unknown[0]} is in the history, but not registered"
        return
    last: dict[Alias, int] = {move.alias: move.version for move in state.history}
    if state.succession and last.get("wanted") != state.succession[-1]:
        yield f"version {state.succession[-1]} is wanted, but the last move was to another"
    if state.champion != last.get("champion"):
        yield f"version {state.champion} is the champion, but another one served last"
    if state.succession and state.is_rejected(known[state.succession[-1]].weights):
        yield f"version {state.succession[-1]} is wanted, though a person rejected it"
    yield from _undeserved(state, known)


def _repeated(what: str, values: list[int] | list[str]) -> Iterator[str]:
    for value, count in Counter(values).items():
        if count > 1:
            yield f"the {what} {value} is registered {count} times"


def _undeserved(state: RegistryState, known: dict[int, ModelVersion]) -> Iterator[str]:
    """Moves by the gate without a verdict for them."""
    moves = [known[move.version] for move in state.history if move.alias == "wanted"]
    by = [move.by for move in state.history if move.alias == "wanted"]
    for number in range(1, len(moves)):
        new, old = moves[number], moves[number - 1]
        if by[number] != GATE or new.is_base:
            continue
        verdicts = state.verdicts_of(new.weights)
        if not any(found.promoted and found.against == old.weights for found in verdicts):
            yield f"the gate moved to version {new.version} without a verdict for it"
