"""The `study` asset."""

from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from artifacts.settings import Address, EnvironmentVariable, Settings
from artifacts.storage.files import LocalPath, sha256_of

SOURCE = "study"
"""The source of all derived text, which has a weight of its own in `tokenized_shards.mixing`."""

# What a generator is asked to write about a passage.
# The first seven follow the strategies of SPA (arXiv 2603.22213), which found that seven fixed
# prompts teach as much as prompts made for each document: concepts, critical thinking, and writing
# of one's own.
PromptName = Literal[
    "key_concepts",
    "mind_map",
    "implications",
    "critical_questions",
    "case_studies",
    "discussion",
    "lesson",
    "questions_and_answers",
]

_TASKS: dict[PromptName, str] = {
    "key_concepts": "Explain each important term and fact of the text in a paragraph of its own.",
    "mind_map": "Write an outline that shows how the things in the text belong together: each "
    "thing, and under it what the text says of it.",
    "implications": "Write down what follows from the text: what it means in practice, and for "
    "whom.",
    "critical_questions": "Write demanding questions whose answers need several statements of the "
    "text together, each followed by a reasoned answer.",
    "case_studies": "Describe situations in which somebody needs what the text says, and how the "
    "text settles them.",
    "discussion": "Write a conversation between two people, of whom one knows the text well and "
    "the other asks until everything has been said.",
    "lesson": "Teach the text to somebody who is new to the subject, in your own words, step by "
    "step.",
    "questions_and_answers": "Write a question and its short answer for every fact of the text.",
}
_RULES = (
    "Use only what the text says, with its names and numbers exactly as they are. Name the subject "
    "in every sentence, since nobody will have the text at hand. Write in the language of the "
    "text. Give only what was asked for."
)
PROMPTS: dict[PromptName, str] = {name: f"{task} {_RULES}" for name, task in _TASKS.items()}
"""Name to instruction, which is followed by the passage."""

assert set(PROMPTS) == set(get_args(PromptName))


class GeneratorSettings(Settings):
    """A model that writes about each training document, called through an OpenAI-compatible
    `/v1/chat/completions` endpoint."""

    address: Address
    """Its base URL, such as http://127.0.0.1:8001/v1."""
    model: str
    """The name of the model on that server."""
    key_variable: EnvironmentVariable | None = None
    """Environment variable that holds its API key; leave it unset if the server needs no key."""
    prompts: tuple[PromptName, ...] = tuple(PROMPTS)
    """What to ask about each passage, in this order."""
    rounds: int = Field(default=1, ge=1)
    """How many times to send each prompt with each passage, each time with a different seed."""
    passage_words: int = Field(default=400, ge=20)
    """Maximum length, in words, of the passage of a document that is sent with a prompt."""
    answer_tokens: int = Field(default=512, ge=16)
    """Maximum number of tokens in an answer; one that reaches this limit is left out."""
    temperature: float = Field(default=0.7, ge=0, le=2)
    """Sampling temperature of the generator."""
    seed: int = 0
    """Seed of the first round; each further round adds 1."""
    requests_at_once: int = Field(default=4, ge=1)
    """Number of concurrent requests."""
    timeout_seconds: float = Field(default=120, gt=0)
    """How many seconds to wait for an answer."""
    maximum_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of prompt and answer tokens, as the generator counts them; once it is reached,
    no more requests are sent."""
    dollars_per_million_tokens: float = Field(default=0, ge=0)
    """Price of prompt and answer tokens alike; needed for `maximum_dollars`."""
    maximum_dollars: float | None = Field(default=None, gt=0)
    """Maximum cost; once it is reached, no more requests are sent."""
    maximum_copied: float = Field(default=0.8, gt=0, le=1)
    """Maximum share of an answer's five-word n-grams that may appear in its passage; answers above
    it are left out, since they teach nothing new."""
    maximum_new_names: int = Field(default=3, ge=0)
    """Maximum number of names (capitalized words within a sentence) in an answer that do not occur
    in its passage; answers with more are left out."""

    @model_validator(mode="after")
    def _dollars_have_a_price(self) -> Self:
        if self.maximum_dollars and not self.dollars_per_million_tokens:
            raise ValueError("maximum_dollars needs dollars_per_million_tokens; give the price")
        return self

    @property
    def most_tokens(self) -> float:
        """The budget in tokens, that in dollars included."""
        limits = [float(self.maximum_tokens)] if self.maximum_tokens else []
        if self.maximum_dollars:
            limits.append(self.maximum_dollars / self.dollars_per_million_tokens * 1e6)
        return min(limits, default=float("inf"))


WHERE = {"address", "key_variable", "requests_at_once", "timeout_seconds"}
"""Keys of a generator that decide where and how it is asked, but not what it writes."""


class StudySettings(Settings):
    """Text made from the training documents of plain text, to train on in addition to them."""

    facts: LocalPath | None = None
    """A local CSV file with the columns `subject`, `relation` and `value`; those of its facts that
    a document states are used. If unset, the facts that documents contain in a regular form are
    used: in Markdown tables, and below a heading in lines such as `Weight: 3 kg`."""
    forms: LocalPath | None = None
    """A local YAML file that maps each relation to `told`, sentences with `{value}` and, usually,
    `{subject}`; relations that are missing from it are told in general forms."""
    forms_per_fact: int = Field(default=8, ge=0)
    """Maximum number of forms in which each fact is told; 0 tells none."""
    facts_per_document: int = Field(default=3, ge=1)
    """Maximum number of facts that one derived document tells."""
    generator: GeneratorSettings | None = None
    """A model that writes more about each document."""

    @model_validator(mode="after")
    def _makes_something(self) -> Self:
        if not self.forms_per_fact and self.generator is None:
            raise ValueError(
                "forms_per_fact is 0 and there is no generator, so nothing is made; raise "
                "forms_per_fact or add a generator"
            )
        return self

    def content(self) -> dict[str, Any]:
        """What decides the text, for the fingerprint: files count by what they hold."""
        hashes = {
            name: sha256_of(path) for name in ("facts", "forms") if (path := getattr(self, name))
        }
        excluded = {"generator": WHERE} if self.generator else None
        return self.model_dump(mode="json", exclude=excluded) | hashes
