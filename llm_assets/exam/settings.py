"""The `exam` asset."""

from typing import Any

from pydantic import Field

from artifacts.settings import Settings
from artifacts.storage.files import sha256_of


class ExamSettings(Settings):
    """Questions about facts of the text, each with one right answer and wrong ones of its kind."""

    facts: str
    """A CSV file with the columns `subject`, `relation` and `value`."""
    forms: str
    """A YAML file: relation to `told` and `asked`; each of `asked` makes a question of a fact."""
    placebo: str | None = None
    """A table of facts that stand in no text: answers to them that are right beyond chance are no
    knowledge."""
    choices: int = Field(default=4, ge=2)
    """Answers to choose from; one is right, the others are values of the same relation."""
    passage_words: int = Field(default=100, ge=20)
    """Length of the passages that retrieval searches and puts before a question."""

    def content(self) -> dict[str, Any]:
        """What decides the questions, for the fingerprint: files count by what they hold."""
        paths = {"facts": self.facts, "forms": self.forms, "placebo": self.placebo}
        held = {name: sha256_of(path) for name, path in paths.items() if path}
        return self.model_dump(mode="json") | held
