"""An encoder that tells classes apart, such as a fine-tuned RoBERTa: a text in, a label out."""

import asyncio
import json
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from artifacts.errors import UserError
from serving.engine.protocol import Chunk, GenerateRequest, Refusal

DEFAULT_POSITIONS = 512


class Classifier:
    """Answers a text with its most likely class, and how likely each is."""

    fault: str | None = None

    def __init__(self, folder: Path) -> None:
        """Load the model.

        Raises:
            UserError: the folder holds no model with classes, or one that cannot be read.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.bfloat16, use_safetensors=True, trust_remote_code=False
            ).eval()
        except Exception as error:
            # Damaged files surface as errors of safetensors, json, torch or transformers alike.
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"The model in {folder} cannot be read: {first}") from error
        if not all(weight.isfinite().all() for weight in self._model.parameters()):
            raise UserError(
                f"The model in {folder} has weights that are not finite numbers: its training went "
                "wrong. Serve an earlier checkpoint."
            )
        config = self._model.config
        self._labels = [config.id2label[number] for number in range(config.num_labels)]
        # RoBERTa counts its positions from the one after the padding token's.
        offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
        positions = getattr(config, "max_position_embeddings", DEFAULT_POSITIONS)
        self._limit = positions - offset
        self._thread = ThreadPoolExecutor(1, "classifier")

    def start(self) -> None:
        """Nothing has to be started: the thread begins with its first text."""

    def encode(self, request: GenerateRequest) -> list[int] | Refusal:
        """The text's tokens, or why it cannot be classified."""
        if not isinstance(request.prompt, str):
            return Refusal(
                field="messages", message="This model tells classes of texts; use predict."
            )
        tokens = list(self._tokenizer.encode(request.prompt))
        limit = min(self._limit, request.max_prompt_tokens)
        if len(tokens) > limit:
            message = f"The text has {len(tokens)} tokens; at most {limit} fit."
            return Refusal(field="prompt", message=message)
        return tokens

    async def generate(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[Chunk, None]:
        """One piece: the label, with the probability of every class."""
        loop = asyncio.get_running_loop()
        shares = await loop.run_in_executor(self._thread, self._classify, tokens)
        scores = dict(zip(self._labels, shares, strict=True))
        yield Chunk(
            text=max(scores, key=scores.__getitem__),
            class_scores=scores,
            finish_reason="stop",
            prompt_tokens=len(tokens),
            completion_tokens=1,
        )

    @torch.inference_mode()
    def _classify(self, tokens: list[int]) -> list[float]:
        logits = self._model(torch.tensor([tokens])).logits[0].float()
        return [round(share, 6) for share in logits.softmax(dim=0).tolist()]


def is_classifier(folder: Path) -> bool:
    """Whether a folder's model tells classes apart."""
    config = json.loads((folder / "config.json").read_text())
    kind = (config.get("architectures") or [""])[0]
    return bool(kind.endswith("ForSequenceClassification"))
