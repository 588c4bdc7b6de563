"""The `exam` asset."""

from typing import Any

from pydantic import Field

from artifacts.settings import Settings
from artifacts.storage.files import LocalPath, sha256_of


class ExamSettings(Settings):
    """Questions about facts in the text, each with one correct answer and wrong ones of the same
    kind."""

    facts: LocalPath
    """A local CSV file with the columns `subject`, `relation` and `value`; a fact that no training
    document states is left out."""
    forms: LocalPath
    """A local YAML file that maps each relation to `told` and `asked`. Each entry of `asked`, the
    beginning of a sentence with `{subject}` that the value completes, makes one question per
    fact."""
    placebo: LocalPath | None = None
    """A local CSV file of facts that no training document states: correct answers about them beyond
    chance do not indicate knowledge."""
    choices: int = Field(default=4, ge=2)
    """Maximum number of answers to choose from; one is correct, and the others are values of the
    same relation."""
    passage_words: int = Field(default=100, ge=20)
    """Maximum length, in words, of the passages that retrieval searches and puts before a question.
    A fact is asked about only if one passage contains its subject and its value. In scripts written
    without spaces, two characters count as a word, or four of Thai, Lao, Burmese or Khmer."""

    def content(self) -> dict[str, Any]:
        """What decides the questions, for the fingerprint: files count by what they hold."""
        paths = {"facts": self.facts, "forms": self.forms, "placebo": self.placebo}
        hashes = {name: sha256_of(path) for name, path in paths.items() if path}
        return self.model_dump(mode="json") | hashes

    def chosen(self) -> dict[str, Any]:
        """What people choose: facts arrive as text does; how they are asked about is a choice."""
        return self.content() | {"facts": self.facts, "placebo": self.placebo}
