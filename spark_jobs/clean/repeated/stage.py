"""Repeated spans of a whole corpus: what is left of it, and its figures.

Taking exact repeats out of documents follows "Deduplicating Training Data Makes Language Models
Better" (Lee and others, 2022); fingerprints and joins find them in place of a suffix array, for
which all text would have to be in one memory.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spark_jobs.clean.decide.decider import Example, Outcome, Run
from spark_jobs.clean.decide.documents import DocumentPart
from spark_jobs.clean.repeated.find import StayingPart, find_repeats
from spark_jobs.clean.repeated.trim import REPEATED, Changes, Trimming, trim_part
from spark_jobs.runtime.part_rows import PartRows
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.runtime.work import Work

_BYTES_PER_FINGERPRINT = 75
"""Of text, by which `Work` cuts shuffles."""


@dataclass(frozen=True)
class Trimmed:
    """What a corpus is without its repeated spans."""

    outcome: Outcome
    """What stays, and examples of what does not."""
    texts: PartRows
    """Rows of `trim.TRIMMED_SCHEMA` by the number of the part."""
    changes: Changes

    def stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """The stats of the corpus with what was changed."""
        changed = _added(stats, self.changes)
        for name in ("dropped", "dropped_bytes"):
            changed[name] = dict(sorted(changed[name].items()))
        lengths = sorted(changed["length_histogram"].items(), key=lambda bar: int(bar[0]))
        changed["length_histogram"] = {length: count for length, count in lengths if count}
        return changed


_FIGURES = ("documents", "spans", "words", "bytes")


def trim_repeats(run: Run, outcome: Outcome, parts: list[DocumentPart], output: str) -> Trimmed:
    """Find the repeated spans of the documents that stay, and take them out or count them.

    Args:
        output: folder of the clean corpus, where the spans are listed.
    """
    staying = {
        number: StayingPart(parts[number].prepared, place)
        for number, place in outcome.stay.places.items()
    }
    size = sum(row["bytes"] for row in outcome.fates.to_pylist() if row["reason"] is None)
    work = Work(run.spark, size // _BYTES_PER_FINGERPRINT, run.scratch, run.report)
    settings = run.settings
    repeats = find_repeats(work, staying, settings.repeated_spans.minimum_words)
    items = [(number, staying[number], place) for number, place in sorted(repeats.places.items())]
    trim = partial(trim_part, settings=settings, output=output, scratch=run.scratch)
    records = map_tasks(run.spark, "trimming repeated spans", items, trim, run.report)
    trimmed = {number: Trimming(**one) for (number, *_), one in zip(items, records, strict=True)}
    changes: Changes = Counter({(REPEATED, figure): 0 for figure in _FIGURES})
    for one in trimmed.values():
        changes.update(one.changes)
    run.report(
        f"{changes[REPEATED, 'words']:,} words in {changes[REPEATED, 'documents']:,} documents "
        f"stand in others too"
    )
    return Trimmed(
        _outcome(outcome, trimmed, settings.examples_per_reason), _texts(trimmed), changes
    )


def _outcome(outcome: Outcome, trimmed: dict[int, Trimming], shown: int) -> Outcome:
    places = outcome.stay.places | {number: one.stay for number, one in trimmed.items()}
    stay = PartRows({number: place for number, place in places.items() if place})
    dropped = sorted(
        Example(identifier, number, row)
        for number, one in trimmed.items()
        for identifier, row in one.examples
    )
    examples = outcome.examples | ({REPEATED: dropped[:shown]} if dropped else {})
    return replace(outcome, stay=stay, examples=dict(sorted(examples.items())))


def _texts(trimmed: dict[int, Trimming]) -> PartRows:
    return PartRows({number: one.texts for number, one in trimmed.items() if one.texts})


def _added(stats: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Nested counts, to some of which is added."""
    result = dict(stats)
    for key in dict.fromkeys(path[0] for path in changes):
        within = Counter({path[1:]: n for path, n in changes.items() if path[0] == key})
        if () in within:
            result[key] = result.get(key, 0) + within[()]
        else:
            result[key] = _added(result.get(key, {}), within)
    return result
