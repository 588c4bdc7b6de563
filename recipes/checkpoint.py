"""The training state on disk: weights and optimizer through PyTorch DCP, the manifest last."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from artifacts import checkpoints
from recipes.parallel import Workers


class Checkpointer:
    """Saves and restores one run's model and optimizer."""

    def __init__(
        self,
        run_url: str,
        content: dict[str, Any],
        keep: int,
        workers: Workers,
        report: Callable[[str], None],
    ) -> None:
        self._run_url = run_url
        self._content = content
        self._keep = keep
        self._workers = workers
        self._report = report

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
    ) -> None:
        """Write and commit the checkpoint of a step; older ones rotate out afterwards.

        Raises:
            UserError: the disk is full; the checkpoints before are untouched.
        """
        if self._workers.is_first:
            checkpoints.clear_step(self._run_url, step)
        self._workers.barrier()
        url = checkpoints.step_url(self._run_url, step)
        with _quiet():
            dcp.save(_tensors(model, optimizer), storage_writer=FileSystemWriter(url))
        if self._workers.is_first:
            checkpoints.commit(self._run_url, step, self._content, state)
            checkpoints.rotate(self._run_url, self._keep)
        self._workers.barrier()

    def keep_only_newest(self) -> None:
        """Drop all but the last checkpoint of a finished run."""
        checkpoints.rotate(self._run_url, 1)

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, dict[str, Any]] | None:
        """Load the newest valid checkpoint: `(step, state)`, or None where there is none.

        Raises:
            UserError: the run was made with other settings or inputs.
        """
        found = checkpoints.find_newest(self._run_url, self._content, self._report)
        if found is None:
            return None
        tensors = _tensors(model, optimizer)
        with _quiet():
            dcp.load(tensors, storage_reader=FileSystemReader(found.url))
            set_model_state_dict(model, tensors["model"])
            set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
        return found.manifest.step, found.manifest.state


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def _quiet() -> warnings.catch_warnings:
    """DCP remarks on every call that one process alone is saving; that is meant."""
    context = warnings.catch_warnings()
    warnings.filterwarnings("ignore", module="torch.distributed")
    return context
