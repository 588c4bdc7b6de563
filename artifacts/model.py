"""Hugging Face folders: what they say of a model before it is loaded, and how they are read.

Only safetensors are read, and no code of a folder is run. transformers 5 writes a tokenizer's class
and a model's rotary embedding under new names. Version 4 refuses the one and takes the default for
the other without a word: another model. Version 5 reads both forms (its migration guide, and
`standardize_rope_params` of its configurations), so what is written here has both.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictInt, ValidationError, create_model

from artifacts.errors import UserError, first_line
from artifacts.settings import first_fault
from artifacts.storage import files

TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Class as transformers 5 names it, to its name in both versions."""


def write_older_names(folder: Path) -> None:
    """Add to a folder's `config.json` and `tokenizer_config.json` what transformers 4 looks for."""
    for name, older in (("config.json", older_config), ("tokenizer_config.json", older_tokenizer)):
        if (path := folder / name).exists():
            before = json.loads(path.read_text())
            after = older(before)
            if after != before:
                path.write_text(json.dumps(after, indent=2))


def older_config(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config with its rotary embedding and precision under their older names as well.

    Embeddings that differ between kinds of layers stay as they are.
    """
    names: dict[str, Any] = {}
    if "dtype" in config:
        names["torch_dtype"] = config["dtype"]
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        names["rope_theta"] = rope["rope_theta"]
        # Version 4 keeps the base frequency apart from the scaling.
        if rope.get("rope_type", "default") != "default":
            names["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        if "partial_rotary_factor" in rope:
            names["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return config | names


def older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's config whose class and special tokens both versions know."""
    changed = dict(config)
    class_name = str(config.get("tokenizer_class"))
    if class_name in TOKENIZER_CLASSES:
        changed["tokenizer_class"] = TOKENIZER_CLASSES[class_name]
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):
        changed["additional_special_tokens"] = extra
        del changed["extra_special_tokens"]
    return changed


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each of the 256 byte values, as GPT-2's encoder
    does."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, next_letter = [], 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(next_letter))
            next_letter += 1
    return letters


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_config.json"
GENERATION_NAME = "generation_config.json"
TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
INPUT_PREFIX = "input_prefix"
"""Key of a generation config beside transformers' own: what stands before each input of the task
that the model was taught, as `max_new_tokens` there is how long its targets may be."""
SERVED = re.compile(
    "CausalLM|LMHeadModel|ConditionalGeneration|MTModel|SequenceClassification|MaskedLM"
)
"""Found in the name of every architecture that some engine serves."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_model_folder(folder: Path) -> None:
    """Raise UserError for a folder that holds no whole language model in safetensors; the message
    names the file."""
    config = own_config(folder)
    for name in config.get("architectures") or []:
        if not SERVED.search(name):
            raise UserError(
                f"{folder} holds a {name}, which does not generate text: language models, "
                "encoder-decoders with a language head, and encoders with a head for classes or "
                "for masked tokens are served."
            )
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json: it is not a whole model folder.")
    weight_files(folder)


def own_config(folder: Path) -> dict[str, Any]:
    """The model's config as JSON; raises UserError where it is absent, belongs to an adapter, or
    wants code of its own, and where it or another file that is read with it is damaged."""
    if (folder / ADAPTER_NAME).is_file() and not (folder / CONFIG_NAME).is_file():
        raise UserError(
            f"{folder} holds an adapter alone ({ADAPTER_NAME}). Take the folder `model` beside it, "
            "into which training has merged it, or merge it into the model that it belongs to, "
            "with PEFT's merge_and_unload and save_pretrained."
        )
    config = _read_json(folder / CONFIG_NAME)
    # These two files are read for their faults alone.
    read_generation_config(folder)
    if (folder / TOKENIZER_CONFIG_NAME).exists():
        _read_json(folder / TOKENIZER_CONFIG_NAME)
    if "auto_map" in config:
        raise UserError(
            f"{folder / CONFIG_NAME} asks for remote code (`auto_map`), which is never run. Choose "
            "a model whose architecture transformers has built in."
        )
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model; raises UserError where one is absent or cut, or there are
    none, as where the weights are pickled, which are never read."""
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if (folder / INDEX).is_file():
        shard_names = (_read_json(folder / INDEX).get("weight_map") or {}).values()
        paths = [folder / name for name in sorted(set(shard_names))]
        absent = [path for path in paths if not path.is_file()]
        if paths and not absent:
            return [*map(_whole, paths)]
        # If all of them are absent and there are pickles, the message below is more helpful.
        if absent and (absent != paths or not any(folder.glob("pytorch_model*.bin"))):
            raise UserError(f"{absent[0]} is absent, though {INDEX} lists it.")
    elif (folder / WEIGHTS).is_file():
        return [_whole(folder / WEIGHTS)]
    if not pickled:
        raise UserError(f"{folder} has no {WEIGHTS}: it is not a whole model folder.")
    names = ", ".join(pickled if len(pickled) < 4 else [pickled[0], "...", pickled[-1]])
    architecture = str((own_config(folder).get("architectures") or ["AutoModel"])[0])
    # It becomes part of a command that the user may run, and the folder may be from anybody.
    architecture = architecture if architecture.isidentifier() else "AutoModel"
    raise UserError(
        f"{folder} holds only pickled weights ({names}); safetensors are needed, since pickles can "
        "run code. This reads them as plain numbers, which runs none of it, and writes "
        f'safetensors beside them: python -c "from transformers import {architecture} as M; '
        f"M.from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')\""
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config as JSON, with what its generation config says over it."""
    return _read_json(folder / CONFIG_NAME) | read_generation_config(folder)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """How the model writes, as JSON; empty where its folder does not say."""
    file = folder / GENERATION_NAME
    return _read_json(file) if file.is_file() else {}


def end_tokens_of(config: dict[str, Any]) -> list[int]:
    """The tokens that end an answer; none where the model names none."""
    ends = config.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""How the families' configs call the number of positions."""
DISTANCES_KEY = "relative_attention_num_buckets"
"""In the config of T5 and its like, which have distances in place of positions; their `n_positions`
bounds nothing."""
COUNTED_FROM_PADDING = (
    "roberta",
    "camembert",
    "data2vec-text",
    "ibert",
    "longformer",
    "luke",
    "mpnet",
    "xmod",
)
"""In the `model_type` of families that count positions from the one after the padding token's."""


def first_position(config: dict[str, Any]) -> int:
    """The number of a text's first position; 514 positions of RoBERTa hold 512 tokens."""
    kind = str(config.get("model_type"))
    counts = any(family in kind for family in COUNTED_FROM_PADDING)
    # 1 is what these families' configs mean where they do not say.
    return (config.get("pad_token_id", 1) or 0) + 1 if counts else 0


def context_tokens(config: dict[str, Any]) -> int | None:
    """Most tokens that a model's positions allow; None where its config names no limit."""
    unbounded = {"n_positions"} if DISTANCES_KEY in config else set()
    limits = (config[key] for key in POSITION_KEYS if config.get(key) and key not in unbounded)
    return next((int(count) - first_position(config) for count in limits), None)


WINDOW_KEYS = ("sliding_window", "window_size", "attention_window", "attention_chunk_size")
"""How the families' configs call the number of tokens that an attention looks back."""


def attention_window(config: dict[str, Any]) -> int | None:
    """The fewest tokens that an attention of a model looks back; None where each sees all."""
    # Configs of Qwen2 name a window even where it is switched off.
    if not config.get("use_sliding_window", True):
        return None
    windows = (config[key] for key in WINDOW_KEYS if isinstance(config.get(key), int))
    return min(windows, default=None)


def bytes_per_token(config: dict[str, Any], value_bytes: int = 2) -> int:
    """Keys and values of one token in all layers; 0 where the config does not tell."""
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    width = config.get("hidden_size") or config.get("n_embd") or 0
    size = config.get("head_dim") or width // heads
    # Fewer than the heads of queries where several of these share keys and values.
    kv_heads = config.get("num_key_value_heads") or heads
    return int(2 * layers * kv_heads * size * value_bytes)


def _whole(path: Path) -> Path:
    """A safetensors file that is as long as its header says; raises UserError for another."""
    damaged = UserError(
        f"{path} is damaged: it is not as long as its header says. Copy it again; in a folder that "
        "was cloned without Git LFS, fetch it with: git lfs pull"
    )
    size = path.stat().st_size
    with path.open("rb") as file:
        # The format: eight bytes of length, a JSON header of that length, then the tensors' bytes.
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= size - 8:
            raise damaged
        try:
            header = json.loads(file.read(header_bytes))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
            is_whole = 8 + header_bytes + end == size
        except (ValueError, TypeError, LookupError, AttributeError):
            raise damaged from None
    if not is_whole:
        raise damaged
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _parse_json(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path.parent} has no {path.name}: it is not a whole model folder."
        ) from None


def _parse_json(content: bytes, place: str) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise UserError(f"{place} is damaged: it is not JSON ({error}).") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{place} is damaged: it is not a JSON object.")
    try:
        _Values.model_validate(parsed)
    except ValidationError as error:
        raise UserError(
            f"{place} has a value of the wrong kind: {first_fault(error)}. Correct it, or copy the "
            "file from the model's source again."
        ) from None
    return parsed


_WHOLE_NUMBERS = (
    *POSITION_KEYS,
    *("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads"),
    *("hidden_size", "n_embd", "head_dim", "vocab_size", "sliding_window", "pad_token_id"),
)
_KINDS: dict[str, Any] = dict.fromkeys(_WHOLE_NUMBERS, StrictInt) | {
    "architectures": list[str],
    "eos_token_id": list[StrictInt] | StrictInt,
    "quantization_config": dict[str, Any],
    # No path to another folder, since only files of this one are copied with it.
    "weight_map": dict[str, Annotated[str, Field(pattern=r"^[^/]+$")]],
}
# Families write null for what they do not have.
_FIELDS: dict[str, Any] = {key: (kind | None, None) for key, kind in _KINDS.items()}
_OfText = create_model("_OfText", **_FIELDS)
_Values = create_model("_Values", __base__=_OfText, text_config=(_OfText | None, None))
"""What is used of a folder's JSON files, and of which kind it has to be."""


def of_text(config: dict[str, Any]) -> dict[str, Any]:
    """The config; of a model that also reads pictures, with the values of the part for text, of
    which those that are null say nothing."""
    part = config.get("text_config") or {}
    return config | {key: value for key, value in part.items() if value is not None}


def fitting_vocab_size(place: str, config: dict[str, Any], tokenizer_size: int) -> int:
    """How many ids a model has, by its config or else its tokenizer's largest id plus one; raises
    UserError where the tokenizer has more."""
    size = of_text(config).get("vocab_size")
    if size and tokenizer_size > size:
        raise UserError(
            f"The tokenizer in {place} has token ids up to {tokenizer_size - 1}, outside the "
            f"model's vocabulary of {size} (config.json). Resize the model's embeddings, or name "
            "the tokenizer it was trained with."
        )
    return int(size or tokenizer_size)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder; raises UserError naming the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"The tokenizer in {folder} cannot be read: {first_line(error)}") from error


def end_of_turn(tokenizer: Any, chat_template: str | None) -> list[int]:
    """The token that a chat template, or else the tokenizer's own, ends an answer with; none where
    it has none, as where the template given is empty."""
    if not (tokenizer.chat_template if chat_template is None else chat_template):
        return []
    answer = "answer"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=chat_template, tokenize=False, add_generation_prompt=False
        )
    except TemplateError:
        # A template that refuses these roles wrote its rows with others, whose end is unknown here.
        return []
    # What the template writes after the answer is the end of a turn.
    after = tokenizer(text.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    return [token for token in after if token in tokenizer.all_special_ids][:1]


def read_model(folder: Path, model_class: Any, **options: Any) -> Any:
    """A model for inference, of one of transformers' classes; raises UserError where the folder
    holds none that can be read."""
    try:
        model = model_class.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, **options
        )
    except Exception as error:
        # Damaged files surface as errors of safetensors, json, torch or transformers alike.
        raise UserError(f"The model in {folder} cannot be read: {first_line(error)}") from error
    return model.eval()


STEP = 256
"""Tokens; lengths are rounded down to a multiple of it."""
SHORTEST = 1024
"""Tokens below which an endpoint is of no use."""


def longest_context(model: str, memory_bytes: int | None) -> int:
    """Tokens of the longest prompt and answer together that an engine has room for; raises
    UserError where the weights leave none for a text of 1,024 tokens.

    The model is a Hugging Face folder, of this machine or of a bucket; the memory is that of all
    accelerators, for weights and cache, and None has no limit.
    """
    place = f"{model}/{CONFIG_NAME}"
    whole = _parse_json(files.read(place), place)
    config = of_text(whole)
    positions = context_tokens(config) or SHORTEST
    if memory_bytes is None:
        return positions
    sizes = files.list_sizes(model)
    weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    # Of the whole model: a part may name the precision that it once had elsewhere.
    if (whole.get("dtype") or whole.get("torch_dtype")) == "float32":
        # vLLM loads such weights in half precision, in which it keeps keys and values, too.
        weights //= 2
    room = max(0, memory_bytes - weights)
    token_bytes = bytes_per_token(config)
    # Where the config does not say what a token takes, nothing is compared.
    fits = room // token_bytes // STEP * STEP if token_bytes else positions
    if fits >= positions:
        return positions
    if fits < SHORTEST:
        raise UserError(
            f"The model does not fit: its weights take {weights / 1e9:,.1f} GB of the "
            f"{memory_bytes / 1e9:,.1f} GB that the accelerators have for weights and cache, "
            f"which leaves room for {fits:,} tokens. Ask for a larger "
            "`endpoint.accelerator_type`, or for more `endpoint.accelerator_count`, in the cloud "
            "project's file."
        )
    return int(fits)
