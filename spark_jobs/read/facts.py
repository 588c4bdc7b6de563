"""A table of facts, told as text: the content of a database becomes documents to learn from.

The exam asks for it in other words (`llm_assets.exam`), so one file has both. At the end, the other
way round: the facts that documents state in tables and lines.
"""

import csv
import hashlib
import io
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from artifacts.errors import UserError
from artifacts.settings import Settings, first_fault, read_yaml
from artifacts.store.identity import hash_json
from artifacts.words import count_words, holds, word_ngrams
from spark_jobs.read.document import Document
from spark_jobs.read.files.rows import table_rows
from spark_jobs.read.files.streams import decode
from spark_jobs.read.opened import OpenedSource, single_chunk
from spark_jobs.read.settings import Facts

COLUMNS = ("subject", "relation", "value")
LEAK_WORDS = 5
"""A question that shares so many words in a row with what is told, its subject aside, would be
answered by memory of the words; shorter runs are set phrases."""


@dataclass(frozen=True)
class Fact:
    """One row of the table."""

    subject: str
    relation: str
    value: str


class Forms(Settings):
    """How one relation is told, and how it is asked for."""

    told: list[str] = Field(min_length=1)
    """Sentences with `{value}` and, mostly, `{subject}`."""
    asked: list[str] = Field(default_factory=list)
    """Beginnings that the value goes on from, with `{subject}`."""


_FORMS = TypeAdapter(dict[str, Forms])


def read_facts(path: str) -> list[Fact]:
    """The rows of a CSV file.

    Raises:
        UserError: there is no such file, a column or a value is missing, or two rows say
            different things of one subject.
    """
    facts: dict[tuple[str, str], tuple[int, str]] = {}
    number = 0

    def numbered(file: Iterable[str]) -> Iterator[str]:
        # The table's own count would begin below what is above the columns' names.
        nonlocal number
        for line in file:
            number += 1
            yield line

    try:
        # Excel writes Windows-1252, or UTF-8 with a mark before the first column's name.
        with io.StringIO(decode(Path(path).read_bytes())[0], newline="") as file:
            # Strict: a quote that nothing closes would make one value of all rows after it.
            reader = table_rows(numbered(file), strict=True)
            found = list(reader.fieldnames or ())
            if wrong := [name for name in COLUMNS if found.count(name) != 1]:
                raise UserError(
                    f"{path}: not one column each for {', '.join(wrong)} (found: "
                    f"{', '.join(found)}). A table of facts has the columns {', '.join(COLUMNS)} "
                    "in its first line."
                )
            for row in reader:
                # As in the clean corpus: macOS writes accents as separate characters.
                subject, relation, value = (
                    unicodedata.normalize("NFC", row[name] or "").strip() for name in COLUMNS
                )
                place = f"{path}, line {number}"
                # Under None lies what follows a separator that nobody has put in quotes.
                if any(row.get(None) or ()):
                    raise UserError(
                        f"{place}: more fields than columns. Put a text that holds the "
                        "separator in double quotes."
                    )
                if not (subject and relation and value):
                    raise UserError(f"{place}: subject, relation and value all need a text.")
                line, other = facts.setdefault((subject, relation), (number, value))
                if other != value:
                    raise UserError(
                        f"{place}: {relation} of {subject} is {value!r}, in line {line} it is "
                        f"{other!r}. Keep the row that is true."
                    )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: the table of facts cannot be read: {error}") from None
    if not facts:
        raise UserError(f"{path}: no facts below the first line; add at least one row.")
    return [Fact(subject, relation, value) for (subject, relation), (_, value) in facts.items()]


def read_forms(path: str) -> dict[str, Forms]:
    """Relation to how it is told and asked for.

    Raises:
        UserError: there is no such file, a form has no place for what it is about, or a question
            has `LEAK_WORDS` words in a row in common with what is told.
    """
    try:
        forms = _FORMS.validate_python(read_yaml(Path(path)))
    except OSError as error:
        raise UserError(f"{path}: the forms cannot be read: {error}") from None
    except ValidationError as error:
        raise UserError(
            f"{path}: expected each relation with the lists `told` and `asked`: "
            f"{first_fault(error)}"
        ) from None
    for name, one in forms.items():
        _need(path, name, one.told, "{value}", subject="", value="")
        # A question that had a place for the value would give it away.
        _need(path, name, one.asked, "{subject}", subject="")
    sources_of_runs = {
        run: (name, form) for name, one in forms.items() for form in one.told for run in _runs(form)
    }
    for one in forms.values():
        for question in one.asked:
            if shared := [run for run in _runs(question) if run in sources_of_runs]:
                relation, form = sources_of_runs[shared[0]]
                raise UserError(
                    f"{path}: the question {question!r} shares {' '.join(shared[0])!r} with what "
                    f"is told of {relation}: {form!r}. Ask in other words."
                )
    return forms


def open_facts(source: Facts) -> OpenedSource:
    """The documents in which the facts are told; raises UserError as the readers of both files."""
    facts, forms = read_facts(source.path), read_forms(source.forms)
    if unknown := {fact.relation for fact in facts} - set(forms):
        raise UserError(f"{source.forms}: no forms for {', '.join(sorted(unknown))}.")
    statements = {relation: form.told for relation, form in forms.items()}
    key = hash_json({"facts": [vars(fact) for fact in facts], "told": statements})

    def read() -> Iterator[Document]:
        for identifier, text in tell(facts, statements, source.facts_per_document):
            yield Document(identifier, text, source.name)

    return OpenedSource({source.name: key}, lambda: single_chunk(key, read))


def tell(
    facts: Sequence[Fact], statements: Mapping[str, Sequence[str]], per_document: int
) -> Iterator[tuple[str, str]]:
    """Id and text of documents about one subject each, until every form of every fact is told.

    The order of a fact's forms follows from the fact, so that the documents of two subjects have
    different orders of sentences: otherwise they would be copies of each other but for few words.
    """
    by_subject: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        by_subject[fact.subject].append(fact)
    for subject, of_subject in by_subject.items():
        orders = [sorted(statements[f.relation], key=partial(_place, f)) for f in of_subject]
        # A fact of fewer forms than others is told in some of them again.
        for number in range(max(map(len, orders))):
            sentences = [
                order[number % len(order)].format(subject=subject, value=fact.value)
                for fact, order in zip(of_subject, orders, strict=True)
            ]
            first = number % len(sentences)
            sentences = sentences[first:] + sentences[:first]
            for part, start in enumerate(range(0, len(sentences), per_document)):
                # Two subjects may give one name: ids that repeat are numbered
                # (`opened.number_repeated_ids`).
                name = re.sub(r"\W+", "_", subject.lower())
                text = " ".join(sentences[start : start + per_document])
                yield f"{name}/{number + 1}.{part + 1}", text


def states(text: str, fact: Fact) -> bool:
    """Whether a text names a fact's subject, which may be inflected, and has its value."""
    return holds(text, fact.subject, r"\d") and holds(text, fact.value)


def _place(fact: Fact, form: str) -> bytes:
    return hashlib.sha256(f"{fact.subject}\0{fact.relation}\0{form}".encode()).digest()


def _need(path: str, relation: str, forms: Sequence[str], field: str, **given: str) -> None:
    for form in forms:
        try:
            form.format(**given)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            places = ", ".join(f"{{{place}}}" for place in given)
            raise UserError(
                f"{path}: {relation}: {form!r} is no form ({error!r}): only {places} may stand in "
                "braces."
            ) from None
        if field not in form:
            raise UserError(f"{path}: {relation}: {form!r} lacks {field}.")


def _runs(form: str) -> set[tuple[str, ...]]:
    """All runs of `LEAK_WORDS` words in a form that contain neither subject nor value."""
    parts = re.split(r"\{subject\}|\{value\}", form)
    return set().union(*(word_ngrams(part, LEAK_WORDS) for part in parts))


# Facts that documents state in regular form, without a table of facts.
MOST_WORDS = 12
"""Most words of a value or a subject in regular form; a longer one is a sentence."""
_HEADING = re.compile(r"(#{1,6})\s+(.+?)\s*#*")
# A space follows a colon, which the one of an address or a time of day lacks.
_COLON = r"(?::\**\s+|\uff1a\**\s*)"
"""Between relation and value; the wide colon of Chinese and Japanese needs no space."""
_LINE = re.compile(
    rf"(?:[-*+]\s+)?\**([^\W\d_][\w /()-]{{1,40}}?)\**\s*{_COLON}(\S.*?)[.;\u3002\uff1b]?"
)
_MARKED = re.compile(r"(\*{1,3}|`+)(?!\s)((?:(?!\1).)+)\1")
"""Bold or code of Markdown, as a whole."""
_FENCES = ("```", "~~~")
"""Delimiters of code, whose lines may look like facts."""
_RULE = re.compile(r"[\s|:-]*-[\s|:-]*")
_BAR = re.compile(r"(?<!\\)\|")
"""Separator of two cells of a table; `\\|` is a character within one."""


def regular_facts(text: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """The facts that a text states in regular form: headings, relation and value.

    These are lines such as `Weight: 3 kg` below a heading, and cells of Markdown tables: with two
    columns, the first is the relation; with more, the first is the subject and the column's head
    the relation.
    """
    for headings, relation, value in _labeled_values(text):
        # Complete, and short enough to be a fact rather than a sentence.
        if headings and relation and value and count_words(value) <= MOST_WORDS:
            yield headings, relation, value


def _labeled_values(text: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """All that stands in such a form, be it a fact or not."""
    # By their levels; 0 is that of a title without a mark.
    headings: dict[int, str] = {}
    head: list[str] | None = None
    is_code = False
    for line in map(str.strip, text.splitlines()):
        # Code has lines such as `replicas: 3`, which are facts about nobody.
        if line.startswith(_FENCES):
            is_code, head = not is_code, None
            continue
        if is_code:
            continue
        if line.startswith("|") and line.endswith("|"):
            cells = [_unmarked(cell.replace(r"\|", "|").strip()) for cell in _BAR.split(line[1:-1])]
            if head is None:
                head = cells
            elif _RULE.fullmatch(line):
                # This is the line of dashes below the head of a table.
                continue
            elif len(cells) == 2:
                yield tuple(headings.values()), cells[0], cells[1]
            elif cells[0]:
                for relation, value in zip(head[1:], cells[1:], strict=False):
                    yield (cells[0],), relation, value
            continue
        head = None
        if heading := _HEADING.fullmatch(line):
            level, name = len(heading[1]), _unmarked(heading[2])
            headings = {n: above for n, above in headings.items() if n < level} | {level: name}
        elif match := _LINE.fullmatch(line):
            yield tuple(headings.values()), match[1], _unmarked(match[2])
        elif line and not headings and line[-1] not in ".!?:\u3002\uff01\uff1f\uff1a":
            # Before any heading, the first plain line that ends in none of these marks is taken for
            # the title.
            headings = {0: line}


def _unmarked(text: str) -> str:
    """A text without the marks that make all of it bold or code."""
    match = _MARKED.fullmatch(text)
    return match[2] if match else text
