"""Derived text as a raw corpus, which is cleaned as any other.

A derived text carries the id of its document, so it can be traced to the document and is forgotten
with it.
"""

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import httpx
import pyarrow as pa

from artifacts.cache import cached
from artifacts.errors import UserError, shown_in_line
from artifacts.progress import Report, counted
from artifacts.settings import read_key
from artifacts.store.identity import hash_json
from artifacts.words import WORD, count_words, split_passages, word_ngrams
from llm_assets.study.settings import PROMPTS, SOURCE, GeneratorSettings, PromptName, StudySettings
from spark_jobs.read.document import DERIVED, Document, to_table
from spark_jobs.read.facts import (
    MOST_WORDS,
    Fact,
    read_facts,
    read_forms,
    regular_facts,
    states,
    tell,
)
from spark_jobs.read.opened import UniqueIds
from spark_jobs.runtime.parquet import find_parts, write_table

# The facts that documents hold, told in many forms; no model is needed.
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
"""Forms of facts whose relation has none of its own."""


@dataclass
class DerivedRow:
    document: str
    """Id of the document."""
    name: str
    """Tells it from the others of its document."""
    text: str
    method: str
    generator: str | None = None
    prompt: str | None = None
    seed: int | None = None

    @property
    def id(self) -> str:
        """Its own, which begins with its document's."""
        return f"{self.document}{DERIVED}{self.name}"


class KnownFacts:
    """The facts of all documents so far, each attributed to the first that states it."""

    def __init__(self, settings: StudySettings) -> None:
        """Raise UserError where a file cannot be read."""
        self._settings = settings
        self._table = read_facts(settings.facts) if settings.facts else []
        self._forms = read_forms(settings.forms) if settings.forms else {}
        self._facts: list[PlacedFact] = []

    def add(self, document: str, text: str) -> None:
        """Enter the facts that a document states: those of the table or, without one, regular
        ones."""
        if self._settings.facts:
            facts = (fact for fact in self._table if states(text, fact))
            self._facts += [PlacedFact(document, (f.subject,), f.relation, f.value) for f in facts]
            return
        self._facts += (PlacedFact(document, *fact) for fact in regular_facts(text))

    def statements(self, left_out: Counter[str]) -> Iterator[DerivedRow]:
        """The facts in their forms; facts that documents contradict each other about are counted.

        Raises:
            UserError: a table of facts is given, and no document holds any of them.
        """
        if self._settings.facts and not self._facts:
            raise UserError(
                f"{self._settings.facts}: no training document states any of its "
                f"{len(self._table)} facts: none contains a subject and its value."
            )
        by_document: dict[str, list[Fact]] = defaultdict(list)
        values: dict[tuple[str, str], set[str]] = defaultdict(set)

        def values_of(fact: Fact) -> set[str]:
            """What documents say of the same, in whatever capitals they name it."""
            return values[fact.subject.casefold(), fact.relation.casefold()]

        name_subjects(self._facts)
        for placed in self._facts:
            fact = Fact(placed.headings[-1], placed.relation, placed.value)
            if count_words(fact.subject) <= MOST_WORDS and fact.value not in values_of(fact):
                values_of(fact).add(fact.value)
                by_document[placed.document].append(fact)
        # By ids, so that the parts in which documents lie do not decide the order of the rows.
        for document, facts in sorted(by_document.items()):
            undisputed = [fact for fact in facts if len(values_of(fact)) == 1]
            left_out["contradiction"] += len(facts) - len(undisputed)
            forms = {fact.relation: self._forms_of(fact.relation) for fact in undisputed}
            for name, text in tell(undisputed, forms, self._settings.facts_per_document):
                yield DerivedRow(document, f"statements/{name}", text, "statements")

    def _forms_of(self, relation: str) -> list[str]:
        own = self._forms.get(relation)
        name = relation.lower().replace("{", "{{").replace("}", "}}")
        forms = own.told if own else [form.replace("{relation}", name) for form in GENERAL_FORMS]
        return forms[: self._settings.forms_per_fact]


@dataclass
class PlacedFact:
    document: str
    headings: tuple[str, ...]
    """The headings above it, outermost first; the last one names the subject, or a part of its
    description."""
    relation: str
    value: str


def name_subjects(facts: Sequence[PlacedFact]) -> None:
    """Remove headings from facts until each one's last heading is what the fact is about.

    That is the nearest heading, unless it names a part that many descriptions have, such as
    "Technical data": then, below different headings above it, at least half of the repeated
    relations have different values. In that case the heading above it is examined in turn.
    """
    while True:
        by_subject: dict[str, dict[str, dict[tuple[str, ...], set[str]]]] = {}
        for fact in facts:
            *above, subject = map(str.casefold, fact.headings)
            places = by_subject.setdefault(subject, {}).setdefault(fact.relation.casefold(), {})
            places.setdefault(tuple(above), set()).add(fact.value)
        parts = {
            subject for subject, relations in by_subject.items() if _is_part(relations.values())
        }
        climbing = [
            fact
            for fact in facts
            if len(fact.headings) > 1 and fact.headings[-1].casefold() in parts
        ]
        # Each round shortens the headings of some facts, and none below one, so this is reached.
        if not climbing:
            return
        for fact in climbing:
            fact.headings = fact.headings[:-1]


def _is_part(relations: Iterable[dict[tuple[str, ...], set[str]]]) -> bool:
    """Whether a heading names a part, by the values of each relation below it, place by place."""
    repeated = [list(places.values()) for places in relations if len(places) > 1]
    differing = [values for values in repeated if any(other != values[0] for other in values)]
    return bool(repeated) and 2 * len(differing) >= len(repeated)


# A generator is asked about passages, within a budget; answers true to them are kept.
WAITS = (0, 2, 10)
"""Seconds before each attempt of a request, which is repeated without an answer, on 429 or 5xx."""
NGRAM_SIZE = 5
TOO_MANY_REQUESTS = 429
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z]\w+")
"""A capitalized word in the middle of a sentence."""
_WITHIN = re.compile(r"(?<=[a-z,;] )\w+")
"""Any word there."""
MOST_NAMES = 0.2
"""Share of the words within sentences: if more are capitalized, as all nouns are in German,
capitals identify no names."""
_COUNT = re.compile(r"(?m)^\s*\W*\d+[.)]\s")
"""Numbering of a list's lines in an answer."""
REFUSED = "refused by the generator"
REFUSALS = (400, 413, 422)
"""Statuses that refuse a single text, because of a content filter or the text's length."""
MOST_REFUSED = 20
"""Refusals in a row after which the questions are not to blame."""
MOST_WAIT_SECONDS = 60.0
"""Longest `Retry-After` of a server that is followed."""


class QuestionRefused(Exception):
    """The generator answers other questions, but refuses this one."""


@dataclass(frozen=True)
class GeneratorAnswer:
    text: str
    is_whole: bool
    """Whether it ended by itself."""
    tokens: int
    """Of prompt and answer."""


@dataclass(frozen=True)
class Question:
    document: str
    passage: str
    number: int
    """Of the passage in its document."""
    prompt: PromptName
    seed: int


@dataclass
class Generator:
    """A generator, what it has cost so far, and what of its answers was left out."""

    settings: GeneratorSettings
    cache: str
    """Folder with the answers of earlier runs: a run that was interrupted, or has more documents,
    asks only what is new."""
    report: Report
    left_out: Counter[str]
    tokens: int = 0
    not_asked: int = 0

    def write(self, documents: Sequence[tuple[str, str]]) -> Iterator[DerivedRow]:
        """What it writes about documents, given as id and text, until the budget is spent.

        Each prompt goes through all documents before the next one begins, so that a small budget
        reaches every document.

        Raises:
            UserError: the generator does not answer, or refuses; the answers so far are kept.
        """
        settings = self.settings
        passages = [
            (document, passage, number)
            for document, text in documents
            for number, passage in enumerate(split_passages(text, settings.passage_words), 1)
        ]
        questions = [
            Question(*passage, prompt, settings.seed + number)
            for number in range(settings.rounds)
            for prompt in settings.prompts
            for passage in passages
        ]
        key = read_key(settings.key_variable) if settings.key_variable else None
        if settings.key_variable and key is None:
            raise UserError(
                f"`study.generator.key_variable` names {settings.key_variable}, which is not set "
                "or holds no key."
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with (
            httpx.Client(headers=headers, timeout=settings.timeout_seconds) as client,
            # Workers end before the client is closed, as Python leaves these in the reverse order.
            ThreadPoolExecutor(settings.requests_at_once) as workers,
        ):
            used = in_a_row = 0
            for start in range(0, len(questions), settings.requests_at_once):
                if used >= settings.most_tokens:
                    self.not_asked = len(questions) - start
                    return
                # In batches, since what they cost is known only once they are answered.
                batch = questions[start : start + settings.requests_at_once]
                # They come in the order of the questions, so which one is answered first decides no
                # row.
                answers = workers.map(lambda question: self._ask(client, question), batch)
                for question, answer in zip(batch, answers, strict=True):
                    if isinstance(answer, str):
                        self.left_out[REFUSED] += 1
                        in_a_row += 1
                        if in_a_row >= min(MOST_REFUSED, len(questions)):
                            raise self._no_answer(answer)
                        continue
                    in_a_row = 0
                    self.tokens += answer.tokens
                    # Concurrency decides only the speed: answers past the budget are discarded.
                    if used >= settings.most_tokens:
                        self.left_out["beyond the budget"] += 1
                        continue
                    # Cached answers count as well, so that the cache never decides what is made,
                    # nor how much.
                    used += answer.tokens
                    if fault := self._fault(answer, question.passage):
                        self.left_out[fault] += 1
                        continue
                    name = f"{question.prompt}/{question.number}.{question.seed}"
                    yield DerivedRow(
                        question.document,
                        name,
                        answer.text,
                        "generator",
                        settings.model,
                        question.prompt,
                        question.seed,
                    )

    def _ask(self, client: httpx.Client, question: Question) -> GeneratorAnswer | str:
        """The answer, or why this question is refused."""
        body = {
            "model": self.settings.model,
            "messages": [
                {"role": "system", "content": PROMPTS[question.prompt]},
                {"role": "user", "content": question.passage},
            ],
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.answer_tokens,
            # A server that heeds no seed is asked again in each round all the same: its answers are
            # kept by the whole request.
            "seed": question.seed,
        }
        # Keyed by the request alone: answers cost money, so no other change may invalidate them.
        key = hash_json({"entry": "generated text", "request": body})
        try:
            answer = cached(self.cache, key, lambda: json.dumps(self._send(client, body)).encode())
        except QuestionRefused as refusal:
            self.report(f"The generator refused a passage of {question.document}: {refusal}")
            return str(refusal)
        return GeneratorAnswer(**json.loads(bytes(answer)))

    def _send(self, client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.settings.address.rstrip('/')}/chat/completions"
        fault, asked_to_wait = "", 0.0
        for seconds in WAITS:
            time.sleep(max(seconds, min(asked_to_wait, MOST_WAIT_SECONDS)))
            try:
                response = client.post(url, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                fault = str(error) or type(error).__name__
            else:
                if response.is_success:
                    return _read(response)
                fault = f"{response.status_code}: {shown_in_line(response.text[:200])}"
                if response.status_code in REFUSALS:
                    raise QuestionRefused(fault)
                retry_after = response.headers.get("Retry-After", "")
                # The header may also be a date (RFC 9110), which is not followed.
                asked_to_wait = float(retry_after) if retry_after.isdecimal() else 0.0
                # Any other status, such as one of a wrong key, would be the same at the next
                # attempt.
                if not (response.is_server_error or response.status_code == TOO_MANY_REQUESTS):
                    break
            self.report(f"The generator did not answer: {fault}")
        raise self._no_answer(fault)

    def _no_answer(self, fault: str) -> UserError:
        return UserError(
            f"The generator at {self.settings.address} (`study.generator`) gives no answer: "
            f"{fault}. What it has answered so far is kept: materialize `study` again once it "
            "answers."
        )

    def _fault(self, answer: GeneratorAnswer, passage: str) -> str | None:
        """Why an answer is not trained on; None if nothing is wrong with it."""
        if not answer.text.strip():
            return "empty"
        if not answer.is_whole:
            return "cut off"
        # Numbers that count the answer's own lines say nothing about the text.
        without_counts = _COUNT.sub("", answer.text)
        if _numbers(without_counts) - _numbers(passage):
            return "number that the document does not have"
        passage_words = set(WORD.findall(passage.casefold()))
        new_names = {
            name for name in _NAME.findall(answer.text) if name.casefold() not in passage_words
        }
        capitals, words = (len(pattern.findall(passage)) for pattern in (_NAME, _WITHIN))
        if len(new_names) > self.settings.maximum_new_names and capitals <= MOST_NAMES * words:
            return "names that the document does not have"
        ngrams, passage_ngrams = (word_ngrams(text, NGRAM_SIZE) for text in (answer.text, passage))
        if ngrams and len(ngrams & passage_ngrams) / len(ngrams) > self.settings.maximum_copied:
            return "copy of the document"
        return None


def _numbers(text: str) -> set[str]:
    return {number.strip(".,") for number in re.findall(r"\d[\d.,]*", text)}


def _read(response: httpx.Response) -> dict[str, Any]:
    """The fields of `GeneratorAnswer`."""
    try:
        content = response.json()
        choice = content["choices"][0]
        return {
            "text": str(choice["message"]["content"] or ""),
            "is_whole": choice.get("finish_reason") in ("stop", None),
            "tokens": int(content["usage"]["total_tokens"]),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            "The generator (`study.generator`) did not answer in the format of OpenAI's "
            f"/v1/chat/completions: {shown_in_line(response.text[:200])} ({error!r})"
        ) from None


CODE_VERSION = "4"
DERIVED_FOLDER = "derived"
"""Folder of the rows before they are cleaned."""
DERIVATIONS_NAME = "derivations.parquet"
DERIVATION_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "document", "method", "generator", "prompt")),
        ("seed", pa.int64()),
    ]
)
"""What a row was made of, and how."""
ROWS_PER_PART = 10_000


def write_rows(
    settings: StudySettings,
    clean_corpus: str,
    questions: Iterable[dict[str, Any]],
    output: str,
    cache: str,
    report: Report,
) -> dict[str, Any]:
    """Write the text derived from the training documents, and what each row was made of.

    Args:
        clean_corpus: folder of that artifact.
        questions: of the exam; a row that shares an n-gram of five words with one, outside its
            subject, is left out, because it would teach the wording of the answer.
        cache: folder of what earlier runs made.

    Returns:
        `documents_studied`, `rows` (method to rows), `left_out` (reason to rows), `tokens` of the
        generator, `dollars`, `not_asked` (requests past the budget).

    Raises:
        UserError: a file cannot be read, the generator fails, or nothing is made.
    """
    facts = KnownFacts(settings)
    documents: list[tuple[str, str]] = []
    for part in find_parts(clean_corpus, ["id", "text", "split", "example"], "clean_corpus"):
        for row in part.read(["id", "text", "split", "example"]).to_pylist():
            # Examples of a task have a form of their own, which derived text would not have.
            if row["split"] == "train" and row["example"] is None:
                facts.add(row["id"], row["text"])
                if settings.generator:
                    documents.append((row["id"], row["text"]))
    left_out, counts = Counter[str](), Counter[str]()
    generator = None
    if settings.generator:
        generator = Generator(settings.generator, cache, report, left_out)
    derived = chain(
        facts.statements(left_out) if settings.forms_per_fact else (),
        # By ids: where the budget ends must not depend on which part a document lies in.
        generator.write(sorted(documents)) if generator else (),
    )
    exam_ngrams: set[tuple[str, ...]] = set()
    for question in questions:
        # Outside its subject, whose own words have to be in what is told of it.
        for part in re.split(re.escape(question["subject"]), question["question"]):
            exam_ngrams |= word_ngrams(part, NGRAM_SIZE)
    derivations: list[dict[str, Any]] = []
    unique = UniqueIds()

    def kept() -> Iterator[Document]:
        for row in derived:
            if exam_ngrams & word_ngrams(row.text, NGRAM_SIZE):
                left_out["words of the exam"] += 1
                continue
            for _, identifier in unique.changes([row.id]):
                # Such as two subjects whose names differ only in punctuation.
                row.name = identifier.removeprefix(f"{row.document}{DERIVED}")
            counts[row.prompt or row.method] += 1
            derivations.append({name: getattr(row, name) for name in DERIVATION_SCHEMA.names})
            yield Document(row.id, row.text, SOURCE)

    # `counts` and `derivations` are filled while these rows are written, and are whole after that.
    rows = kept()
    for number in count():
        next_rows = list(islice(rows, ROWS_PER_PART))
        if not next_rows:
            break
        write_table(f"{output}/{DERIVED_FOLDER}/part-{number:05d}.parquet", to_table(next_rows))
    if not counts:
        raise UserError(_nothing_made(settings, left_out))
    write_table(
        f"{output}/{DERIVATIONS_NAME}", pa.Table.from_pylist(derivations, DERIVATION_SCHEMA)
    )
    tokens = generator.tokens if generator else 0
    price = settings.generator.dollars_per_million_tokens if settings.generator else 0
    studied = len({derivation["document"] for derivation in derivations})
    report(f"{counted(counts.total(), 'text')} made from {counted(studied, 'document')}")
    return {
        "documents_studied": studied,
        "rows": dict(counts),
        # `+` leaves out reasons that were counted with 0, as contradictions are where there are
        # none.
        "left_out": dict(+left_out),
        "tokens": tokens,
        "dollars": tokens * price / 1e6,
        "not_asked": generator.not_asked if generator else 0,
    }


def _nothing_made(settings: StudySettings, left_out: Counter[str]) -> str:
    counts = ", ".join(f"{count:,} {reason}" for reason, count in (+left_out).items())
    note = f" Left out: {counts}." if counts else ""
    if settings.generator:
        return f"The generator wrote nothing that may be trained on.{note}"
    if settings.facts:
        return f"`study` could tell none of the facts in {settings.facts}.{note}"
    return (
        "`study` found no fact to tell: it looks in the training documents for tables and for "
        f"lines such as `Weight: 3 kg` below a heading.{note} Give `study.facts`, a table "
        "of facts, or `study.generator`; or leave out the section `study`."
    )
