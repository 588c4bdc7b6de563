"""What the sources hold, as a first look finds it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from artifacts.examples import Form
from artifacts.progress import counted
from artifacts.storage.files import is_local
from artifacts.store.store import Store
from llm_assets.config import PipelineSettings
from spark_jobs.read.document import EXAMPLES, judge_faults
from spark_jobs.read.files.find import find_files
from spark_jobs.read.formats import advise_conversion
from spark_jobs.read.settings import Files
from spark_jobs.read.survey import TextSurvey, survey

CHAT_TOKENS = 40
"""About what a chat template adds to a short conversation, with what stays empty of its row."""
LANGUAGE_SHARE = 0.1
"""Share of the documents from which on a language other than English is mentioned."""
ORDER_OF_COUNTING = ("held_out", "validation", "train", None, "replay")
"""Order of a source's split: a text in several of them counts where it is kept."""
COUNTED_OF_ALL = ("copies", "short", "faults", "messages")
COUNTED_OF_OWN = ("bytes", "beyond_ascii", "facts", "labels", "languages")
"""Of a source's survey, also of one that is replayed; and of the others alone."""


@dataclass
class TextEstimate(TextSurvey):
    """What all sources hold; of what is replayed, only copies, short texts and faults count.

    `documents` are those that can be divided into splits, `share` the least of any source.
    """

    held_out: float = 0.0
    """Documents of sources that are held out as a whole."""
    usable: float = 0.0
    """Documents of all sources that are not replayed, whichever split they are for."""
    in_sources: float = 0.0
    """The same with copies and short ones, as a raw corpus counts them."""
    tokens_to_train: float = 0.0
    """Approximate tokens of the rows that what falls into the train split fills."""
    tokens_divided: float = 0.0
    """The same of all that is divided into splits, whichever it falls into."""
    unseen: list[str] = field(default_factory=list)
    """Sources that were not looked at, but for those that are replayed."""

    def lines(self, command: str | None) -> list[str]:
        """What is learned from and what is not, a line each. `command` begins the command that
        lists what is not; None if there is no pipeline file to check."""
        notes = []
        if not self.unseen:
            sampled = "" if self.share == 1 else f", estimated from {self.share:.1%} of the bytes"
            notes.append(
                f"{'' if self.share == 1 else 'about '}"
                f"{counted(self.usable, 'document', ',.0f')}, about "
                f"{counted(self.tokens, 'token', ',.0f')}{sampled}"
            )
        else:
            notes.append(f"not looked at, only read by a run: {', '.join(self.unseen)}")
        notes += [f"classes and their texts: {tell_classes(self.labels)}"] * bool(self.labels)
        guessed = (entry for entry in self.languages.most_common(2) if entry[0])
        language, documents = next(guessed, ("English", 0))
        share = documents / max(1, self.languages.total())
        if language != "English" and share >= LANGUAGE_SHARE:
            notes.append(
                f"{share:.0%} of the documents seem to be in {language}; the default base model "
                "and the text that `init` replays are English. For another language, change "
                "`base_model`, and the source that `clean_corpus.split.sources` assigns to `replay`"
            )
        for label, count in (("exact copies", self.copies), ("short documents", self.short)):
            notes += [f"{label} left out: {count:,.0f}"] * bool(count)
        for kind, count in self.decoded.counts.items():
            notes.append(f"files decoded from {kind}: {count:,}")
        reasons = {reason.replace("_", " "): count for reason, count in self.faults.items()}
        for label, counts in (("set aside", reasons), ("not read", self.unread.counts)):
            notes += [f"{label}: {count:,} {kind}" for kind, count in counts.items()]
        if self.faults["not_utf8"]:
            notes.append("to read text that is not UTF-8: set `encoding` of its source")
        notes += advise_conversion(self.unread.counts)
        if command and (self.faults or self.unread.counts):
            notes.append(f"list all of them: {command} check --all")
        return notes


MOST_CLASSES = 12


def tell_classes(counts: Mapping[str, int]) -> str:
    """How many classes there are, and the rarest by name: among them are misspelled ones."""
    ranked = sorted(counts.items(), key=lambda item: (item[1], item[0]))[:MOST_CLASSES]
    rarest = ", ".join(f"{label}: {count:,}" for label, count in ranked)
    return f"{len(counts):,}, the rarest first: {rarest}"


_PLACE = re.compile(r"(?<=, )(row|line|element) (\d+)(?=:)")


def merge_places(messages: Iterable[str]) -> list[str]:
    """Messages, with those that say the same of rows of one file in one: `a.csv, rows 2-9: ...`."""
    alike: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for message in messages:
        before, *place = _PLACE.split(message, maxsplit=1)
        unit, number, after = place or ("", "0", "")
        # A row without an id of its own has its number in its id.
        key = (before, unit, after.replace(f":{number}'", ":N'"))
        alike.setdefault(key, []).append((int(number), message))
    merged = []
    for (before, unit, after), found in alike.items():
        if len(found) == 1 or not unit:
            merged.append(found[0][1])
            continue
        # As long as numbers follow one another, their distance from their order stays the same.
        runs = groupby(enumerate(number for number, _ in found), lambda pair: pair[1] - pair[0])
        ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
        shown = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ends)
        merged.append(f"{before}{unit}s {shown}{after}")
    return merged


def row_tokens(settings: PipelineSettings, form: Form, text: TextSurvey) -> float:
    """Approximate tokens of the rows that a text of such a form fills."""
    if form in ("pretraining", "conversations"):
        return text.tokens + (form == "conversations") * CHAT_TOKENS * text.documents
    # Each example has a row of its own.
    return text.documents * settings.tokenized_shards.row_tokens(form)


def look_at(
    settings: PipelineSettings, seconds: float | None, messages: int = EXAMPLES
) -> TextEstimate:
    """Read the files of the sources for so many seconds; other kinds of sources are not read.

    What is replayed is looked at too, for faults, and counts as no text to learn.

    Args:
        seconds: for all sources together; None reads everything, 0 nothing.
        messages: of each kind of what is left out, how many are named.

    Raises:
        UserError: what a run would end with: a file that cannot be read, or more such documents
            than the source allows.
    """
    text, split = TextEstimate(), settings.clean_corpus.split
    places = split.sources
    files = [entry for entry in settings.raw_corpus.sources if isinstance(entry, Files)]
    unread = [entry.name for entry in settings.raw_corpus.sources if not isinstance(entry, Files)]
    # Hashes, over all sources: a text that is in several of them counts once.
    texts: set[int] = set()
    # Held-out text is never trained on, and text that is also trained on is not replayed.
    files.sort(key=lambda item: ORDER_OF_COUNTING.index(places.get(item.name)))
    for source in files:
        listing = find_files(source, Store(settings.store).root, messages, files)
        if seconds == 0 or not is_local(source.path):
            unread.append(source.name)
            continue
        # Shared out beforehand, so that a large source leaves time for those after it.
        part = None if seconds is None else seconds / len(files)
        # Cleaning keeps examples of any length.
        least = 1 if source.examples else settings.clean_corpus.minimum_characters
        result = survey(source, listing.files, least, part, messages, texts)
        # A run would end with these faults after it has read everything.
        judge_faults(source, result.read, result.faults, result.messages)
        place = places.get(source.name)
        tokens = row_tokens(settings, settings.raw_corpus.forms[source.name], result)
        if place == "held_out":
            text.held_out += result.documents
        elif place == "train":
            text.tokens_to_train += tokens
        elif place is None:
            text.documents += result.documents
            text.tokens_divided += tokens
            text.tokens_to_train += (1 - split.validation - split.held_out) * tokens
        if place != "replay":
            text.usable += result.documents
            text.in_sources += result.documents + result.copies + result.short
        for name in COUNTED_OF_ALL if place == "replay" else COUNTED_OF_ALL + COUNTED_OF_OWN:
            # These are numbers, counters and lists, all of which add up by `+`.
            setattr(text, name, getattr(text, name) + getattr(result, name))
        text.share = min(text.share, result.share)
        text.unread.merge(listing.unread)
        text.unread.merge(result.unread)
        text.decoded.merge(result.decoded)
    text.unseen = [name for name in unread if places.get(name) != "replay"]
    return text
