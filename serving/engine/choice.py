"""Which engine runs a model here, and why."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from artifacts.cache import cache_key, cached_folder, cached_sha256
from artifacts.errors import UserError
from artifacts.model.folder import bytes_per_token, context_tokens, read_config
from artifacts.model.hugging_face import read_tokenizer
from artifacts.reasons import memory_limit
from serving.engine.served_model import AnyModel
from serving.engine.tokenizer import ServedTokenizer
from serving.settings import QUANTIZED, EndpointSettings

REFUSAL_NAME = "unsupported.txt"
"""In place of a converted model: why there is none, lest every start try again."""
LIBRARIES = (
    *("nncf", "openvino", "openvino-genai", "safetensors"),
    *("tokenizers", "torch", "transformers"),
)
CLASSIFIER, MASK_FILLER = "ForSequenceClassification", "ForMaskedLM"
"""The ends of encoders' architectures."""
WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_chunk_size")


@dataclass(frozen=True)
class Choice:
    """An engine for one model."""

    reason: str
    """The engine's name, and why it is that one where another was thinkable."""
    converted: Path | None = None
    """The model in OpenVINO's form, where OpenVINO runs it."""


def choose_engine(folder: Path, settings: EndpointSettings, conversions: Path) -> Choice:
    """Decide by the settings and the model's architecture, and convert the model if need be.

    Args:
        folder: a Hugging Face folder that `check_model_folder` accepts.
        conversions: where converted models are cached.

    Raises:
        UserError: the engine that is asked for does not run this model, or memory does not hold
            what is asked of it.
    """
    config = read_config(folder)
    obstacle = _obstacle(config, settings)
    if obstacle is None:
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
    asked = settings.engine == "transformers"
    since = "" if asked else f", since openvino does not run it: {obstacle}"
    return Choice(f"transformers{since}")


def load_model(folder: Path, settings: EndpointSettings, choice: Choice) -> AnyModel:
    """Load a model into the chosen engine; raises UserError where it is no good.

    Each is imported where it serves: beside OpenVINO, torch would be most of the start.
    """
    architecture = _architecture(read_config(folder))
    if architecture.endswith((CLASSIFIER, MASK_FILLER)):
        from serving.engine.encoders import Classifier, MaskFiller

        return Classifier(folder) if architecture.endswith(CLASSIFIER) else MaskFiller(folder)
    if choice.converted is not None:
        from serving.engine.openvino_model import OpenVinoModel

        return OpenVinoModel(folder, choice.converted, settings)
    from serving.engine.transformers_model import TransformersModel

    return TransformersModel(folder, settings)


def conversion_key(folder: Path, settings: EndpointSettings, conversions: Path) -> str:
    """The cache's key of a converted model: what it is made of, by what, and how."""
    content = {
        file.name: cached_sha256(conversions, file)
        for file in sorted(folder.iterdir())
        if file.suffix in (".safetensors", ".json", ".jinja")
    }
    return cache_key(
        "serving.engine.conversion", LIBRARIES, model=content, weights=settings.weights
    )


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
    if config.get("use_sliding_window", True):
        windows = [config[name] for name in WINDOWS if isinstance(config.get(name), int)]
        positions = context_tokens(config) or settings.cache_tokens
        context = min(positions, settings.max_prompt_tokens + settings.max_new_tokens)
        if windows and min(windows) < context:
            return (
                f"its attention sees {min(windows)} tokens back, and `endpoint.max_prompt_tokens` "
                f"and `endpoint.max_new_tokens` allow {context} together"
            )
    return None


def _convert(folder: Path, settings: EndpointSettings, target: Path) -> None:
    try:
        from serving.engine.conversion import convert_model
        from serving.engine.pipeline import Unsupported
    except ImportError as error:
        (target / REFUSAL_NAME).write_text(f"it is not installed here ({error})")
        return
    try:
        convert_model(folder, target, settings.weights)
        ServedTokenizer.of(read_tokenizer(folder)).write(target)
    except Unsupported as error:
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
    needed, left = token_bytes * settings.cache_tokens, max(memory_limit() - weights, 0)
    if needed > left:
        raise UserError(
            f"`endpoint.cache_tokens` is {settings.cache_tokens:,}: their keys and values take "
            f"{needed / 1e9:,.1f} GB, and beside the weights ({weights / 1e9:,.1f} GB) this "
            f"machine has {left / 1e9:,.1f} GB. Set at most {left // token_bytes:,}."
        )
