"""An encoder that tells what stands behind a mask, such as a RoBERTa trained on own texts."""

import torch

from serving.engine.classifier import Classifier
from serving.engine.protocol import GenerateRequest, Refusal

MOST_LIKELY = 5
"""Tokens of an answer."""


class MaskFiller(Classifier):
    """Answers a text with one mask token by the most likely tokens in its place.

    A text without one, such as a rollout's probe, is told what comes after it.
    """

    kind = "AutoModelForMaskedLM"
    what = "This model tells what stands behind a mask; use predict."

    def encode(self, request: GenerateRequest) -> list[int] | Refusal:
        """The text's tokens, with a mask at its end where there is none, or why it is refused."""
        mask = self._tokenizer.mask_token
        if isinstance(request.prompt, str) and mask and mask not in request.prompt:
            request = request.model_copy(update={"prompt": f"{request.prompt} {mask}"})
        tokens = super().encode(request)
        if isinstance(tokens, Refusal):
            return tokens
        masks = tokens.count(self._tokenizer.mask_token_id)
        if masks != 1:
            message = f"The text has {masks} of the mask token {mask}, where one is expected."
            return Refusal(field="prompt", message=message)
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
