"""Examples to learn a task from, and the one way they are written down: a JSON object each.

- `conversations`: `{"messages": [{"role", "content"}, ...]}`, the answers being the assistant's.
- `pairs`: `{"input", "target"}`, such as a document and its summary.
- `labeled`: `{"text", "label"}`.

A corpus of examples holds this object beside the text, which is the whole example as plain text: by
it copies are found, and what evaluation text must not repeat.
"""

import json
from collections.abc import Callable
from typing import Any, Literal

Form = Literal["pretraining", "conversations", "pairs", "labeled"]
"""What a corpus consists of; `pretraining` is plain text."""

Example = dict[str, Any]


def write_example(example: Example) -> str:
    """The example as one line of JSON."""
    return json.dumps(example, ensure_ascii=False, sort_keys=True)


def read_example(line: str) -> Example:
    """What `write_example` wrote."""
    example: Example = json.loads(line)
    return example


def form_of(example: Example) -> Form:
    """Which form an example has."""
    if "messages" in example:
        return "conversations"
    return "pairs" if "target" in example else "labeled"


def map_texts(example: Example, change: Callable[[str], str]) -> Example:
    """The example with every text changed; roles and labels stay as they are."""
    if "messages" in example:
        messages = [m | {"content": change(m["content"])} for m in example["messages"]]
        return {"messages": messages}
    return {key: text if key == "label" else change(text) for key, text in example.items()}


def plain_text(example: Example) -> str:
    """The whole example as text."""
    return "\n\n".join(_texts(example))


def find_fault(example: Example) -> tuple[str, str] | None:
    """Why nothing can be learnt from an example: a reason's name and the reason in words.

    A conversation may begin with the system's turn; then the user's and the assistant's alternate,
    the assistant's last.
    """
    if "messages" in example and (fault := _role_fault([m["role"] for m in example["messages"]])):
        return fault
    for key, text in _fields(example):
        if not text.strip():
            reason = "empty_target" if key in ("target", "label", "assistant") else "empty_input"
            return reason, f"the {key} is empty"
    return None


def _role_fault(roles: list[str]) -> tuple[str, str] | None:
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns:
        return "no_answer", "there is no turn to learn from"
    for number, role in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            place = number + 1 + len(roles) - len(turns)
            return "wrong_roles", f"message {place} is of {role!r}, where {expected!r} belongs"
    if turns[-1] == "user":
        return "ends_with_user", "the conversation ends with the user, so there is no last answer"
    return None


def _fields(example: Example) -> list[tuple[str, str]]:
    if "messages" in example:
        return [(m["role"], m["content"]) for m in example["messages"]]
    return list(example.items())


def _texts(example: Example) -> list[str]:
    if "messages" in example:
        return [m["content"] for m in example["messages"]]
    keys = ("input", "target") if "target" in example else ("text", "label")
    return [example[key] for key in keys]
