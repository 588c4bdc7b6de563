"""The training state of DeepSpeed on disk; universal checkpoints where the workers are others."""

import argparse
import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from artifacts.errors import UserError
from artifacts.storage import files
from recipes.distributed.workers import Workers

MARKER = "zero.json"
FOLDER = "zero"
"""DeepSpeed's name for a checkpoint below the folder that it is told to save to."""


def write_state(engine: Any, url: str, workers: Workers, scratch: Path) -> None:
    """Write each worker's part of weights and optimizer into an empty folder.

    Raises:
        OSError: storage failed; on every worker.
    """
    folder = Path(url) if files.is_local(url) else _empty(scratch / "saving", workers)
    engine.save_checkpoint(
        str(folder), tag=FOLDER, save_latest=False, exclude_frozen_parameters=True
    )
    if workers.is_rank_zero:
        (folder / MARKER).write_text(json.dumps(_layout(engine, workers)))
    workers.barrier()
    if not files.is_local(url):
        _upload(folder, url, workers)
        _empty(folder, workers)


def read_state(engine: Any, url: str, workers: Workers, scratch: Path) -> None:
    """Load what `write_state` wrote, by any number of workers.

    Raises:
        UserError: it was written at another stage.
    """
    folder = Path(url)
    if not files.is_local(url):
        folder = _empty(scratch / "reading", workers)
        if workers.is_local_rank_zero:
            _download(url, folder)
        workers.barrier()
    written, wanted = json.loads((folder / MARKER).read_text()), _layout(engine, workers)
    if written["stage"] != wanted["stage"]:
        raise UserError(
            f"{url} was written at stage {written['stage']}, but "
            f"`checkpoint.placement.deepspeed.stage` is {wanted['stage']}. Go on at stage "
            f"{written['stage']}."
        )
    if written == wanted:
        engine.load_checkpoint(str(folder), tag=FOLDER, load_module_strict=False)
    else:
        _read_universally(engine, folder, workers, scratch)
    workers.barrier()
    _empty(scratch, workers)


def _layout(engine: Any, workers: Workers) -> dict[str, Any]:
    """What has to be the same for the state to be read part by part."""
    zero = engine._config.zero_config
    return {
        "workers": workers.count,
        "stage": int(engine.zero_optimization_stage()),
        "sub_group_size": zero.sub_group_size,
        "offload_optimizer": zero.offload_optimizer.device if zero.offload_optimizer else "none",
    }


def _read_universally(engine: Any, folder: Path, workers: Workers, scratch: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main as convert

    universal = _empty(scratch / "universal", workers)
    if workers.is_local_rank_zero:
        arguments = argparse.Namespace(
            input_folder=str(folder / FOLDER),
            output_folder=str(universal / FOLDER),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            convert(arguments)
    workers.barrier()
    groups = [_hyperparameters(group) for group in engine.optimizer.param_groups]
    engine._config.load_universal_checkpoint = True
    engine.load_checkpoint(str(universal), tag=FOLDER, load_module_strict=False)
    engine._config.load_universal_checkpoint = False
    # It gives every group the first one's settings, and all parts one counter of steps.
    for group, before in zip(engine.optimizer.param_groups, groups, strict=True):
        group |= before
    for part in engine.optimizer.optimizer.state.values():
        part["step"] = torch.as_tensor(part["step"]).clone()


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _upload(folder: Path, url: str, workers: Workers) -> None:
    failed: OSError | None = None
    if workers.is_local_rank_zero:
        try:
            for path in filter(Path.is_file, sorted(folder.rglob("*"))):
                files.upload(path, f"{url}/{path.relative_to(folder).as_posix()}")
        except OSError as error:
            failed = error
    (failures,) = workers.sum(failed is not None)
    if failures:
        raise failed or OSError("another worker could not write its part")


def _download(url: str, folder: Path) -> None:
    for name in files.list_sizes(url):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.download(f"{url}/{name}", path)


def _empty(folder: Path, workers: Workers) -> Path:
    """An empty folder of this machine, the same for all its workers."""
    workers.barrier()
    if workers.is_local_rank_zero:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    workers.barrier()
    return folder
