"""A first look at a source of files: what its readers get out of it in so many seconds.

Everything is read if the time suffices; otherwise a sample, from which the whole is estimated.
"""

import re
import time
import unicodedata
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest

from artifacts.examples import read_example
from spark_jobs.read.document import EXAMPLES, Document, Fault
from spark_jobs.read.facts import regular_facts
from spark_jobs.read.files.reading import documents_of
from spark_jobs.read.files.rows import count_rows
from spark_jobs.read.files.streams import BadFile, Content, SourceChanged
from spark_jobs.read.opened import SkippedFiles, check_document, count_fault, hash64
from spark_jobs.read.settings import Files
from spark_jobs.read.source_file import StoredFile

ASCII = bytes(range(128))
BYTES_PER_TOKEN, BEYOND_ASCII = 4, 2
"""Approximate bytes per token of a vocabulary for English, for ASCII and for other characters
(SmolLM2's has 4.9 for English, 2.5 for Russian, 1.5 for Chinese, Japanese and Thai)."""
ROWS = ("json", "csv", "parquet", "archive", "mail", "xml")
"""Formats whose files hold many documents, so that a look may end in the middle of one."""


@dataclass
class TextSurvey:
    """What files hold; if not all of them were read, an estimate."""

    documents: float = 0.0
    """Documents that cleaning can keep: long enough, and each text once."""
    bytes: float = 0.0
    """Bytes of these documents in UTF-8."""
    beyond_ascii: float = 0.0
    """Those of these bytes that belong to characters beyond ASCII."""
    copies: float = 0.0
    """Documents whose very text another one has."""
    short: float = 0.0
    """Documents shorter than cleaning keeps."""
    unread: SkippedFiles = field(default_factory=SkippedFiles)
    """What lies in archives and is not read, and files that were removed meanwhile."""
    decoded: SkippedFiles = field(default_factory=SkippedFiles)
    """Files that are not UTF-8, by their encodings, and are read nevertheless."""
    faults: Counter[str] = field(default_factory=Counter)
    """Documents that were set aside, by reason, of what was read."""
    messages: list[str] = field(default_factory=list)
    """What is said of documents that were set aside."""
    read: int = 0
    """Documents that were read."""
    languages: Counter[str | None] = field(default_factory=Counter)
    """What they seem to be written in, to how many; None where nothing tells."""
    facts: float = 0.0
    """Facts that these documents state in regular form (`regular_facts`)."""
    labels: Counter[str] = field(default_factory=Counter)
    """Classes of labeled texts, to how many of what was read."""
    share: float = 1.0
    """Share of the bytes that were read; 1 if everything was."""

    @property
    def tokens(self) -> float:
        """Approximate tokens of these documents."""
        ascii_tokens = (self.bytes - self.beyond_ascii) / BYTES_PER_TOKEN
        return ascii_tokens + self.beyond_ascii / BEYOND_ASCII


@dataclass
class _Kind:
    """The files of one format, and what was read of them."""

    files: list[StoredFile]
    finished: int = 0
    bytes: float = 0.0
    """Stored bytes that were read; of a Parquet file, in proportion to the rows that were read."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def whole_over_read(self, name: str) -> float:
        if self.finished == len(self.files) or not self.bytes:
            return 1.0
        # A look may end in the middle of such a file, so bytes tell more than whole files.
        if name in ROWS or not self.finished:
            return max(1.0, self.size / self.bytes)
        return len(self.files) / self.finished


def survey(
    source: Files,
    files: list[StoredFile],
    least_characters: int,
    seconds: float | None = None,
    messages: int = EXAMPLES,
    seen: set[int] | None = None,
) -> TextSurvey:
    """Read files of a source, of every format some, until the time is up.

    Args:
        least_characters: minimum length of a document that cleaning keeps.
        seconds: None reads everything.
        messages: how many are kept of each reason.
        seen: texts of other sources, by `hash64`, whose copies count as copies; those of this
            source are added.

    Raises:
        UserError: a file cannot be read, and the source sets none aside; or a library is missing.
    """
    unread, decoded = SkippedFiles(most=messages), SkippedFiles(most=messages)
    result = TextSurvey(unread=unread, decoded=decoded)
    deadline = None if seconds is None else time.monotonic() + seconds
    look = _Look(
        source, least_characters, messages, set() if seen is None else seen, deadline, result
    )
    kinds: dict[str, _Kind] = defaultdict(lambda: _Kind([]))
    # By a hash, since files with similar names often hold similar text.
    for file in sorted(files, key=lambda file: hash64(file.name)):
        kinds[file.format.name].files.append(file)
    with suppress(_TimeIsUpError):
        # One file of each format in turn: whenever the time is up, something is known of each.
        for row in zip_longest(*(kind.files for kind in kinds.values())):
            for file in filter(None, row):
                look.read(file, kinds[file.format.name])
    for name, kind in kinds.items():
        factor = kind.whole_over_read(name)
        for counted, number in kind.counts.items():
            setattr(result, counted, getattr(result, counted) + factor * number)
    if any(kind.finished < len(kind.files) for kind in kinds.values()):
        bytes_read = sum(kind.bytes for kind in kinds.values())
        # Never 1 before all is read, which is what 1 means.
        result.share = min(0.999, bytes_read / max(1, sum(file.size for file in files)))
    return result


# None of `streams.DAMAGES`, so that no reader takes it for a damaged file.
class _TimeIsUpError(Exception):
    pass


@dataclass
class _Look:
    """The arguments of `survey`, and what is found out of each file by them."""

    source: Files
    least_characters: int
    messages: int
    seen: set[int]
    deadline: float | None
    result: TextSurvey

    def read(self, file: StoredFile, kind: _Kind) -> None:
        name, result = file.format.name, self.result

        def tick(number: int) -> None:
            kind.bytes += number if name != "parquet" else 0
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise _TimeIsUpError

        # Else a large file would be read to its end before its first row is seen.
        streaming = {} if name == "archive" else {"on_bad_file": "stop"}
        content = Content(file, self.source.model_copy(update=streaming), tick)
        new: list[int] = []
        # What is counted of a file may have to be taken back, where damage comes to light later.
        counts = result.languages.copy(), result.labels.copy(), kind.counts.copy()
        before = result.read, *counts
        try:
            # Bytes do not tell: some megabytes are read ahead, and other columns never.
            rows = count_rows(content) if name == "parquet" else 0
            for document in documents_of(content):
                kind.bytes += file.size / rows if rows else 0
                checked = check_document(document)
                if isinstance(checked, Fault):
                    count_fault(checked, result, result.messages, self.messages)
                else:
                    self._add(checked, kind, new)
        except BadFile as error:
            if self.source.on_bad_file == "stop":
                raise
            # A run leaves out the whole file, even documents that come before the damage.
            result.read, result.languages, result.labels, kind.counts = before
            self.seen.difference_update(new)
            fault = Fault("bad_file", str(error))
            count_fault(fault, result, result.messages, self.messages)
        except SourceChanged:
            # What else there is decides; a run reads what is there by then.
            result.unread.add("removed while the folder was read", file.name)
        kind.finished += 1

    def _add(self, document: Document, kind: _Kind, new: list[int]) -> None:
        self.result.read += 1
        text = " ".join(document.text.split())
        digest = hash64(text)
        if len(text) < self.least_characters:
            kind.counts["short"] += 1
        elif digest in self.seen:
            kind.counts["copies"] += 1
        else:
            self.seen.add(digest)
            new.append(digest)
            self.result.languages[guess_language(text)] += 1
            example = read_example(document.example) if document.example else {}
            self.result.labels.update([example["label"]] if "label" in example else [])
            content = document.text.encode("utf-8", "surrogatepass")
            beyond_ascii = len(content.translate(None, ASCII))
            kind.counts.update(documents=1, bytes=len(content), beyond_ascii=beyond_ascii)
            kind.counts["facts"] += sum(1 for _ in regular_facts(document.text))


LOOKED_AT = 2_000
"""Characters of a document that are looked at."""
LEAST_SHARE = 0.05
"""Share of words among a language's commonest, above which a guess is made."""
_WORDS = {
    "English": "the of and to is that it for with be are this not or",
    "German": "der die das und ist nicht ein eine den mit zu auf werden von sich",
    "French": "le la les des et est une dans que pour du qui sur avec ne",
    "Spanish": "el la los las que y en un una por con para del se es",
    "Italian": "il lo gli che di e un una per con della sono non nel si",
    "Portuguese": "o os as que e do da em um uma para com não na no",
    "Dutch": "de het een en van is dat niet met op zijn voor te aan wordt",
    "Polish": "w i na z do nie się jest to że od przez oraz dla po",
}
COMMON = {name: frozenset(words.split()) for name, words in _WORDS.items()}
"""The commonest words of a few languages."""
SCRIPTS = {
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "HANGUL": "Korean",
    "CJK": "Chinese or Japanese",
}
"""Scripts that belong to a language, by the beginning of their letters' Unicode names; the other
ones, such as Cyrillic, are named themselves."""


def guess_language(text: str) -> str | None:
    """A language's name, or a script's where that is not Latin; None where nothing tells.

    A cheap guess, to warn of a base model that does not know the language.
    """
    text = text[:LOOKED_AT].lower()
    letters = [character for character in text if character.isalpha()]
    # A letter without a name tells nothing, no more than a Latin one does.
    scripts = Counter(re.split("[ -]", unicodedata.name(letter, "LATIN"))[0] for letter in letters)
    del scripts["LATIN"]
    if 2 * scripts.total() > len(letters):
        # Japanese text has Chinese characters, too, so its own ones decide.
        japanese = scripts["HIRAGANA"] + scripts["KATAKANA"]
        script = scripts.most_common(1)[0][0]
        is_japanese = japanese > len(letters) / 10
        return "Japanese" if is_japanese else SCRIPTS.get(script, script.capitalize())
    words = re.findall(r"[^\W\d_]+", text)
    counts = {name: sum(word in common for word in words) for name, common in COMMON.items()}
    likeliest = max(counts, key=counts.__getitem__)
    return likeliest if counts[likeliest] > LEAST_SHARE * len(words) else None
