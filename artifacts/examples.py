"""Examples to learn a task from, and the one way they are written down: a JSON object each.

- `conversations`: `{"messages": [{"role", "content"}, ...]}`, the answers being the assistant's.
- `pairs`: `{"input", "target"}`, such as a document and its summary.
- `labeled`: `{"text", "label"}`.
- `preferences`: `{"prompt": [{"role", "content"}, ...], "chosen", "rejected"}`, the better and the
  worse of two answers to a prompt.

A corpus of examples holds this object beside the text, which is the whole example as plain text: by
it copies are found, and what evaluation text must not repeat.
"""

import json
from collections.abc import Callable
from typing import Any, Literal

Form = Literal["pretraining", "conversations", "pairs", "labeled", "preferences"]
"""What a corpus consists of; `pretraining` is plain text."""

Example = dict[str, Any]

TARGETS = ("target", "label", "assistant", "chosen", "rejected")
"""Keys and roles of the text to be learned."""
ANSWER = {"role": "assistant"}
"""Stands for either answer to a prompt, where roles are compared."""


def write_example(example: Example) -> str:
    """The example as one line of JSON."""
    # Sorted, so that equal examples are equal bytes: by these, what was made of a part is found in
    # the cache (`spark_jobs.clean.prepare`).
    return json.dumps(example, ensure_ascii=False, sort_keys=True)


def read_example(line: str) -> Example:
    """What `write_example` wrote."""
    return json.loads(line)


def map_texts(example: Example, change: Callable[[str], str]) -> Example:
    """The example with every text changed; roles and labels stay as they are."""

    def changed(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [message | {"content": change(message["content"])} for message in value]
        return value if key == "label" else change(value)

    return {key: changed(key, value) for key, value in example.items()}


def plain_text(example: Example) -> str:
    """The whole example as text."""
    return "\n\n".join(text for _, text in texts_of(example))


def find_fault(example: Example) -> tuple[str, str] | None:
    """Why nothing can be learnt from an example: a reason's name and the reason in words.

    A conversation may begin with the system's turn; then the user's and the assistant's alternate,
    the assistant's last. A prompt with two answers is such a conversation up to its last turn.
    """
    turns = example["prompt"] + [ANSWER] if "chosen" in example else example.get("messages")
    if turns is not None and (fault := _role_fault([turn["role"] for turn in turns])):
        return fault
    for key, text in texts_of(example):
        if not text.strip():
            return "empty_target" if key in TARGETS else "empty_input", f"the {key} is empty"
    if "chosen" in example and example["chosen"] == example["rejected"]:
        return "same_answers", "the chosen and the rejected answer are the same"
    return None


def _role_fault(roles: list[str]) -> tuple[str, str] | None:
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns:
        return "no_answer", "there is no turn to learn from"
    for number, role in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            # Counted from 1, the system's turn included.
            place = number + 1 + len(roles) - len(turns)
            return "wrong_roles", f"turn {place} is of {role!r}, where {expected!r} belongs"
    if turns[-1] == "user":
        return "ends_with_user", "the conversation ends with the user, so there is no last answer"
    return None


def texts_of(example: Example) -> list[tuple[str, str]]:
    """Its texts in their order, each with its key or role."""
    if "messages" in example:
        return [(m["role"], m["content"]) for m in example["messages"]]
    if "chosen" in example:
        prompt = [(m["role"], m["content"]) for m in example["prompt"]]
        return [*prompt, *((key, example[key]) for key in ("chosen", "rejected"))]
    keys = ("input", "target") if "target" in example else ("text", "label")
    return [(key, example[key]) for key in keys]
