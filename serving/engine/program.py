"""The engine: chooses what runs a model here, loads it, and answers its API server's calls.

Started by the API server as `python -m serving.engine.program --model FOLDER …`, with its end of
their channel as an inherited descriptor, on which it answers once the model is loaded. It does not
outlive its API server, but for the seconds in which what a command has started is asked to end.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from artifacts.cache import cache_key, cached_folder, cached_sha256
from artifacts.errors import UserError, install_advice
from artifacts.model import (
    attention_window,
    bytes_per_token,
    context_tokens,
    read_config,
    read_tokenizer,
)
from artifacts.program.lifetime import end_descendants, end_descendants_first, end_with_parent
from artifacts.reasons import memory_limit
from serving.engine.served_model import AnyModel, ServedTokenizer, answer_calls
from serving.settings import QUANTIZED, SAVED, EndpointSettings, OpenAIEngine

CONVERTED_VARIABLE = "MODEL_CONVERTED"
REFUSAL_NAME = "unsupported.txt"
"""In place of a converted model: why there is none, lest every start try again."""
# Another release of one of them may convert a model differently, so their versions are part of a
# converted model's key.
LIBRARIES = (
    *("nncf", "openvino", "openvino-genai", "safetensors"),
    *("tokenizers", "torch", "transformers"),
)
CLASSIFIER, MASK_FILLER = "ForSequenceClassification", "ForMaskedLM"
"""The ends of encoders' architectures."""


def main() -> int:
    """Load, then answer calls until the API server goes away; exit code 1 where nothing loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    read_settings = partial(EndpointSettings.model_validate_json, context=SAVED)
    parser.add_argument("--settings", type=read_settings, required=True)
    parser.add_argument("--conversions", type=Path, required=True)
    parser.add_argument("--channel", type=int, required=True)
    arguments = parser.parse_args()
    engine = arguments.settings.engine
    has_command = isinstance(engine, OpenAIEngine) and bool(engine.command)
    if has_command:
        # What it starts, such as a container, is first asked to end.
        end_with_parent(signal.SIGTERM)
        end_descendants_first(arguments.channel)
    else:
        end_with_parent(signal.SIGKILL)
    try:
        choice = choose_engine(arguments.model, arguments.settings, arguments.conversions)
        # The variable makes sure that it begins again only once, even if torch is imported then,
        # too. It is this program's alone: a program that a command starts begins again for itself.
        is_again = os.environ.pop(CONVERTED_VARIABLE, None)
        if choice.converted and "torch" in sys.modules and not is_again:
            # It was converted just now: beginning again gives back the memory that this took, up to
            # 2.5 GB for 135M parameters.
            os.environ[CONVERTED_VARIABLE] = "1"
            os.execv(sys.executable, sys.orig_argv)  # noqa: S606
        model = load_model(arguments.model, arguments.settings, choice)
    except UserError as error:
        print(error, file=sys.stderr)
        if has_command:
            os.close(arguments.channel)
            end_descendants()
        return 1
    asyncio.run(_serve(model, socket.socket(fileno=arguments.channel), choice.reason))
    return 0


async def _serve(model: AnyModel, end: socket.socket, reason: str) -> None:
    with suppress(OSError):
        await answer_calls(model, end, reason)
    # It ends as it would at the API server's request, which may be coming at this moment.
    signal.raise_signal(signal.SIGTERM)
    # SIGTERM may be ignored here, by inheritance, and then the threads that compute would go on.
    os._exit(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Choice:
    """An engine for one model."""

    reason: str
    """The engine's name, and why it is that one where another was thinkable."""
    converted: Path | None = None
    """The model in OpenVINO's form, where OpenVINO runs it; for another server, its tokenizer."""


def choose_engine(folder: Path, settings: EndpointSettings, conversions: Path) -> Choice:
    """Decide by the settings and the model's architecture, and convert the model if need be.

    Args:
        folder: a Hugging Face folder that `check_model_folder` accepts.
        conversions: where converted models are cached.

    Raises:
        UserError: the engine that is asked for does not run this model, or memory does not hold
            what is asked of it.
    """
    if isinstance(settings.engine, OpenAIEngine):
        key = cache_key(
            "tokenizer",
            "serving.engine.served_model",
            ("tokenizers", "transformers"),
            folder=_checksums(folder, conversions, ".json", ".jinja", ".model", ".txt"),
        )
        written = cached_folder(
            conversions, key, lambda place: ServedTokenizer.of(read_tokenizer(folder)).write(place)
        )
        return Choice(next(iter(settings.engine.command), settings.engine.address), written)
    config = read_config(folder)
    obstacle = _obstacle(config, settings)
    if obstacle is None:
        # Before the model is converted, which is the slow part of a first start.
        _check_memory(folder, config, settings)
        make = partial(_convert, folder, settings)
        converted = cached_folder(conversions, conversion_key(folder, settings, conversions), make)
        refusal = converted / REFUSAL_NAME
        if not refusal.exists():
            return Choice("openvino", converted)
        obstacle = refusal.read_text()
    if settings.engine == "openvino":
        raise UserError(
            f"`endpoint.engine` is openvino, which does not run the model in {folder}: {obstacle}. "
            "Leave the setting out, and transformers serves it."
        )
    if settings.weights in QUANTIZED:
        raise UserError(
            f"`endpoint.weights` is {settings.weights}, which openvino alone has, and it "
            f"does not run the model in {folder}: {obstacle}. Set bf16, and transformers serves it."
        )
    is_asked = settings.engine == "transformers"
    since = "" if is_asked else f", since openvino does not run it: {obstacle}"
    return Choice(f"transformers{since}")


def load_model(folder: Path, settings: EndpointSettings, choice: Choice) -> AnyModel:
    """Load a model into the chosen engine; raises UserError where it is no good.

    Each is imported where it serves: beside others, torch would be most of the start.
    """
    if isinstance(settings.engine, OpenAIEngine):
        from serving.engine.openai_model import OpenAIModel

        assert choice.converted is not None
        return OpenAIModel(folder, choice.converted, settings.engine)
    architecture = _architecture(read_config(folder))
    if architecture.endswith((CLASSIFIER, MASK_FILLER)):
        from serving.engine.transformers_model import Classifier, MaskFiller

        kind = Classifier if architecture.endswith(CLASSIFIER) else MaskFiller
        return kind(folder, settings)
    if choice.converted is not None:
        from serving.engine.openvino_model import OpenVinoModel

        return OpenVinoModel(folder, choice.converted, settings)
    from serving.engine.transformers_model import TransformersModel

    return TransformersModel(folder, settings)


def conversion_key(folder: Path, settings: EndpointSettings, conversions: Path) -> str:
    """The cache's key of a converted model: what it is made of, by what, and how."""
    return cache_key(
        "converted model",
        "serving.engine.conversion",
        LIBRARIES,
        model=_checksums(folder, conversions, ".safetensors", ".json", ".jinja"),
        weights=settings.weights,
    )


def _checksums(folder: Path, conversions: Path, *suffixes: str) -> dict[str, str]:
    """Of a folder's files with one of these suffixes."""
    found = (file for file in sorted(folder.iterdir()) if file.suffix in suffixes)
    return {file.name: cached_sha256(conversions, file) for file in found}


def _architecture(config: dict[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])


def _obstacle(config: dict[str, Any], settings: EndpointSettings) -> str | None:
    """Why the model is not even to be converted."""
    if settings.engine == "transformers":
        return "`endpoint.engine` is transformers"
    if _architecture(config).endswith((CLASSIFIER, MASK_FILLER)):
        return "it is an encoder"
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder"
    positions = context_tokens(config) or settings.cache_tokens
    context = min(positions, settings.max_prompt_tokens + settings.max_new_tokens)
    window = attention_window(config)
    if window is not None and window < context:
        return (
            f"its attention sees {window} tokens back, and `endpoint.max_prompt_tokens` "
            f"and `endpoint.max_new_tokens` allow {context} together"
        )
    return None


def _convert(folder: Path, settings: EndpointSettings, target: Path) -> None:
    try:
        from serving.engine.conversion import convert_model
        from serving.engine.openvino_model import Unsupported
    except ImportError as error:
        absent = install_advice(error.name or "") or f"it is not installed here ({error})"
        (target / REFUSAL_NAME).write_text(absent)
        return
    try:
        convert_model(folder, target, settings.weights)
        ServedTokenizer.of(read_tokenizer(folder)).write(target)
    except Unsupported as error:
        # No part of a model stays beside the refusal.
        for file in target.iterdir():
            file.unlink()
        (target / REFUSAL_NAME).write_text(str(error))


def _check_memory(folder: Path, config: dict[str, Any], settings: EndpointSettings) -> None:
    """Whether keys and values of as many tokens as are asked for fit beside the weights as stored.

    Where the model's `config` does not say how much one token takes, nothing is compared.

    Raises:
        UserError: they do not; the message says how many tokens do.
    """
    token_bytes = bytes_per_token(config, 4 if settings.weights == "f32" else 2)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    needed_bytes, free_bytes = token_bytes * settings.cache_tokens, max(memory_limit() - weights, 0)
    if needed_bytes > free_bytes:
        raise UserError(
            f"`endpoint.cache_tokens` is {settings.cache_tokens:,}: their keys and values take "
            f"{needed_bytes / 1e9:,.1f} GB, and beside the weights ({weights / 1e9:,.1f} GB) this "
            f"machine has {free_bytes / 1e9:,.1f} GB. Set at most {free_bytes // token_bytes:,}."
        )


if __name__ == "__main__":
    sys.exit(main())
