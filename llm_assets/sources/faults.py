"""Documents that cannot be used: set aside and counted, fatal only when they are many."""

from collections import Counter
from dataclasses import dataclass, field

from artifacts.errors import UserError

EXAMPLES = 5


@dataclass
class Quarantine:
    """The faults of one source."""

    source: str
    maximum_share: float
    """Largest share of a source's documents that may be faulty."""
    sound: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, reason: str, message: str) -> None:
        """Set one document aside; `message` names its file and row."""
        self.counts[reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(message)

    def judge(self) -> None:
        """Raise UserError where more than the allowed share was faulty."""
        faulty = self.counts.total()
        documents = faulty + self.sound
        if faulty > self.maximum_share * documents:
            listed = "\n  ".join(self.examples)
            raise UserError(
                f"Source {self.source!r}: {faulty:,} of {documents:,} documents cannot be used, "
                f"more than the share allowed ({self.maximum_share:g}). The first:\n  {listed}\n"
                "Repair them, or raise `maximum_faulty_share` of the source."
            )
