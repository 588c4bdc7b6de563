"""What a generator is asked to write about a passage.

The first seven follow the strategies of SPA (arXiv 2603.22213), which found that seven fixed
prompts teach as much as prompts made for each document: concepts, critical thinking, and writing
of one's own.
"""

from typing import Literal, get_args

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
    "in every sentence, since nobody will have the text at hand. Give only what was asked for."
)
PROMPTS: dict[PromptName, str] = {name: f"{task} {_RULES}" for name, task in _TASKS.items()}
"""Name to instruction, which is followed by the passage."""

assert set(PROMPTS) == set(get_args(PromptName))
