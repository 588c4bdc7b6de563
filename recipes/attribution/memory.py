"""A probe of what models remember of texts, beside texts that they were never trained on.

Likelihood rank: where a text stands among the controls and itself, ordered by bits per byte, 1 the
likeliest. A text that was never trained on is as likely to have any rank as any other; one that was
learnt ranks low. It is the simplest of the membership tests compared by Carlini and others,
"Membership Inference Attacks From First Principles" (2022), and shows strong memory, not all.

Exact continuation: of the places in a text that have `PROMPT` tokens before them, the share after
which the model's most likely next `CONTINUATION` tokens are the text's own (Carlini and others,
"Quantifying Memorization Across Neural Language Models", 2023).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from artifacts.program.entry import run_program
from artifacts.progress import Report
from artifacts.shards.documents import list_documents, read_tokens
from artifacts.shards.shard_set import ShardSet
from recipes.attribution.spec import MemorySpec
from recipes.evaluation.bits import document_bits
from recipes.evaluation.documents import Document
from recipes.evaluation.models import load_model

PROMPT = 16
CONTINUATION = 8
_BATCH_TOKENS = 1_024


def measure_memory(spec: MemorySpec, report: Report) -> dict[str, Any]:
    """Measure every model.

    Returns:
        `controls` (how many), and under `models` role → text → `bits_per_byte`, `rank` and
        `exact_continuation`, which is None of a text that is too short.

    Raises:
        UserError: a model cannot be read, or the shards have no rows of a split.
    """
    shards = ShardSet(spec.shards_folder, spec.shards, *spec.splits)
    texts, controls = (_documents(shards, hashes) for hashes in (spec.texts, spec.controls))
    found = {}
    for role, folder in spec.models.items():
        report(f"What {role} remembers of {len(texts):,} texts, beside {len(controls):,} others")
        model = load_model(Path(folder))
        found[role] = _of_model(model, texts, controls, spec.shards.sequence_length, report)
    return {"controls": len(controls), "models": found}


def _documents(shards: ShardSet, hashes: Sequence[str]) -> dict[str, Document]:
    """Text hash to the document."""
    listed = list_documents(shards)
    listed = listed.filter(pc.is_in(listed["text_hash"], pa.array(hashes, pa.string())))
    return {
        row["text_hash"]: Document(row["id"], row["cluster"], row["bytes"], tokens.astype(np.int64))
        for row, tokens in zip(listed.to_pylist(), read_tokens(shards, listed), strict=True)
    }


def _of_model(
    model: Any,
    texts: dict[str, Document],
    controls: dict[str, Document],
    sequence_length: int,
    report: Report,
) -> dict[str, dict[str, float | int | None]]:
    documents = [*texts.values(), *controls.values()]
    bits = document_bits(model, documents, sequence_length, _BATCH_TOKENS, report)
    per_byte = bits / np.array([document.bytes for document in documents])
    beside = per_byte[len(texts) :]
    return {
        text: {
            "bits_per_byte": float(value),
            "rank": 1 + int((beside < value).sum()),
            "exact_continuation": exact_continuation(model, document.tokens, sequence_length),
        }
        for (text, document), value in zip(texts.items(), per_byte, strict=False)
    }


@torch.inference_mode()
def exact_continuation(model: Any, tokens: np.ndarray, sequence_length: int) -> float | None:
    """The share of places whose next `CONTINUATION` tokens the model writes as the text has them.

    One pass over each stretch of `sequence_length` tokens is enough: greedy writing follows the
    text exactly where each of its tokens is the most likely one after those before it.
    """
    told: list[bool] = []
    for start in range(0, len(tokens), sequence_length):
        part = torch.from_numpy(tokens[start : start + sequence_length])[None]
        part = part.to(next(model.parameters()).device)
        if part.shape[1] < PROMPT + CONTINUATION:
            continue
        likeliest = model(input_ids=part, use_cache=False).logits[0, :-1].argmax(dim=-1)
        right = (likeliest == part[0, 1:]).cpu().numpy()[PROMPT - 1 :]
        whole = right[: len(right) // CONTINUATION * CONTINUATION].reshape(-1, CONTINUATION)
        told += whole.all(axis=1).tolist()
    return float(np.mean(told)) if told else None


if __name__ == "__main__":
    sys.exit(run_program(MemorySpec, measure_memory))
