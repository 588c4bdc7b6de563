"""A source as it is at one moment."""

from collections.abc import Callable
from dataclasses import dataclass, field

from llm_assets.sources.chunks import Chunks
from llm_assets.sources.unread import Unread
from spark_jobs.runtime.pinned.file import PinnedFile


@dataclass(frozen=True)
class OpenedSource:
    """What a source holds now, and the way to read just that."""

    fingerprints: dict[str, str]
    """The source's name (for packages: `source/package`) to a hash of its content."""
    chunks: Chunks
    unread: Unread = field(default_factory=Unread)
    """What was found beside it."""
    sizes: dict[str, int] = field(default_factory=dict, repr=False)
    """Digest of each file to its bytes, where the source is made of files."""
    pin: Callable[[], tuple[list[PinnedFile], int]] | None = field(default=None, repr=False)
    """Of a source that is pinned and not copied, its files and the bytes of text in them; it has no
    chunks then."""
