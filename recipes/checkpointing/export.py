"""The trained model as a Hugging Face folder, and those of a run's best validations.

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

from artifacts.model import CONFIG_NAME, GENERATION_NAME, INDEX, older_config, write_older_names
from artifacts.storage import files
from recipes.distributed.strategy import Strategy
from recipes.distributed.workers import Workers
from recipes.model.lora import merge_adapters, write_adapter
from recipes.sections import LoraSettings

CARRIED_PATTERNS = (
    GENERATION_NAME,
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "*.model",
    "LICENSE*",
)
MAX_SHARD_BYTES = 4 * 1024**3
"""Of one file of weights, and so of what an export holds of them at once."""


def export_model(
    strategy: Strategy,
    base_model: Path,
    folder: Path,
    dtype: torch.dtype,
    workers: Workers,
    lora: LoraSettings | None = None,
) -> None:
    """Write weights, config, tokenizer and generation config; every worker must call it.

    Adapters are merged, and written by themselves into `adapter_folder`.
    """
    model = strategy.model
    weights = ((model.hugging_face_name(name), tensor) for name, tensor in strategy.weights())
    if not workers.is_rank_zero:
        # Every tensor is gathered from all workers, so the others have to go through them as well.
        deque(weights, maxlen=0)
        workers.barrier()
        return
    # Weight by weight, so that the first worker never holds the whole model beside its own part.
    pieces: Iterable[dict[str, torch.Tensor]] = (
        {name: tensor.to(dtype)} for name, tensor in weights
    )
    if lora or not model.is_exported_by_name:
        tensors = dict(weights)
        if lora:
            write_adapter(tensors, lora, base_model, adapter_folder(folder))
            tensors = merge_adapters(tensors, lora)
        pieces = [{name: tensor.to(dtype) for name, tensor in tensors.items()}]
        # Or the float32 tensors would stay in memory while the files are written.
        del tensors
    _clear(folder)
    for pattern in CARRIED_PATTERNS:
        for path in base_model.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    for name, content in model.exported_files.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).write_text(content)
    write_older_names(folder)
    named_tensors = (model.to_hugging_face(piece).items() for piece in pieces)
    _write_weights(chain.from_iterable(named_tensors), folder)
    config = json.loads((base_model / CONFIG_NAME).read_text()) | model.exported_config
    config["dtype"] = str(dtype).removeprefix("torch.")
    # It is the base model's, whose weights were read as plain numbers and are exported so.
    config.pop("quantization_config", None)
    # Written last: an export with it is whole.
    _make_whole(folder, json.dumps(older_config(config), indent=2).encode())
    workers.barrier()


def _clear(folder: Path) -> None:
    """An empty folder; what makes an export whole goes first."""
    files.remove(folder / CONFIG_NAME)
    files.remove(folder)
    files.make_folder(folder)


def _write_weights(weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
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
        # safetensors refuses views whose numbers do not lie in order.
        shard[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
        # Or it would be held while the next one is gathered.
        del tensor
    write()
    if len(files_of) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    # The names contain the number of files, which is known only now.
    places: dict[str, str] = {}
    for number, names in enumerate(files_of, start=1):
        file = f"model-{number:05d}-of-{len(files_of):05d}.safetensors"
        (folder / f"model-{number:05d}.safetensors").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _make_whole(folder: Path, config: bytes) -> None:
    """Write the config, by which an export is whole also after a loss of power."""
    for export in filter(Path.is_dir, (adapter_folder(folder), folder)):
        files.flush_folder(export, [path.name for path in export.iterdir()])
    files.write(folder / CONFIG_NAME, config)


def adapter_folder(folder: Path) -> Path:
    """Where an export has its adapters by themselves."""
    return folder.with_name(f"{folder.name}-adapter")


def is_whole(folder: Path) -> bool:
    """Whether an export was written to its end."""
    return (folder / CONFIG_NAME).exists()


def copy_model(source: Path, folder: Path) -> None:
    """Copy an export, with its adapters if it has any."""
    for origin, target in ((adapter_folder(source), adapter_folder(folder)), (source, folder)):
        if origin.exists():
            _clear(target)
            for path in origin.iterdir():
                if path.name != CONFIG_NAME:
                    shutil.copyfile(path, target / path.name)
    _make_whole(folder, files.read(source / CONFIG_NAME))


class BestExports:
    """The weights of a run's best validation, by step: `<folder>/step-<n>`.

    Training may resume from either of its last two saves, as the last may still be under way, so
    the weights that either of them names as the best stay.
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
        exports = [self.folder(best) for best in (step, *self._of_saves)]
        names = {path.name for export in exports for path in (export, adapter_folder(export))}
        for name in set(files.list_names(self._folder)) - names:
            files.remove(self._folder / name)
