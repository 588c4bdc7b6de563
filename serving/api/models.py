"""The models by name: the pipeline's, which stays, and the versions that serve."""

from typing import Any

from serving.api.dispatcher import Answer, Dispatcher, Stream
from serving.api.errors import ServingError
from serving.api.guard import ApiContext
from serving.engine.protocol import Chunk


def model_names(dispatcher: Dispatcher) -> list[str]:
    """The pipeline's name, which stays, and the versions that have traffic."""
    serving = [route.engine.desired for route in dispatcher.router.routes if route.share > 0]
    names = [desired.name for desired in serving] + [desired.version for desired in serving]
    return list(dict.fromkeys(names))


def model_body(context: ApiContext, name: str) -> dict[str, Any]:
    """A model as OpenAI lists it."""
    return {"id": name, "object": "model", "created": context.started, "owned_by": "llm-assets"}


def check_model(dispatcher: Dispatcher, model: str | None) -> None:
    """The model name may be left out, `default`, the pipeline's, or a version that has traffic."""
    if model not in (None, "default", *model_names(dispatcher)):
        raise ServingError(404, f"There is no model {model!r} here.", "model_not_found", "model")


def model_fields(asked: str | None, answer: Answer | Stream) -> dict[str, Any]:
    """The model as it was asked for, and which version of it answered."""
    model = asked if asked not in (None, "default") else answer.version
    return {"model": model, "system_fingerprint": f"{answer.version}-{answer.fingerprint}"}


def usage_of(ends: list[Chunk], choices: int = 1) -> dict[str, int]:
    """Tokens of prompts, each with so many answers in a row, and of the answers."""
    prompt = sum(end.prompt_tokens for end in ends[::choices])
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
