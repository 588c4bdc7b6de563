"""Encoders, such as a fine-tuned RoBERTa: which class a text is, or what stands behind a mask."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

from artifacts.model.hugging_face import read_tokenizer
from serving.engine.protocol import Chunk, GenerateRequest, Refused
from serving.engine.served_model import read_weights

DEFAULT_POSITIONS = 512
MOST_LIKELY = 5
"""Tokens of a mask filler's answer."""


class Classifier:
    """Answers a text with its most likely class, and how likely each is."""

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

    def encode(self, request: GenerateRequest) -> list[int]:
        """The text's tokens; raises Refused where it cannot be answered."""
        if not isinstance(request.prompt, str):
            raise Refused(self.what, "messages")
        tokens = list(self._tokenizer.encode(request.prompt))
        limit = min(self._limit, request.max_prompt_tokens)
        if len(tokens) > limit:
            raise Refused(f"The text has {len(tokens)} tokens; at most {limit} fit.", "prompt")
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


class MaskFiller(Classifier):
    """Answers a text with one mask token by the most likely tokens in its place.

    A text without one, such as a rollout's probe, is told what comes after it.
    """

    kind = "AutoModelForMaskedLM"
    what = "This model tells what stands behind a mask; use predict."

    def encode(self, request: GenerateRequest) -> list[int]:
        """The text's tokens, with a mask at its end where there is none; raises Refused."""
        mask = self._tokenizer.mask_token
        if isinstance(request.prompt, str) and mask and mask not in request.prompt:
            request = request.model_copy(update={"prompt": f"{request.prompt} {mask}"})
        tokens = super().encode(request)
        masks = tokens.count(self._tokenizer.mask_token_id)
        if masks != 1:
            text = f"The text has {masks} of the mask token {mask}, where one is expected."
            raise Refused(text, "prompt")
        return tokens

    @torch.inference_mode()
    def _scores(self, tokens: list[int]) -> dict[str, float]:
        logits = self._model(torch.tensor([tokens])).logits[0].float()
        place = tokens.index(self._tokenizer.mask_token_id)
        best = logits[place].softmax(dim=0).topk(MOST_LIKELY)
        scores: dict[str, float] = {}
        for token, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            # Tokens that are parts of a character read alike.
            text = self._tokenizer.decode([token])
            scores[text] = round(scores.get(text, 0.0) + share, 6)
        return scores
