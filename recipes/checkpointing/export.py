"""The trained model as a Hugging Face folder.

A mounted bucket renames no folders, so files are written where they belong and `config.json` comes
last: a folder without it is no model.
"""

import json
import shutil
from collections import deque
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file

from artifacts.model import older_config, write_older_names
from artifacts.storage import files
from recipes.distributed.strategy import Strategy
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.lora import merge_adapters, write_adapter
from recipes.settings import LoraSettings

CONFIG_NAME = "config.json"
"""Written last: an export with it is whole."""
CARRIED_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "*.model",
    "LICENSE*",
)
Weights = Iterable[tuple[str, torch.Tensor]]
MAX_SHARD_BYTES = 4 * 1024**3
INDEX_NAME = "model.safetensors.index.json"


def export_model(
    strategy: Strategy,
    base_model: Path,
    folder: Path,
    dtype: torch.dtype,
    workers: Workers,
    lora: LoraSettings | None = None,
) -> None:
    """Write weights, config, tokenizer and generation config; every worker must call it.

    Adapters are merged, and written by themselves into the folder `<folder>-adapter`.
    """
    model = strategy.model
    names = model.hugging_face_names()
    weights = ((names[name], tensor) for name, tensor in strategy.weights())
    if not workers.is_rank_zero:
        # Each is gathered from all workers.
        deque(weights, maxlen=0)
    elif lora or not model.is_exported_by_name:
        whole = dict(weights)
        if lora:
            write_adapter(whole, lora, base_model, folder.with_name(f"{folder.name}-adapter"))
            whole = merge_adapters(whole, lora)
        whole = {name: tensor.to(dtype) for name, tensor in whole.items()}
        _write(model, model.to_hugging_face(whole).items(), base_model, folder, dtype)
    else:
        narrow = (model.to_hugging_face({name: tensor.to(dtype)}) for name, tensor in weights)
        pieces = chain.from_iterable(piece.items() for piece in narrow)
        _write(model, pieces, base_model, folder, dtype)
    workers.barrier()


def is_whole(folder: Path) -> bool:
    """Whether an export was written to its end."""
    return (folder / CONFIG_NAME).exists()


def copy_model(source: Path, folder: Path) -> None:
    """Copy an export."""
    _clear(folder)
    for path in source.iterdir():
        if path.name != CONFIG_NAME:
            shutil.copyfile(path, folder / path.name)
    files.write(folder / CONFIG_NAME, files.read(source / CONFIG_NAME))


class BestExports:
    """The weights of a run's best validation, by step: `<folder>/step-<n>`.

    Training may go on from either of its last two saves, as the last may be under way; what they
    call the best stays.
    """

    def __init__(self, folder: Path, best_step: int) -> None:
        """Begin with the best step of the checkpoint that training goes on from, 0 without one."""
        self._folder = folder
        self._of_saves = (best_step, best_step)

    def folder(self, step: int) -> Path:
        """Where a step's weights are."""
        return self._folder / f"step-{step}"

    def saved(self, best_step: int) -> None:
        """A checkpoint is being saved, and the one before it has been committed."""
        self._of_saves = (self._of_saves[1], best_step)

    def keep(self, step: int) -> None:
        """Remove all but this step's and those that a checkpoint names."""
        needed = {self.folder(each).name for each in (step, *self._of_saves)}
        for name in set(files.list_names(self._folder)) - needed:
            files.remove(self._folder / name)


def _clear(folder: Path) -> None:
    """An empty folder; what makes an export whole goes first."""
    files.remove(folder / CONFIG_NAME)
    files.remove(folder)
    files.make_folder(folder)


def _write(
    model: TrainableModel,
    weights: Weights,
    base_model: Path,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    _clear(folder)
    for pattern in CARRIED_PATTERNS:
        for path in base_model.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    for name, content in model.exported_files.items():
        (folder / name).write_text(content)
    write_older_names(folder)
    _write_weights(weights, folder)
    config = json.loads((base_model / CONFIG_NAME).read_text()) | model.exported_config
    config["dtype"] = str(dtype).removeprefix("torch.")
    files.write(folder / CONFIG_NAME, json.dumps(older_config(config), indent=2).encode())


def _write_weights(weights: Weights, folder: Path) -> None:
    """Write safetensors as they come, of which no more are held than one file has."""
    files_of: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        path = folder / f"model-{len(files_of) + 1:05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        files_of.append(list(shard))
        shard.clear()

    for name, tensor in weights:
        if shard and size + tensor.nbytes > MAX_SHARD_BYTES:
            write()
            size = 0
        shard[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
        del tensor
    write()
    if len(files_of) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, held in enumerate(files_of, start=1):
        file = f"model-{number:05d}-of-{len(files_of):05d}.safetensors"
        (folder / f"model-{number:05d}.safetensors").rename(folder / file)
        places |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
