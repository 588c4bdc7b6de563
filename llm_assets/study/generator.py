"""Asks a generator about passages, within a budget, and keeps what is true to them."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from artifacts.cache import cached
from artifacts.errors import UserError, shown_in_line
from artifacts.progress import Report
from artifacts.store.identity import hash_json
from llm_assets.study.prompts import PROMPTS, PromptName
from llm_assets.study.settings import GeneratorSettings
from llm_assets.study.statements import DerivedRow

WAITS = (0, 2, 10)
"""Seconds before each time that a request is sent; again where there is no answer, 429 or 5xx."""
NGRAM_SIZE = 5
TOO_MANY_REQUESTS = 429
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z]\w+")
"""A capitalized word in the middle of a sentence."""


@dataclass(frozen=True)
class GeneratorAnswer:
    """What a generator wrote."""

    text: str
    is_whole: bool
    """Whether it ended by itself."""
    tokens: int
    """Of prompt and answer."""


@dataclass(frozen=True)
class Question:
    """A passage with a prompt."""

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
    """Folder of what earlier runs made: a run that was ended, or has more documents, asks only
    what is new."""
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
            for number, passage in enumerate(_passages(text, settings.passage_words), 1)
        ]
        questions = [
            Question(*passage, prompt, settings.seed + number)
            for number in range(settings.rounds)
            for prompt in settings.prompts
            for passage in passages
        ]
        key = os.environ.get(settings.key_variable or "")
        if settings.key_variable and not key:
            raise UserError(
                f"`study.generator.key_variable` names {settings.key_variable}, which is not set."
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with (
            httpx.Client(headers=headers, timeout=settings.timeout_seconds) as client,
            ThreadPoolExecutor(settings.requests_at_once) as workers,
        ):
            for first in range(0, len(questions), settings.requests_at_once):
                if self.tokens >= settings.most_tokens:
                    self.not_asked = len(questions) - first
                    return
                asked = questions[first : first + settings.requests_at_once]
                answers = workers.map(lambda question: self._ask(client, question), asked)
                for question, answer in zip(asked, answers, strict=True):
                    self.tokens += answer.tokens
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

    def _ask(self, client: httpx.Client, question: Question) -> GeneratorAnswer:
        body = {
            "model": self.settings.model,
            "messages": [
                {"role": "system", "content": PROMPTS[question.prompt]},
                {"role": "user", "content": question.passage},
            ],
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.answer_tokens,
            "seed": question.seed,
        }
        # By the request alone: answers cost money, whatever else changes here.
        key = hash_json({"entry": "generated text", "request": body})
        answer = cached(self.cache, key, lambda: json.dumps(self._send(client, body)).encode())
        return GeneratorAnswer(**json.loads(bytes(answer)))

    def _send(self, client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
        fault = ""
        for seconds in WAITS:
            time.sleep(seconds)
            try:
                response = client.post(f"{self.settings.address}/chat/completions", json=body)
            except httpx.HTTPError as error:
                fault = str(error) or type(error).__name__
            else:
                if response.is_success:
                    return _read(response)
                fault = f"{response.status_code}: {shown_in_line(response.text[:200])}"
                if not (response.is_server_error or response.status_code == TOO_MANY_REQUESTS):
                    break
            self.report(f"The generator did not answer: {fault}")
        raise UserError(
            f"The generator at {self.settings.address} (`study.generator`) gives no answer: "
            f"{fault}. What it has answered so far is kept: materialize `study` again once it "
            "answers."
        )

    def _fault(self, answer: GeneratorAnswer, passage: str) -> str | None:
        """Why an answer is not trained on; None where nothing speaks against it."""
        if not answer.text.strip():
            return "empty"
        if not answer.is_whole:
            return "cut off"
        if set(_numbers(answer.text)) - set(_numbers(passage)):
            return "number that the document does not have"
        known = set(re.findall(r"\w+", passage.casefold()))
        new = {name for name in _NAME.findall(answer.text) if name.casefold() not in known}
        if len(new) > self.settings.maximum_new_names:
            return "names that the document does not have"
        ngrams, held = ngrams_of(answer.text), ngrams_of(passage)
        if ngrams and len(ngrams & held) / len(ngrams) > self.settings.maximum_copied:
            return "copy of the document"
        return None


def ngrams_of(text: str) -> set[tuple[str, ...]]:
    """All runs of `NGRAM_SIZE` words of a text, in lower case."""
    words = re.findall(r"\w+", text.casefold())
    return {tuple(words[i : i + NGRAM_SIZE]) for i in range(len(words) - NGRAM_SIZE + 1)}


def _numbers(text: str) -> list[str]:
    """Numbers as they are written; those that only count the lines of a list are none."""
    without_counts = re.sub(r"(?m)^\s*\W*\d+[.)]\s", "", text)
    return [one.strip(".,") for one in re.findall(r"\d[\d.,]*", without_counts)]


def _passages(text: str, words: int) -> Iterator[str]:
    """A text in stretches of at most so many words."""
    ends = [match.end() for match in re.finditer(r"\S+\s*", text)]
    starts = [0, *ends]
    for first in range(0, len(ends), words):
        yield text[starts[first] : ends[min(first + words, len(ends)) - 1]].strip()


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
            "The generator (`study.generator`) answers otherwise than OpenAI's "
            f"/v1/chat/completions: {shown_in_line(response.text[:200])} ({error!r})"
        ) from None
