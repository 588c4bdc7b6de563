"""Runs of a part, one after another, in the minutes that the part may take."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

SECONDS = 540
"""Most that one part may take unless told; a lent machine may end a command after ten minutes."""
Keep = Callable[[dict[str, Any]], object]
"""Takes all that a part has found so far."""
BEGAN = time.monotonic()
"""Of this part, which is a process."""


def check_names(only: Collection[str], runs: Collection[str]) -> None:
    """End the program where a name is that of no run."""
    if unknown := set(only) - set(runs):
        raise SystemExit(f"there is no run {', '.join(unknown)}; there are {', '.join(runs)}")


def in_turn(
    runs: Mapping[str, Callable[[float], Any]],
    seconds: float,
    keep: Keep,
    only: Collection[str] = (),
) -> dict[str, Any]:
    """What each run says, printed and kept at once: whatever ends the part takes no other's away.

    One that fails says why, and one that would take longer than the part still has, if it took as
    long as the longest before it, is left out.

    Args:
        runs: each takes the seconds that it may last.
        seconds: that all may take, from the start of this process.
        keep: is given all that was found so far.
        only: the names of the runs to do; all where it is empty.
    """
    check_names(only, runs)
    found: dict[str, Any] = {}
    longest = 0.0
    for name, run in runs.items():
        if only and name not in only:
            continue
        began = time.monotonic()
        left = BEGAN + seconds - began
        if left < longest:
            found[name] = {"left_out": f"no time is left for another {longest:.0f} s"}
        else:
            try:
                found[name] = run(left)
            except RuntimeError as error:
                found[name] = {"failed": str(error)[-3000:]}
            longest = max(longest, time.monotonic() - began)
        print(f"{name}: {found[name]}", flush=True)
        keep(found)
    return found
