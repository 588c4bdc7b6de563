"""Which engine runs a model here, and why."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.cache import cache_key, cached_folder
from artifacts.errors import UserError
from artifacts.model_folder import context_tokens, read_config
from artifacts.storage.checksums import sha256_of
from serving.engine.classifier import Classifier
from serving.engine.mask_filler import MaskFiller
from serving.engine.memory import check_memory
from serving.engine.served_model import ServedModel
from serving.settings import QUANTIZED, EndpointSettings, Engine

REFUSAL_NAME = "unsupported.txt"
"""In place of a converted model: why there is none, lest every start try again."""
LIBRARIES = ("nncf", "openvino", "openvino-genai", "safetensors", "torch", "transformers")
ENCODERS = {"ForSequenceClassification": Classifier, "ForMaskedLM": MaskFiller}
"""The end of an architecture's name to what answers with such a model."""
WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_chunk_size")


@dataclass(frozen=True)
class Choice:
    """An engine for one model."""

    engine: Engine
    reason: str
    """The engine's name, and why it is that one where another was thinkable."""
    converted: Path | None = None
    """The model in OpenVINO's form."""
    converted_now: bool = False


def choose_engine(folder: Path, settings: EndpointSettings, conversions: Path) -> Choice:
    """Decide by the settings and the model's architecture, and convert the model if need be.

    Args:
        folder: a Hugging Face folder that `check_model_folder` accepts.
        conversions: where converted models are cached.

    Raises:
        UserError: the engine that is asked for does not run this model, or memory does not hold
            what is asked of it.
    """
    if settings.engine == "transformers":
        return Choice("transformers", "transformers")
    if _encoder(folder):
        obstacle: str | None = "it is an encoder"
    else:
        obstacle = _obstacle(read_config(folder), settings)
    if obstacle is None:
        check_memory(folder, read_config(folder), settings)
        made: list[Path] = []

        def make(target: Path) -> None:
            made.append(target)
            _convert(folder, target, settings)

        converted = cached_folder(conversions, conversion_key(folder, settings), make)
        refusal = converted / REFUSAL_NAME
        if not refusal.exists():
            return Choice("openvino", "openvino", converted, bool(made))
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
    return Choice("transformers", f"transformers, since openvino does not run it: {obstacle}")


def load_model(
    folder: Path, settings: EndpointSettings, choice: Choice
) -> ServedModel | Classifier:
    """Load a model into the chosen engine and start it; raises UserError where it is no good."""
    model: ServedModel | Classifier
    if encoder := _encoder(folder):
        model = encoder(folder)
    elif choice.converted is not None:
        from serving.engine.openvino_model import OpenVinoModel

        model = OpenVinoModel(folder, choice.converted, settings)
    else:
        from serving.engine.transformers_model import TransformersModel

        model = TransformersModel(folder, settings)
    model.start()
    return model


def conversion_key(folder: Path, settings: EndpointSettings) -> str:
    """The cache's key of a converted model: what it is made of, by what, and how."""
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    content = {file.name: sha256_of(str(file)) for file in files}
    return cache_key(
        "serving.engine.conversion", LIBRARIES, model=content, weights=settings.weights
    )


def _encoder(folder: Path) -> type[Classifier] | None:
    architecture = (read_config(folder).get("architectures") or [""])[0]
    return next((ENCODERS[head] for head in ENCODERS if architecture.endswith(head)), None)


def _obstacle(config: dict[str, Any], settings: EndpointSettings) -> str | None:
    """Why the model is not even to be converted."""
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


def _convert(folder: Path, target: Path, settings: EndpointSettings) -> None:
    try:
        from serving.engine.conversion import convert_model
        from serving.engine.pipeline import Unsupported
    except ImportError as error:
        (target / REFUSAL_NAME).write_text(f"it is not installed here ({error})")
        return
    try:
        convert_model(folder, target, settings.weights)
    except Unsupported as error:
        for file in target.iterdir():
            file.unlink()
        (target / REFUSAL_NAME).write_text(str(error))
