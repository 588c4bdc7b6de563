"""Multiple choice by this project's backend and by lm-eval's own, on the same model and questions.

The questions ask how documents of the shipped general-English text go on. Both sides run lm-eval's
task code; they differ only in how the log-likelihoods are computed.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.model import read_tokenizer
from benchmarks.harness import at_least, at_most, record
from benchmarks.models import small_model
from recipes.evaluation.documents import general_texts
from recipes.evaluation.harness import TaskScores, run_tasks, write_task
from recipes.evaluation.settings import EvaluationSettings, TaskSettings

TASK = "which_goes_on"
QUESTIONS, CHOICES = 40, 4
CONTEXT_TOKENS, CHOICE_TOKENS = 96, 24
ROUNDS = 2
PEER_BATCH = 8


def make_questions(tokenizer: Any) -> list[dict[str, Any]]:
    """How a document goes on, and how the next ones go on at the same place."""
    ends = CONTEXT_TOKENS + CHOICE_TOKENS
    long = [tokens for text in general_texts() if len(tokens := tokenizer.encode(text)) >= ends]
    beginnings = [tokenizer.decode(tokens[:CONTEXT_TOKENS]) for tokens in long]
    endings = [tokenizer.decode(tokens[CONTEXT_TOKENS:ends]) for tokens in long]
    return [
        {
            "context": beginning,
            "choices": [endings[(number + step) % len(long)] for step in range(CHOICES)],
            "answer": 0,
        }
        for number, beginning in enumerate(beginnings[:QUESTIONS])
    ]


def timed(lm: Any, folder: Path) -> tuple[float, list[TaskScores]]:
    """Questions a second, and the scores."""
    started = time.perf_counter()
    scores = run_tasks(lm, [TaskSettings(name=TASK)], [folder])
    return len(scores[0].values) / (time.perf_counter() - started), scores


def likelihoods(lm: Any, questions: list[dict[str, Any]]) -> np.ndarray:
    """Log-likelihood of every choice, shape (questions · choices,)."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance("loglikelihood", question, (question["context"], choice), number)
        for question in questions
        for number, choice in enumerate(question["choices"])
    ]
    return np.array([answer[0] for answer in lm.loglikelihood(requests, disable_tqdm=True)])


def main() -> None:
    """Ask both in turn."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from lm_eval.models.huggingface import HFLM

    from recipes.evaluation.bits import load_causal
    from recipes.evaluation.shared_context import SharedContextLM

    with tempfile.TemporaryDirectory() as scratch:
        folder = small_model(Path(scratch) / "model")
        tokenizer = read_tokenizer(folder)
        model = load_causal(folder).to(torch.bfloat16)
        questions = make_questions(tokenizer)
        write_task(TASK, questions, Path(scratch) / "tasks")
        batch = EvaluationSettings().batch_tokens
        ours = SharedContextLM(model, tokenizer, batch)
        peer = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=PEER_BATCH)
        timed(ours, Path(scratch) / "tasks")
        our_rates, peer_rates = [], []
        for _ in range(ROUNDS):
            rate, our_scores = timed(ours, Path(scratch) / "tasks")
            our_rates.append(rate)
            rate, peer_scores = timed(peer, Path(scratch) / "tasks")
            peer_rates.append(rate)
        model.float()
        few = questions[:8]
        apart = np.abs(likelihoods(ours, few) - likelihoods(peer, few)).max()
    accuracy = [
        abs(a.values.mean() - b.values.mean()) for a, b in zip(our_scores, peer_scores, strict=True)
    ]
    record(
        "evaluation",
        our_rates,
        peer_rates,
        "multiple-choice documents/s",
        "lm-eval's Hugging Face backend",
        "higher",
        ["torch", "transformers", "lm_eval"],
        {
            "speedup over lm-eval's backend": at_least(sum(our_rates) / sum(peer_rates), 1.5),
            "difference in accuracy, bfloat16": at_most(float(max(accuracy)), 1 / QUESTIONS),
            "difference in log-likelihoods, float32": at_most(float(apart), 1e-2, "nats"),
        },
    )


if __name__ == "__main__":
    main()
