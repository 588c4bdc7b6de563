"""Which columns of a source's rows are an example to learn a task from."""

from typing import Annotated, Literal

from pydantic import Field

from artifacts.settings import Settings


class PairColumns(Settings):
    """A text and what is to be written for it, such as a summary."""

    form: Literal["pairs"]
    """Which form the examples have."""
    document_column: str = "document"
    """The column or JSON key of the input."""
    summary_column: str = "summary"
    """The column or JSON key of what is to be written."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return (self.document_column, self.summary_column)


class ConversationColumns(Settings):
    """Conversations, or instructions with their answers."""

    form: Literal["conversations"]
    """Which form the examples have."""
    layout: Literal["messages", "alpaca", "prompt_answer"] = "messages"
    """`messages`: a list of `{role, content}`; `alpaca`: `instruction`, `input` and `output`, under
    Alpaca's own prompt; `prompt_answer`: two columns."""
    messages_column: str = "messages"
    """The column or JSON key of the list, for `messages`."""
    prompt_column: str = "prompt"
    """The column of the user's turn, for `prompt_answer`."""
    answer_column: str = "answer"
    """The column of the assistant's turn, for `prompt_answer`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return {
            "messages": (self.messages_column,),
            "alpaca": ("instruction", "output"),
            "prompt_answer": (self.prompt_column, self.answer_column),
        }[self.layout]


class LabeledColumns(Settings):
    """Texts with the class that each belongs to."""

    form: Literal["labeled"]
    """Which form the examples have."""
    text_column: str = "text"
    """The column or JSON key of the text."""
    label_column: str = "label"
    """The column or JSON key of the class, a word or a number."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return (self.text_column, self.label_column)


class PreferenceColumns(Settings):
    """Prompts, each with the better and the worse of two answers."""

    form: Literal["preferences"]
    """Which form the examples have."""
    layout: Literal["answers", "conversations"] = "answers"
    """`answers`: a prompt and two answers, each a text; `conversations`: two lists of
    `{role, content}` that differ in their last answer."""
    prompt_column: str = "prompt"
    """The column of the user's turn, for `answers`."""
    chosen_column: str = "chosen"
    """The column of the better answer, or of the conversation that ends with it."""
    rejected_column: str = "rejected"
    """The column of the worse answer, or of the conversation that ends with it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        both = (self.chosen_column, self.rejected_column)
        return (self.prompt_column, *both) if self.layout == "answers" else both


ExampleColumns = Annotated[
    PairColumns | ConversationColumns | LabeledColumns | PreferenceColumns,
    Field(discriminator="form"),
]
