"""A model in a form that other programs run, read back before it is called done."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from artifacts.errors import UserError
from artifacts.model.folder import check_model_folder, context_tokens, read_config
from artifacts.model.hugging_face import read_tokenizer
from llm_assets.export.gguf_file import write_gguf
from llm_assets.export.signature import prepare_key, sign_folder
from recipes.evaluation.documents import GENERAL_TEXT
from serving.comparison import Comparison, JudgedDocument, compared
from serving.engine.conversion import convert_model
from serving.engine.pipeline import Unsupported, open_pipeline, score_tokens
from serving.engine.served_model import read_weights

Form = Literal["gguf", "openvino", "safetensors"]
READ_TOKENS = 256
"""Of the shipped text, by which original and export are compared."""
WEIGHTS_NAMES = ("*.safetensors", "*.safetensors.index.json")


def export_model(
    folder: Path, form: Form, target: Path, name: str, key: Path | None = None
) -> Comparison:
    """Write a model into a new folder, which appears whole once what was written reads as it did.

    Args:
        folder: a Hugging Face folder.
        name: of the model, for the programs that show it.
        key: file of the key that signs what was written (`llm_assets.export.signature`).

    Returns:
        The bits of a shipped text, before and after.

    Raises:
        UserError: the target exists, the form does not take this model, what was written does not
            predict as the model does, or the key is none.
    """
    if target.exists():
        raise UserError(f"{target} is there already. Remove it, or give another --output.")
    check_model_folder(folder)
    if key:
        prepare_key(key)
    scratch = target.with_name(f".{target.name}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    draft = scratch / target.name
    draft.mkdir(parents=True)
    try:
        FORMS[form](folder, draft, name)
        found = _compare(folder, form, draft, name)
        if not found.fits:
            raise UserError(f"What was written does not predict as the model does: {found}.")
        if key:
            sign_folder(draft, key)
        os.replace(draft, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return found


def _write_gguf(folder: Path, draft: Path, name: str) -> None:
    write_gguf(folder, draft / f"{name}.gguf", name)
    _write_modelfile(folder, draft, f"./{name}.gguf")


def _write_openvino(folder: Path, draft: Path, name: str) -> None:
    """With tokenizer and detokenizer, so that openvino-genai alone runs it."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer

    try:
        convert_model(folder, draft, "bf16")
    except Unsupported as error:
        raise UserError(f"OpenVINO does not run the model in {folder}: {error}") from error
    tokenizers = convert_tokenizer(read_tokenizer(folder), with_detokenizer=True)
    for kind, model in zip(("tokenizer", "detokenizer"), tokenizers, strict=True):
        ov.save_model(model, draft / f"openvino_{kind}.xml")
    ignored = shutil.ignore_patterns(*WEIGHTS_NAMES)
    shutil.copytree(folder, draft, ignore=ignored, dirs_exist_ok=True)


def _write_safetensors(folder: Path, draft: Path, name: str) -> None:
    shutil.copytree(folder, draft, dirs_exist_ok=True)
    _write_modelfile(folder, draft, ".")


FORMS: dict[Form, Callable[[Path, Path, str], None]] = {
    "gguf": _write_gguf,
    "openvino": _write_openvino,
    "safetensors": _write_safetensors,
}


def _write_modelfile(folder: Path, draft: Path, source: str) -> None:
    """What Ollama is told: where the weights are, how long a text may be, and to take the most
    likely token, as the endpoint does by default."""
    lines = [f"FROM {source}", "PARAMETER temperature 0"]
    if longest := context_tokens(read_config(folder)):
        lines.append(f"PARAMETER num_ctx {longest}")
    (draft / "Modelfile").write_text("\n".join(lines) + "\n")


def _compare(folder: Path, form: Form, draft: Path, name: str) -> Comparison:
    """Read the export back, and ask both for the bits of a text."""
    import recipes.evaluation.documents as shipped

    text = (Path(shipped.__file__).parent / GENERAL_TEXT).read_text()
    tokens = read_tokenizer(folder).encode(text)
    tokens = tokens[: min(READ_TOKENS, context_tokens(read_config(folder)) or READ_TOKENS)]
    model = read_weights(folder, AutoModelForCausalLM, dtype=torch.float32)
    expected = _bits(model, tokens)
    del model
    if form == "openvino":
        logprobs = score_tokens(open_pipeline(draft, "bf16", 2 * READ_TOKENS), tokens)[1:]
        found = -sum(logprobs) / math.log(2)
    else:
        file = {"gguf_file": f"{name}.gguf"} if form == "gguf" else {}
        read = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32, **file)
        found = _bits(read.eval(), tokens)
    size = len(read_tokenizer(folder).decode(tokens).encode())
    document = JudgedDocument(id=GENERAL_TEXT, bytes=size, bits=expected, windows=[tokens])
    return compared([document], [found], "bf16")


@torch.inference_mode()
def _bits(model: Any, tokens: list[int]) -> float:
    ids = torch.tensor([tokens])
    logprobs = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return -float(logprobs.gather(-1, ids[0, 1:, None]).sum()) / math.log(2)
