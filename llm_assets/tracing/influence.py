"""The documents that taught a version an answer, as its gradients say."""

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from artifacts.errors import UserError
from artifacts.shards.documents import tokens_of
from artifacts.store import layout
from artifacts.store.store import Store
from llm_assets.runners.child_process import ask_program
from llm_assets.tracing.nearest import Nearby, find_nearest
from llm_assets.tracing.training_text import TrainingText
from recipes.attribution.spec import InfluenceSpec
from recipes.spec import MODEL_FOLDER, SPEC_NAME, TrainingSpec

CANDIDATES = 32
"""Documents that are ranked, those nearest to prompt and answer by BM25: each takes a pass through
the model and back."""
MOST_TOKENS = 512
"""Of a document, and of prompt and answer, that are read."""


def find_influential(text: TrainingText, prompt: str, answer: str, count: int) -> list[Nearby]:
    """Of the documents nearest to prompt and answer, those of the most influence, best first.

    Raises:
        UserError: the answer is one token, so there is nothing to explain, or the program failed.
        MissingArtifact: the version's weights were removed.
    """
    given, said = (
        text.tokenizer.encode(one, add_special_tokens=False).ids for one in (prompt, answer)
    )
    if len(given) + len(said) < 2:
        raise UserError("A single token has no influence to measure: give more of the answer.")
    sought = np.asarray([*given, *said], np.int64)
    near = find_nearest(text.shards, sought, text.texts, CANDIDATES)
    if not near:
        return []
    documents = [tokens_of(one.shard.shard, np.array([one.document]))[0] for one in near]
    spec = InfluenceSpec(
        models=weights_of(text.artifacts[0].store, text.version.model_fingerprint),
        prompt=given[-MOST_TOKENS // 2 :],
        answer=said[: MOST_TOKENS // 2],
        documents=[tokens[:MOST_TOKENS].tolist() for tokens in documents],
    )
    scores = ask_program("recipes.attribution.influence", spec, "The ranking by influence")[
        "influence"
    ]
    ranked = [
        Nearby(one.shard, one.document, score) for one, score in zip(near, scores, strict=True)
    ]
    return sorted(ranked, key=lambda one: -one.score)[:count]


def weights_of(store: Store, checkpoint: str) -> list[str]:
    """Folders of what a run started from, where that is still there, and of what it came to."""
    own = store.load("checkpoint", checkpoint).path / MODEL_FOLDER
    content = store.read_bytes(f"{layout.run(checkpoint)}/{SPEC_NAME}")
    try:
        start = TrainingSpec.model_validate_json(content or b"").base_model_folder
    except ValidationError:
        return [str(own)]
    return [start, str(own)] if Path(start, "config.json").exists() else [str(own)]
