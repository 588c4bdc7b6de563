"""Made-up examples of every form, from which a tiny model learns something in few steps."""

import random
from typing import Any

from tests.tiny import ENDINGS, SUBJECTS, VERBS, tiny_texts


def sentences(generator: random.Random, count: int) -> list[str]:
    return [" ".join(map(generator.choice, (SUBJECTS, VERBS, ENDINGS))) + "." for _ in range(count)]


def conversations(count: int = 200) -> list[dict[str, Any]]:
    """Questions on a part of a machine; the answer follows from the part."""
    generator = random.Random(0)
    examples = []
    for number in range(count):
        part = generator.choice(SUBJECTS)
        question = f"Question {number}: {' '.join(sentences(generator, 2))} What of {part.lower()}?"
        answer = f"{part} {VERBS[SUBJECTS.index(part)]} every week, as the manual says."
        turns = [("user", question), ("assistant", answer)]
        examples.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    return examples


def instructions(count: int = 200) -> list[dict[str, Any]]:
    """The same questions as instructions, each with a report as its input."""
    generator = random.Random(4)
    made = []
    for number in range(count):
        part = generator.choice(SUBJECTS)
        answer = f"{part} {VERBS[SUBJECTS.index(part)]} every week."
        report = f"{number}. {sentences(generator, 1)[0]}"
        made.append({"instruction": f"What of {part.lower()}?", "input": report, "output": answer})
    return made


def sums(count: int = 200) -> list[dict[str, Any]]:
    """Questions in the form of GSM8K: reasons, and behind a mark the number that is asked for."""
    generator = random.Random(5)
    made = []
    for number in range(count):
        reason = sentences(generator, 1)[0]
        question = f"{number}. {reason} How many valves?"
        made.append({"question": question, "answer": f"{reason} #### 1,024"})
    return made


def preferences(count: int = 240) -> list[dict[str, Any]]:
    """Questions on a part of a machine; the part decides which of two answers is the right one."""
    generator = random.Random(3)
    made = []
    for number in range(count):
        part = generator.choice(SUBJECTS)
        right, wrong = VERBS[:2] if SUBJECTS.index(part) % 2 else VERBS[1::-1]
        said = {"chosen": f"{part} {right}.", "rejected": f"{part} {wrong}."}
        made.append({"question": f"{number}: what of {part.lower()}?"} | said)
    return made


def pairs(count: int = 200) -> list[dict[str, Any]]:
    """Sections of a manual, each with its first sentence as the summary."""
    generator = random.Random(1)
    made = []
    for number in range(count):
        found = sentences(generator, generator.randint(2, 4))
        made.append({"article": f"{number}. " + " ".join(found), "highlights": "The valve opens."})
    return made


def labeled(count: int = 240) -> list[dict[str, Any]]:
    """Reports on two parts; the part decides who repairs it."""
    generator = random.Random(2)
    made = []
    for number in range(count):
        part, team = generator.choice([("valve", "plumber"), ("motor", "electrician")])
        rest = " ".join(sentences(generator, 1))
        made.append({"report": f"{part} is broken, report {number}. {rest}", "team": team})
    return made


def answered(count: int = 200) -> list[dict[str, Any]]:
    """Questions with an answer each, in the columns of Dahoas/synthetic-instruct-gptj-pairwise."""
    turns = [[turn["content"] for turn in one["messages"]] for one in conversations(count)]
    return [{"prompt": prompt, "chosen": answer} for prompt, answer in turns]


def told_apart(count: int = 240) -> list[dict[str, Any]]:
    """The reports in columns named as most have them."""
    return [{"text": row["report"], "label": row["team"]} for row in labeled(count)]


def texts(count: int = 240) -> list[dict[str, Any]]:
    """Sections of a manual."""
    return [{"text": text} for text in tiny_texts(count)]
