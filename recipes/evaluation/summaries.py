"""ROUGE of the summaries that a model writes."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.errors import UserError
from recipes.evaluation.harness.tasks import TaskScores
from recipes.evaluation.settings import SummarySettings

ROUGE = ("rouge1", "rouge2", "rougeL")


def score_summaries(model: Any, tokenizer: Any, settings: SummarySettings) -> list[TaskScores]:
    """F-measures of ROUGE-1, -2 and -L, with stemming, one value a document.

    Raises:
        UserError: the file is absent or a line is wrong; the message names the line.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    records = read_summaries(settings)
    found = [
        scorer.score(record["summary"], _write(model, tokenizer, record["document"], settings))
        for record in records
    ]
    names = [str(number) for number in range(len(records))]
    return [
        TaskScores(
            task="summaries",
            metric=rouge,
            samples=names,
            clusters=names,
            values=np.array([score[rouge].fmeasure for score in found]),
        )
        for rouge in ROUGE
    ]


def read_summaries(settings: SummarySettings) -> list[dict[str, str]]:
    """The file's lines, up to the limit; raises UserError naming a wrong one."""
    path = Path(settings.path)
    try:
        lines = path.read_text("utf-8").splitlines()[: settings.limit]
    except FileNotFoundError as error:
        raise UserError(f"`eval_metrics.summaries.path` names {path}, which is absent.") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records.append({key: str(record[key]) for key in ("document", "summary")})
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} line {number} is not a JSON object with `document` and `summary`."
            ) from error
    if not records:
        raise UserError(f"{path} holds no summaries.")
    return records


def _write(model: Any, tokenizer: Any, document: str, settings: SummarySettings) -> str:
    import torch

    before, after = settings.prompt.split("{document}")
    text = tokenizer.encode(document, add_special_tokens=False)[: settings.document_tokens]
    prompt = [
        *tokenizer.encode(before, add_special_tokens=False),
        *text,
        *tokenizer.encode(after, add_special_tokens=False),
    ]
    tokens = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=settings.new_tokens,
            do_sample=False,
        )[0, len(prompt) :]
    return str(tokenizer.decode(written, skip_special_tokens=True))
