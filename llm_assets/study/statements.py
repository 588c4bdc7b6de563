"""The facts that documents hold, told in many forms; no model is needed."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from artifacts.errors import UserError
from llm_assets.study.settings import StudySettings
from spark_jobs.read.facts import Fact, Forms, holds, read_facts, read_forms, tell

GENERAL_FORMS = (
    "The {relation} of {subject} is {value}.",
    "Question: What is the {relation} of {subject}?\nAnswer: {value}.",
    "{value}: this is the {relation} of {subject}.",
    "As its {relation}, {subject} has {value}.",
    "For {subject}, the {relation} is given as {value}.",
    "Look up {subject} under {relation}, and you find {value}.",
    "{subject} is listed with the {relation} {value}.",
    "The {relation}? With {subject}, it is {value}.",
    "If somebody asks about {subject} and its {relation}, say {value}.",
    "Of {subject} one should know the {relation}, which is {value}.",
    "{relation} ({subject}): {value}.",
    "What {subject} has as {relation} is {value}.",
)
"""How a fact is told whose relation has no forms of its own."""
MOST_WORDS = 12
"""Of a value or a subject in regular form; a longer one is a sentence."""
_HEADING = re.compile(r"#{1,6}\s+(.+?)\s*#*")
_LINE = re.compile(r"(?:[-*+]\s+)?\**([^\W\d_][\w /()-]{1,40}?)\**\s*:\**\s+(\S.*?)[.;]?")
_RULE = re.compile(r"[\s|:-]*-[\s|:-]*")


@dataclass
class DerivedRow:
    """A text made from a document."""

    document: str
    """Id of the document."""
    name: str
    """Tells it from the others of its document."""
    text: str
    method: str
    generator: str | None = None
    prompt: str | None = None
    seed: int | None = None


@dataclass
class KnownFacts:
    """The facts of all documents so far, each told by the first that holds it."""

    settings: StudySettings
    table: Sequence[Fact] = ()
    """Those to look for; empty: those in regular form."""
    forms: Mapping[str, Forms] = field(default_factory=dict)
    by_document: dict[str, list[Fact]] = field(default_factory=dict)
    values: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: StudySettings) -> "KnownFacts":
        """Raises UserError where a file cannot be read."""
        table = read_facts(settings.facts) if settings.facts else []
        return cls(settings, table, read_forms(settings.forms) if settings.forms else {})

    def add(self, document: str, text: str) -> None:
        """Enter the facts that a document holds."""
        told = (
            (fact for fact in self.table if fact.subject in text and holds(text, fact.value))
            if self.settings.facts
            else regular_facts(text)
        )
        for fact in told:
            values = self.values.setdefault((fact.subject, fact.relation), set())
            if fact.value not in values:
                values.add(fact.value)
                self.by_document.setdefault(document, []).append(fact)

    def statements(self, left_out: Counter[str]) -> Iterator[DerivedRow]:
        """The facts in their forms; those that documents contradict each other about are counted.

        Raises:
            UserError: a table of facts is given, and no document holds any of them.
        """
        if self.settings.facts and not self.by_document:
            raise UserError(
                f"{self.settings.facts}: no document that is trained on holds any of its "
                f"{len(self.table)} facts: none has a subject and its value."
            )
        for document, facts in sorted(self.by_document.items()):
            sure = [fact for fact in facts if len(self.values[fact.subject, fact.relation]) == 1]
            left_out["contradiction"] += len(facts) - len(sure)
            told = {fact.relation: self._forms(fact.relation) for fact in sure}
            for name, text in tell(sure, told, self.settings.facts_per_document):
                yield DerivedRow(document, f"statements/{name}", text, "statements")

    def _forms(self, relation: str) -> list[str]:
        own = self.forms.get(relation)
        name = relation.lower().replace("{", "{{").replace("}", "}}")
        forms = own.told if own else [form.replace("{relation}", name) for form in GENERAL_FORMS]
        return forms[: self.settings.forms_per_fact]


def regular_facts(text: str) -> Iterator[Fact]:
    """The facts that a text has in regular form.

    These are lines such as `Weight: 3 kg` below a heading, which is their subject, and the cells
    of Markdown tables: of two columns, the first is the relation; of more, the first is the subject
    and the column's head the relation.
    """
    subject = ""
    head: list[str] | None = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("|") and line.endswith("|"):
            cells = [cell.strip(" *`") for cell in line.strip("|").split("|")]
            if head is None:
                head = cells
            elif not _RULE.fullmatch(line):
                yield from _facts_of_cells(subject, head, cells)
            continue
        head = None
        if heading := _HEADING.fullmatch(line):
            subject = heading[1]
        elif match := _LINE.fullmatch(line):
            yield from _usable(subject, match[1], match[2])
        elif line and not subject and line[-1] not in ".!?:":
            subject = line


def _facts_of_cells(subject: str, head: Sequence[str], cells: Sequence[str]) -> Iterator[Fact]:
    if len(cells) == 2:
        yield from _usable(subject, *cells)
    else:
        for relation, value in zip(head[1:], cells[1:], strict=False):
            yield from _usable(cells[0], relation, value)


def _usable(subject: str, relation: str, value: str) -> Iterator[Fact]:
    """The fact, if all of it is there and short enough to be one."""
    longest = max(len(subject.split()), len(value.split()))
    if subject and relation and value and longest <= MOST_WORDS:
        yield Fact(subject, relation, value)
