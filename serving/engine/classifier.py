"""An encoder that tells classes apart, such as a fine-tuned RoBERTa: a text in, a label out."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

from serving.engine.protocol import Chunk, GenerateRequest, Refusal
from serving.engine.served_model import read_tokenizer, read_weights

DEFAULT_POSITIONS = 512


class Classifier:
    """Answers a text with its most likely class, and how likely each is."""

    fault: str | None = None
    kind = "AutoModelForSequenceClassification"
    what = "This model tells classes of texts; use predict."

    def __init__(self, folder: Path) -> None:
        """Load the model.

        Raises:
            UserError: the folder holds no model of this kind, or one that cannot be read.
        """
        self._tokenizer = read_tokenizer(folder)
        self._model = read_weights(folder, getattr(transformers, self.kind), dtype=torch.bfloat16)
        config = self._model.config
        # RoBERTa counts its positions from the one after the padding token's.
        offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
        positions = getattr(config, "max_position_embeddings", DEFAULT_POSITIONS)
        self._limit = positions - offset
        self._thread = ThreadPoolExecutor(1, "classifier")

    def start(self) -> None:
        """Nothing has to be started: the thread begins with its first text."""

    def encode(self, request: GenerateRequest) -> list[int] | Refusal:
        """The text's tokens, or why it cannot be answered."""
        if not isinstance(request.prompt, str):
            return Refusal(field="messages", message=self.what)
        tokens = list(self._tokenizer.encode(request.prompt))
        limit = min(self._limit, request.max_prompt_tokens)
        if len(tokens) > limit:
            message = f"The text has {len(tokens)} tokens; at most {limit} fit."
            return Refusal(field="prompt", message=message)
        return tokens

    async def generate(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[Chunk, None]:
        """One piece: the label, with the probability of every one."""
        loop = asyncio.get_running_loop()
        scores = await loop.run_in_executor(self._thread, self._scores, tokens)
        yield Chunk(
            text=max(scores, key=scores.__getitem__),
            class_scores=scores,
            finish_reason="stop",
            prompt_tokens=len(tokens),
            completion_tokens=1,
        )

    @torch.inference_mode()
    def _scores(self, tokens: list[int]) -> dict[str, float]:
        logits = self._model(torch.tensor([tokens])).logits[0].float()
        labels = self._model.config.id2label
        return {labels[n]: round(share, 6) for n, share in enumerate(logits.softmax(0).tolist())}
