"""Loading the models to measure, and letting them write a little."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artifacts.errors import UserError
from artifacts.model.hugging_face import read_model
from recipes.device import device_of, local_device
from recipes.evaluation.documents import Document
from recipes.evaluation.settings import GenerationSettings
from recipes.settings.sections import Precision


def precision() -> Precision:
    """The arithmetic that this machine does fast."""
    return device_of(local_device()).precision()


def load_model(folder: Path) -> Any:
    """A causal language model with float32 weights, ready to be asked; raises UserError."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face model folder: it has no config.json.")
    return read_model(folder, AutoModelForCausalLM, dtype=torch.float32).to(local_device())


def as_served(model: Any) -> Any:
    """Turn a model's weights into bfloat16 where that is fast, as the endpoint has them."""
    return model.to(torch.bfloat16) if precision() == "bfloat16" else model


@torch.inference_mode()
def complete(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    settings: GenerationSettings,
) -> list[dict[str, str]]:
    """Continue the documents' first tokens, each time by the most likely one.

    Returns:
        One dict a document: `document`, `prompt`, `completion`.
    """
    samples = []
    for document in documents:
        beginning = document.tokens[: settings.prompt_tokens]
        if document.is_target is not None:
            # Of a conversation, all that comes before the first answer.
            beginning = document.tokens[: int(np.argmax(document.is_target))]
        prompt = torch.from_numpy(beginning)[None].to(local_device())
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=settings.new_tokens,
            do_sample=False,
        )[0, prompt.shape[1] :]
        samples.append(
            {
                "document": document.id,
                "prompt": tokenizer.decode(prompt[0], skip_special_tokens=True),
                "completion": tokenizer.decode(written, skip_special_tokens=True),
            }
        )
    return samples
