"""What is said of a snapshot, from the records of its chunks."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from artifacts.errors import UserError
from spark_jobs.read.faults import EXAMPLES, UNREAD, judge_faults
from spark_jobs.read.opened import Unread
from spark_jobs.read.settings import Source
from spark_jobs.read.snapshot.chunk_files import ChunkRecord

Records = dict[str, list[ChunkRecord]]
"""Of each source, by name, what was read of it."""
MOST_EXAMPLES = 50
"""Faults of a source that are kept with their messages."""


def judge_source(source: Source, records: list[ChunkRecord]) -> None:
    """Raise UserError where more of a source's documents cannot be used than it allows."""
    share = getattr(source, "maximum_faulty_share", 0.0)
    sound = sum(record.documents + record.empty for record in records)
    judge_faults(source.name, share, sound, _sum("faults", records), _examples(records))


def file_names(records: Records) -> list[str]:
    """The Parquet files of all chunks, in order."""
    return [name for found in records.values() for record in found for name in record.files]


def snapshot_stats(records: Records, unread: Iterable[Unread]) -> dict[str, Any]:
    """The stats of `snapshot.write_snapshot` but for `repeated_ids` and `pinned_files`.

    Args:
        unread: of each source what lies beside its text.

    Raises:
        UserError: there is no document.
    """
    stats = _counts(records) | _unread(records, list(unread))
    _refuse_nothing(stats)
    return stats


def _counts(records: Records) -> dict[str, Any]:
    of_all = [record for found in records.values() for record in found]
    faults = {k: n for k, n in _sum("faults", of_all).items() if not k.startswith(UNREAD)}
    dropped = Counter(empty=sum(record.empty for record in of_all)) + Counter(faults)
    return {
        "documents": sum(record.documents for record in of_all),
        "bytes": sum(record.bytes for record in of_all),
        "sources": {
            name: {
                "documents": sum(record.documents for record in found),
                "bytes": sum(record.bytes for record in found),
            }
            for name, found in records.items()
            if any(record.documents for record in found)
        },
        "licenses": dict(sorted(_sum("licenses", of_all).items())),
        "dropped": dict(dropped),
        "faults": [example for found in records.values() for example in _examples(found)],
    }


def _unread(records: Records, found: list[Unread]) -> dict[str, Any]:
    """What was found and not read, beside the files and within archives."""
    counts = sum((Counter(one.counts) for one in found), Counter[str]())
    examples = {kind: list(names) for one in found for kind, names in one.examples.items()}
    for of_source in records.values():
        for reason, count in _sum("faults", of_source).items():
            if reason.startswith(UNREAD):
                named = [one for record in of_source for one in record.examples]
                beginning = f"{reason}: "
                names = [o.removeprefix(beginning) for o in named if o.startswith(beginning)]
                kind = reason.removeprefix(UNREAD)
                counts[kind] += count
                examples[kind] = (examples.get(kind, []) + names)[:EXAMPLES]
    return {"unread": dict(counts.most_common()), "unread_examples": examples}


def _sum(field: str, records: list[ChunkRecord]) -> Counter[str]:
    return sum((Counter(getattr(record, field)) for record in records), Counter[str]())


def _examples(records: list[ChunkRecord]) -> list[str]:
    examples = (example for record in records for example in record.examples)
    return [one for one in examples if not one.startswith(UNREAD)][:MOST_EXAMPLES]


def _refuse_nothing(stats: dict[str, Any]) -> None:
    if stats["documents"]:
        return
    empty = stats["dropped"].get("empty")
    raise UserError(
        "The raw corpus is empty: the sources hold no document with text"
        + (f" ({empty:,} were empty)." if empty else ".")
        + " Check `raw_corpus.sources`."
    )
