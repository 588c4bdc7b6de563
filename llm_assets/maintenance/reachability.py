"""Which artifacts are needed: the roots, and all that stands behind them."""

from collections import defaultdict
from collections.abc import Mapping

Name = tuple[str, str]
"""Kind and fingerprint of an artifact."""


def reach(inputs: Mapping[Name, Mapping[str, str]], roots: Mapping[Name, str]) -> dict[Name, str]:
    """Everything that the roots need, each with the reason of the root that needs it.

    An input that is named after its kind (`clean_corpus`) is what an artifact was made from, and is
    followed all the way down. One with a name of its own (the model that a training started from,
    the incumbent, an earlier corpus) is kept itself, but what that was made from is not: otherwise
    nothing of a lineage could ever go.

    Args:
        inputs: every artifact there is, with the inputs of its manifest.
        roots: artifacts that are needed in any case, and why; one that is absent needs nothing.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    for kind, fingerprint in inputs:
        kinds[fingerprint].add(kind)
    found: dict[Name, str] = {}
    followed = [(name, reason) for name, reason in roots.items() if name in inputs]
    beside: list[tuple[Name, str]] = []
    while followed:
        name, reason = followed.pop()
        if name in found:
            continue
        found[name] = reason
        for role, fingerprint in inputs[name].items():
            if (role, fingerprint) in inputs:
                followed.append(((role, fingerprint), reason))
            else:
                beside += [((kind, fingerprint), reason) for kind in kinds[fingerprint]]
    for name, reason in beside:
        found.setdefault(name, reason)
    return found
