"""A source as it is at one moment, and what lies beside its text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from artifacts.shown import shown_in_line
from spark_jobs.read.chunks import Chunks
from spark_jobs.runtime.pinned.file import PinnedFile

EXAMPLES = 5
"""First names that are kept of each kind."""


@dataclass
class Unread:
    """Files, folders and links of a source that are passed over."""

    counts: dict[str, int] = field(default_factory=dict)
    """Kind, such as `hidden` or `.png`, to how many."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Kind to the first names."""

    def add(self, kind: str, name: str) -> None:
        """Count one."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        named = self.examples.setdefault(kind, [])
        if len(named) < EXAMPLES:
            named.append(shown_in_line(name))

    def __str__(self) -> str:
        """`12 .png (a.png, b.png, ...), 1 FIFO (pipe)`, the most frequent first."""
        parts = []
        for kind, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0])):
            named = ", ".join(self.examples[kind]) + (", ..." if count > EXAMPLES else "")
            parts.append(f"{count:,} {kind} ({named})")
        return ", ".join(parts)


@dataclass(frozen=True)
class OpenedSource:
    """What a source holds now, and the way to read just that."""

    fingerprints: dict[str, str]
    """The source's name (for packages: `source/package`) to a hash of its content."""
    cut: Callable[[], Chunks]
    """Cuts it into chunks; of a table that is exported for that, only once it is to be copied."""
    unread: Unread = field(default_factory=Unread)
    """What was found beside it."""
    sizes: dict[str, int] = field(default_factory=dict, repr=False)
    """Digest of each file to its bytes, where the source is made of files."""
    pin: Callable[[], tuple[list[PinnedFile], int]] | None = field(default=None, repr=False)
    """Of a source that is pinned and not copied, its files and the bytes of text in them; it has no
    chunks then."""

    @cached_property
    def chunks(self) -> Chunks:
        """What is read, cut into chunks."""
        return self.cut()
