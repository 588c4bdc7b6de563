"""What was found and is not read: counted by kind, the first of each kind named."""

from dataclasses import dataclass, field

from artifacts.shown import shown_in_line

EXAMPLES = 5


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
