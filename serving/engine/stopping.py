"""Ends a text at the first stop string, also where it arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Holds back just so much text as could still turn into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """Take more text and return what may be shown; nothing after a stop string was met."""
        if self.hit:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.hit = bool(found)
        end = min(found) if found else len(self._held) - self._possible_start()
        shown, held = self._held[:end], self._held[end:]
        self._held = "" if self.hit else held
        return shown

    def finish(self) -> str:
        """The text held back, when no more will come."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        starts = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
        return max((len(start) for start in starts if self._held.endswith(start)), default=0)
