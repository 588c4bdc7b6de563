"""The trained model as a Hugging Face folder."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.lora import merge_adapters, write_adapter
from recipes.sections import LoraSettings

CARRIED_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "*.model",
    "LICENSE*",
)
MAX_SHARD_BYTES = 4 * 1024**3
INDEX_NAME = "model.safetensors.index.json"


def export_model(
    model: TrainableModel,
    base_model: Path,
    folder: Path,
    dtype: torch.dtype,
    workers: Workers,
    lora: LoraSettings | None = None,
) -> None:
    """Write weights, config, tokenizer and generation config; every worker must call it.

    The folder appears whole: it is written beside its place and renamed. Adapters are merged, and
    written by themselves into the folder `<folder>-adapter`.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if workers.is_rank_zero:
        names = model.hugging_face_names()
        weights = {names[name]: tensor for name, tensor in state.items()}
        if lora:
            write_adapter(weights, lora, base_model, folder.with_name(f"{folder.name}-adapter"))
            weights = merge_adapters(weights, lora)
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        _write(model, model.to_hugging_face(weights), base_model, folder, dtype)
    workers.barrier()


def copy_model(source: Path, folder: Path) -> None:
    """Copy an exported folder, which appears whole."""
    draft = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)


def _write(
    model: TrainableModel,
    weights: dict[str, torch.Tensor],
    base_model: Path,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    draft = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for pattern in CARRIED_PATTERNS:
        for path in base_model.glob(pattern):
            shutil.copy2(path, draft / path.name)
    for name, content in model.exported_files.items():
        (draft / name).write_text(content)
    config = json.loads((draft / "config.json").read_text()) | model.exported_config
    config["dtype"] = str(dtype).removeprefix("torch.")
    (draft / "config.json").write_text(json.dumps(config, indent=2))
    _write_weights(weights, draft)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)


def _write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
