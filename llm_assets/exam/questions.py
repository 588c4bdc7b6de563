"""Makes an exam: facts that the text states, asked about in words that it does not use.

A right answer can come from training, from a passage that retrieval finds, or from nowhere. So each
question carries the passage that states the answer and the one that BM25 finds, and placebo facts,
which no text states, are asked about like the others. The facts are in text that may be trained on,
unlike the text for bits per byte: held-out text measures reading, an exam measures knowing. At the
end: how two models answered, paired by question.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.store.store import Artifact
from artifacts.words import (
    SEARCH_TERMS,
    continue_with,
    count_words,
    holds,
    may_hold,
    split_passages,
)
from llm_assets.exam.settings import ExamSettings
from llm_assets.settings_file import did_you_mean
from llm_assets.study.rows import PlacedFact, name_subjects
from recipes.evaluation.exam import CLOSED_BOOK, EXAM_TASKS, METRIC, QUESTIONS_NAME, read_questions
from recipes.evaluation.settings import TASK_SCORES_NAME
from spark_jobs.read.facts import Fact, Forms, read_facts, read_forms, regular_facts, states
from spark_jobs.runtime.parquet import find_parts

CODE_VERSION = "4"
LIBRARIES = frozenset({"bm25s"})
"""The libraries that decide what retrieval finds."""


@dataclass(frozen=True)
class Passage:
    """A stretch of a document that may be trained on."""

    document: str
    text: str


def read_tables(settings: ExamSettings) -> tuple[list[Fact], list[Fact], dict[str, Forms]]:
    """Facts, placebo facts and forms; raises UserError where one of the files cannot be read, there
    is a relation that no form asks about, or the placebo has one of a single value."""
    facts, forms = read_facts(settings.facts), read_forms(settings.forms)
    placebo = read_facts(settings.placebo) if settings.placebo else []
    asked = [relation for relation in forms if forms[relation].asked]
    for relation in dict.fromkeys(fact.relation for fact in (*facts, *placebo)):
        if relation not in asked:
            raise UserError(
                f"{settings.forms}: nothing under `asked` for {relation}; "
                f"{did_you_mean(relation, asked)}Relations there: {', '.join(asked) or 'none'}."
            )
    # A question names its subject, which may contain the answer: the town that a "Berlin kettle"
    # is from.
    asked_placebo = [fact for fact in placebo if not _is_given_away(fact, forms)]
    # Raises where a relation has one value: of placebo facts, that does not depend on the text.
    _ask(asked_placebo, forms, settings.choices, f"in {settings.placebo}")
    return facts, placebo, forms


def write_exam(settings: ExamSettings, clean_corpus: str, folder: Path) -> dict[str, Any]:
    """Write `questions.jsonl`, one question a line.

    Args:
        clean_corpus: the folder of that artifact.

    Returns:
        The manifest's stats: `questions`, `facts`, `placebo_questions`, `untold` (subject and
        relation of facts that no training document states and that are not asked about, and which
        document almost does), `given_away` (facts left out because a question contains the answer),
        `contradicted` (those left out because two documents state different values, and which),
        `retrieved_right` (share of questions whose retrieved passage contains the answer).

    Raises:
        UserError: a file cannot be read, a relation has no forms or a single value, or the text
            tells no fact, or a placebo.
    """
    facts, placebo, forms = read_tables(settings)
    passages, telling = _find_stated([*facts, *placebo], clean_corpus, settings.passage_words)
    stated_facts = [fact for fact in facts if fact in telling]
    if not stated_facts:
        raise UserError(
            f"{settings.facts}: no training document states any of its {len(facts)} facts: none "
            f"contains a subject and its value within {settings.passage_words} words "
            "(`exam.passage_words`). Does the table belong to another text?"
        )
    # Placebo facts show chance only if no text says anything of them.
    about = {(fact.subject, fact.relation) for fact in stated_facts}
    for fact in placebo:
        if (fact.subject, fact.relation) in about:
            raise UserError(
                f"{settings.placebo}: {fact.relation} of {fact.subject} is in {settings.facts} "
                "too, and stated in the text. Take another subject for the placebo."
            )
        if passage := telling.get(fact):
            raise UserError(
                f"{settings.placebo}: {fact.relation} of {fact.subject} is {fact.value!r} in "
                f"document {passage.document} too. A placebo is a fact that no text states."
            )
    given_away = [fact for fact in [*stated_facts, *placebo] if _is_given_away(fact, forms)]
    placebo = [fact for fact in placebo if fact not in given_away]
    stated = {fact: telling[fact] for fact in stated_facts if fact not in given_away}
    contradictions = _find_contradictions(stated, forms, clean_corpus)
    contradicted = [
        f"{fact.subject}: {fact.relation} ({fact.value!r} in {stated[fact].document}, {value!r} in "
        f"{document})"
        for fact, (document, value) in contradictions.items()
    ]
    stated_facts = [fact for fact in stated if fact not in contradictions]
    if not stated_facts:
        why = "the questions about all of them contain their answers. Ask in other words in "
        why += f"{settings.forms}, or give other facts."
        if contradicted:
            why = f"documents contradict each other about {len(contradicted)}: {contradicted[0]}. "
            why += "Correct or remove those that are wrong."
        raise UserError(f"{settings.facts}: no fact that the text states can be asked about: {why}")
    questions = [
        *_ask(stated_facts, forms, settings.choices, f"that the text states in {settings.facts}"),
        *_ask(placebo, forms, settings.choices, f"in {settings.placebo}"),
    ]
    retrieved = _retrieve([question["question"] for question in questions], passages)
    for question, hit in zip(questions, retrieved, strict=True):
        passage = telling.get(Fact(*(question[key] for key in ("subject", "relation", "value"))))
        question |= {
            "placebo": passage is None,
            "passage": asdict(passage) if passage else None,
            "retrieved": asdict(hit),
        }
    lines = (json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
    # In UTF-8 and without escapes such as `\u00fc`, since people read this file.
    (folder / QUESTIONS_NAME).write_text("".join(lines), encoding="utf-8")
    real_questions = [question for question in questions if not question["placebo"]]
    untold = [fact for fact in facts if fact not in telling]
    reasons = _why_untold(untold, clean_corpus)
    right = [holds(question["retrieved"]["text"], question["value"]) for question in real_questions]
    return {
        "questions": len(real_questions),
        "facts": len(stated_facts),
        "placebo_questions": len(questions) - len(real_questions),
        "untold": [f"{f.subject}: {f.relation}" + reasons.get(f, "") for f in untold],
        "given_away": [f"{f.subject}: {f.relation}" for f in given_away],
        "contradicted": contradicted,
        "retrieved_right": sum(right) / len(right),
    }


def _find_stated(
    facts: Sequence[Fact], clean_corpus: str, words: int
) -> tuple[list[Passage], dict[Fact, Passage]]:
    """Training text in passages of so many words, each overlapping half of the next; and the
    shortest one that names subject and value of a fact: it states the fact most plainly."""
    passages: list[Passage] = []
    telling: dict[Fact, Passage] = {}
    for document, text in _train_documents(clean_corpus):
        of_document = [
            Passage(document, passage)
            for passage in split_passages(text, words, overlap=words // 2)
        ]
        # All of them are searched, as retrieval would search them, whatever they state.
        passages += of_document
        # Most documents state none of the facts: asked of a whole document, that is known sooner
        # than of its many passages.
        for fact in facts:
            if may_hold(text, fact.subject) and may_hold(text, fact.value):
                matches = [one for one in of_document if states(one.text, fact)]
                matches += [telling[fact]] if fact in telling else []
                if matches:
                    telling[fact] = min(matches, key=lambda one: (len(one.text), one.document))
    return passages, telling


def _train_documents(clean_corpus: str) -> Iterator[tuple[str, str]]:
    """Id and text of every document that may be trained on."""
    columns = ["id", "text", "split"]
    for part in find_parts(clean_corpus, columns, "clean_corpus"):
        for row in part.read(columns).filter(pc.field("split") == "train").to_pylist():
            yield row["id"], row["text"]


def _why_untold(facts: Sequence[Fact], clean_corpus: str) -> dict[Fact, str]:
    """Of facts that no passage to train on states, those that a document states all the same: which
    one, and why that is not enough."""
    reasons: dict[Fact, str] = {}
    in_any_case = [(fact, Fact(*map(str.casefold, astuple(fact)))) for fact in facts]
    columns = ["id", "text", "split"]
    for part in find_parts(clean_corpus, columns, "clean_corpus") if facts else ():
        for row in part.read(columns).to_pylist():
            lowered = row["text"].casefold()
            for fact, folded in in_any_case:
                if fact not in reasons and states(lowered, folded):
                    why = f"but is {row['split'].replace('_', '-')} text"
                    if row["split"] == "train":
                        why = "in other capitals, or in more than `exam.passage_words` words"
                    reasons[fact] = f" ({row['id']} does, {why})"
    return reasons


def _find_contradictions(
    stated: Mapping[Fact, Passage], forms: Mapping[str, Forms], clean_corpus: str
) -> dict[Fact, tuple[str, str]]:
    """Of facts, those of which a document to train on states another value: which, and the value.

    It may state it in a form of the relation, in the words of the passage that states the fact, or
    in regular form.
    """
    longest: dict[str, float] = defaultdict(float)
    # Relations of which a value in the table holds no digit.
    in_words = {fact.relation for fact in stated if not _DIGIT.search(fact.value)}
    wordings: dict[Fact, list[str]] = {}
    for fact, passage in stated.items():
        longest[fact.relation] = max(longest[fact.relation], count_words(fact.value))
        told = (form.format(subject=fact.subject, value=_GAP) for form in forms[fact.relation].told)
        sentences = (one for one in _SENTENCE.findall(passage.text) if states(one, fact))
        own = (sentence.replace(fact.value, _GAP) for sentence in sentences)
        wordings[fact] = [one for one in (*told, *own) if fact.subject in one and _GAP in one]
    others: dict[Fact, set[tuple[str, str]]] = defaultdict(set)
    regular: list[PlacedFact] = []
    subjects = {fact: fact.subject.casefold() for fact in stated}
    for document, text in _train_documents(clean_corpus):
        lowered = text.casefold()
        named = [fact for fact, subject in subjects.items() if may_hold(lowered, subject)]
        for fact in named:
            values = _values_told(text, lowered, wordings[fact])
            others[fact].update((document, value) for value in values)
        if named:
            regular += (PlacedFact(document, *one) for one in regular_facts(text))
    facts = {_key(fact.subject, fact.relation): fact for fact in stated}
    nearest = [placed.headings[-1] for placed in regular]
    name_subjects(regular)
    for placed, heading in zip(regular, nearest, strict=True):
        for subject in {heading, placed.headings[-1]}:
            if found := facts.get(_key(subject, placed.relation)):
                others[found].add((placed.document, placed.value))
    for fact, of_fact in others.items():
        # What is longer than all values is no other value, but a sentence that goes on; what holds
        # no digit where all values do is none either: `see below`.
        most, is_number = longest[fact.relation], fact.relation not in in_words
        of_fact -= {
            (document, value)
            for document, value in of_fact
            if count_words(value) > most
            or (is_number and not _DIGIT.search(value))
            or _agree(value, fact.value)
        }
    return {fact: min(others[fact]) for fact in stated if others[fact]}


_GAP = "\0"
"""Stands for the value in what states it."""
_DIGIT = re.compile(r"\d")
_SENTENCE = re.compile(r"\S(?:[^.!?\n\u3002]|[.!?](?=\S))*[.!?\u3002]?")


def _values_told(text: str, lowered: str, wordings: Iterable[str]) -> Iterator[str]:
    """What a text, here also in lower case, has in the place of the value, in any of these
    wordings."""
    for wording in wordings:
        before, _, after = wording.strip(" .").partition(_GAP)
        # Where the value comes first, nothing says where it begins.
        if _GAP in after or not may_hold(lowered, before.casefold()):
            continue
        parts = (r"\s+".join(map(re.escape, part.split(" "))) for part in (before, after))
        # A sentence or a part of it ends after the wording; a number does not.
        pattern = r"(?<!\w){}(\S(?:[^\n]*?\S)??){}(?=[.,;:!?)\"\u201d\u3001\u3002](?!\d)|\s*$)"
        found = re.compile(pattern.format(*parts), re.MULTILINE | re.IGNORECASE)
        yield from (match[1] for match in found.finditer(text))


def _key(subject: str, relation: str) -> tuple[str, str]:
    return subject.casefold(), relation.casefold().replace("_", " ")


def _agree(value: str, other: str) -> bool:
    """Whether one value is the other, or states it more closely: `3 kg` and `3`, or `3kg`."""
    one, another = value.casefold(), other.casefold()
    is_same = "".join(one.split()) == "".join(another.split())
    return is_same or holds(one, another) or holds(another, one)


def _is_given_away(fact: Fact, forms: dict[str, Forms]) -> bool:
    """Whether a question about the fact contains its answer, so that it tests nothing."""
    questions = (form.format(subject=fact.subject) for form in forms[fact.relation].asked)
    return any(holds(question.casefold(), fact.value.casefold()) for question in questions)


def _ask(
    facts: Sequence[Fact], forms: dict[str, Forms], choices: int, which: str
) -> list[dict[str, Any]]:
    """The facts' questions; wrong answers are values of the same relation, drawn by a hash.

    Wrong answers are values of these facts, so they were seen as often as right ones: training on
    some values only would move a model towards them, whatever is asked.

    Args:
        which: facts these are, for messages.
    """
    values: dict[str, set[str]] = defaultdict(set)
    for fact in facts:
        values[fact.relation].add(fact.value)
    questions = []
    for fact in facts:
        others = [value for value in values[fact.relation] if not _is_part(value, fact.value)]
        if not others:
            raise UserError(
                f"Of the facts {which}, all of the relation {fact.relation} have the value "
                f"{fact.value!r}, or one that begins with it or that it begins with: there is no "
                "wrong answer to choose. Add some with other values, or leave the relation out."
            )
        # Drawn by a hash, so the same facts make the same exam on any machine.
        wrong = sorted(others, key=lambda v: _draw(fact, v))
        # By another hash than the wrong answers, so that the place of the right one tells nothing.
        options = sorted([fact.value, *wrong[: choices - 1]], key=lambda v: _draw(fact, f"@{v}"))
        for number, form in enumerate(forms[fact.relation].asked):
            question = form.format(subject=fact.subject)
            questions.append(
                asdict(fact)
                | {
                    "id": f"{fact.subject}: {fact.relation}, form {number + 1}",
                    "question": question,
                    "choices": [continue_with(question, value) for value in options],
                    "answer": options.index(fact.value),
                }
            )
    return questions


def _is_part(value: str, other: str) -> bool:
    """Whether one value begins with the other: the shorter one is always at least as likely."""
    # Each further token of a longer answer costs likelihood and can add none.
    shorter, longer = sorted((value.casefold(), other.casefold()), key=len)
    return longer.startswith(shorter)


def _draw(fact: Fact, value: str) -> bytes:
    return hashlib.sha256(f"{fact.subject}\0{fact.relation}\0{value}".encode()).digest()


def _retrieve(questions: Sequence[str], passages: Sequence[Passage]) -> list[Passage]:
    """The first passage by BM25 for each question."""
    import bm25s

    retriever = bm25s.BM25()
    tokenize = partial(bm25s.tokenize, token_pattern=SEARCH_TERMS, show_progress=False)
    retriever.index(tokenize([passage.text for passage in passages]), show_progress=False)
    queries = tokenize(list(questions))
    hits, _ = retriever.retrieve(queries, k=1, show_progress=False)
    return [passages[int(numbers[0])] for numbers in hits]


@dataclass(frozen=True)
class AnswerPair:
    """A question under one condition, as one model and as another answered it."""

    task: str
    question: dict[str, Any]
    """As `questions.jsonl` has it."""
    before: float
    after: float
    """1 for right, 0 for wrong."""
    said_before: str
    said_after: str

    @property
    def relation(self) -> str:
        return str(self.question["relation"])

    @property
    def document(self) -> str | None:
        """The document that states the answer; None for a placebo."""
        passage = self.question["passage"]
        return passage["document"] if passage else None

    @property
    def is_won(self) -> bool:
        """Whether the later model alone was right, with no text at hand."""
        return self.task == CLOSED_BOOK and self.after > self.before

    @property
    def is_lost(self) -> bool:
        """Whether the earlier model alone was right, with no text at hand."""
        return self.task == CLOSED_BOOK and self.after < self.before


def find_exam(evaluation: Artifact) -> Artifact | None:
    """The exam that an evaluation's models took; None if they took none, or if it is gone."""
    return evaluation.store.find_named("exam", evaluation.manifest.inputs.get("exam", ""))


def read_answers(evaluation: Artifact, before: str, after: str = "candidate") -> list[AnswerPair]:
    """The answers of two roles of an `eval_metrics` artifact.

    Empty if one of them took no exam, or if the exam is no longer in the store.
    """
    exam = find_exam(evaluation)
    if exam is None or not evaluation.stats.get("exam"):
        return []
    questions = {question["id"]: question for question in read_questions(exam.path)}
    scores = pq.read_table(evaluation.path / TASK_SCORES_NAME)
    if not {f"score_{before}", f"score_{after}"} <= set(scores.schema.names):
        return []
    pairs = []
    for row in scores.to_pylist():
        question = questions.get(row["sample"])
        # The table also has the samples of lm-eval's tasks.
        if question and row["task"] in EXAM_TASKS and row["metric"] == METRIC:
            right = (row[f"score_{role}"] for role in (before, after))
            choices = (
                question["choices"][row[f"chosen_{role}"]].strip() for role in (before, after)
            )
            pairs.append(AnswerPair(row["task"], question, *right, *choices))
    return pairs


def exam_shares(
    stats: Mapping[str, Any], before: str = "base"
) -> list[tuple[str, float | None, float | None]]:
    """Condition, and the shares of right answers of an earlier role and of the candidate, by the
    stats of an `eval_metrics` artifact."""
    by_task = {task: stats["metrics"].get(f"{task}_{METRIC}") for task in EXAM_TASKS}
    return [
        (
            task.removeprefix("exam_").replace("_", " "),
            *(roles.get(role, {}).get("value") for role in (before, "candidate")),
        )
        for task, roles in by_task.items()
        if roles
    ]
