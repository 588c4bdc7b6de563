"""Takes an example out of a source's row."""

from collections.abc import Callable
from typing import Any

from artifacts.examples import Example, find_fault, write_example
from spark_jobs.read.example_settings import (
    ConversationColumns,
    ExampleColumns,
    LabeledColumns,
    PairColumns,
    PreferenceColumns,
)
from spark_jobs.read.faults import Fault

Look = Callable[[str], Any]
"""A row's value under a key; None where it has none."""

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
"""The prompts of Stanford Alpaca (Taori and others, 2023)."""


def take_example(look: Look, columns: ExampleColumns, place: str) -> str | Fault:
    """The example of a row as `artifacts.examples.write_example` writes it, or its fault.

    Args:
        place: the row, for people.
    """
    if isinstance(columns, ConversationColumns):
        found = _conversation(look, columns)
    elif isinstance(columns, PairColumns):
        found = _texts(look, {"input": columns.document_column, "target": columns.summary_column})
    elif isinstance(columns, PreferenceColumns):
        found = _preference(look, columns)
    else:
        found = _labeled(look, columns)
    if isinstance(found, str):
        return Fault("no_example", f"{place}: {found}.")
    if fault := find_fault(found):
        return Fault(fault[0], f"{place}: {fault[1]}.")
    return write_example(found)


def _texts(look: Look, keys: dict[str, str]) -> Example | str:
    found = {name: look(key) for name, key in keys.items()}
    for name, key in keys.items():
        if not isinstance(found[name], str):
            return f"no text under the key {key!r}"
    return found


def _labeled(look: Look, columns: LabeledColumns) -> Example | str:
    label = look(columns.label_column)
    if isinstance(label, bool) or not isinstance(label, str | int):
        return f"no class, a word or a whole number, under the key {columns.label_column!r}"
    found = _texts(look, {"text": columns.text_column})
    return found if isinstance(found, str) else found | {"label": str(label)}


def _conversation(look: Look, columns: ConversationColumns) -> Example | str:
    if columns.layout == "messages":
        return _messages(look(columns.messages_column), columns.messages_column)
    if columns.layout == "prompt_answer":
        found = _texts(look, {"user": columns.prompt_column, "assistant": columns.answer_column})
    else:
        found = _texts(look, {"instruction": "instruction", "assistant": "output"})
        if not isinstance(found, str):
            given = look("input")
            template = ALPACA_WITH_INPUT if given else ALPACA
            prompt = template.format(instruction=found["instruction"], input=given)
            found = {"user": prompt, "assistant": found["assistant"]}
    if isinstance(found, str):
        return found
    roles = ("user", "assistant")
    return {"messages": [{"role": role, "content": found[role]} for role in roles]}


def _preference(look: Look, columns: PreferenceColumns) -> Example | str:
    keys = {"chosen": columns.chosen_column, "rejected": columns.rejected_column}
    if columns.layout == "answers":
        found = _texts(look, {"prompt": columns.prompt_column} | keys)
        if isinstance(found, str):
            return found
        return found | {"prompt": [{"role": "user", "content": found["prompt"]}]}
    turns = {}
    for name, key in keys.items():
        found = _messages(look(key), key)
        if isinstance(found, str):
            return found
        *turns[name], last = found["messages"]
        if last["role"] != "assistant":
            return f"the conversation under the key {key!r} does not end with the assistant's turn"
        keys[name] = last["content"]
    if turns["chosen"] != turns["rejected"]:
        return "the two conversations differ before their last turn"
    return {"prompt": turns["chosen"]} | keys


def _messages(given: Any, key: str) -> Example | str:
    if not isinstance(given, list) or not given:
        return f"no list of messages under the key {key!r}"
    messages = []
    for number, message in enumerate(given, start=1):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (0, 0)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            return f"message {number} under {key!r} is not an object with texts `role`, `content`"
        messages.append({"role": role, "content": content})
    return {"messages": messages}
