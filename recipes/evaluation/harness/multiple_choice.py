"""A multiple-choice set made from held-out domain text, in the form of a local lm-eval task.

Each question is the beginning of a held-out document; the choices are how it goes on, and how as
many other documents go on at the same place. The model chooses the likeliest. Documents, the other
documents and the right choice's place follow from the order of the documents, which is a hash of
their clusters, so the same shards and settings make the same questions.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from artifacts.errors import UserError
from recipes.evaluation.documents import Document, Tokenizer
from recipes.evaluation.settings import MultipleChoiceSettings

MULTIPLE_CHOICE_TASK = "domain_multiple_choice"

_TASK = """\
task: domain_multiple_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def make_questions(
    documents: Sequence[Document], tokenizer: Tokenizer, settings: MultipleChoiceSettings
) -> list[dict[str, object]]:
    """Questions with `document`, `cluster`, `context`, `choices` and `answer` (a place in choices).

    Raises:
        UserError: too few held-out documents are long enough.
    """
    needed = settings.context_tokens + settings.choice_tokens
    usable = [document for document in documents if len(document.tokens) >= needed]
    if len({document.cluster for document in usable}) < settings.choices:
        raise UserError(
            f"Only {len(usable)} held-out documents have the {needed} tokens that a question "
            "needs. Lower `eval_metrics.multiple_choice.context_tokens`, or set "
            "`eval_metrics.multiple_choice.questions` to 0."
        )
    asked = usable[: settings.questions]
    return [_question(number, usable, tokenizer, settings) for number in range(len(asked))]


def write_task(questions: Sequence[dict[str, object]], folder: Path) -> None:
    """Write the questions and their lm-eval task file into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.absolute() / f"{MULTIPLE_CHOICE_TASK}.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / f"{MULTIPLE_CHOICE_TASK}.yaml").write_text(_TASK.format(path=json.dumps(str(path))))


def _question(
    number: int, usable: Sequence[Document], tokenizer: Tokenizer, settings: MultipleChoiceSettings
) -> dict[str, object]:
    document = usable[number]
    others: list[Document] = []
    clusters = {document.cluster}
    for step in range(1, len(usable)):
        other = usable[(number + step) % len(usable)]
        if other.cluster not in clusters and len(others) < settings.choices - 1:
            others.append(other)
            clusters.add(other.cluster)
    answer = hashlib.sha256(document.id.encode()).digest()[0] % settings.choices
    choices = [_part(other, tokenizer, settings) for other in others]
    choices.insert(answer, _part(document, tokenizer, settings))
    return {
        "document": document.id,
        "cluster": document.cluster,
        "context": _text(document, tokenizer, 0, settings.context_tokens),
        "choices": choices,
        "answer": answer,
    }


def _part(document: Document, tokenizer: Tokenizer, settings: MultipleChoiceSettings) -> str:
    return _text(document, tokenizer, settings.context_tokens, settings.choice_tokens)


def _text(document: Document, tokenizer: Tokenizer, start: int, count: int) -> str:
    tokens = document.tokens[start : start + count].tolist()
    return tokenizer.decode(tokens, skip_special_tokens=True)
