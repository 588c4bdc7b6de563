"""This process among the workers of a run."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pkgutil import resolve_name
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from artifacts.errors import UserError, first_line
from recipes.device import count_gpus, device_of, local_device
from recipes.settings import StrategySettings

Value = TypeVar("Value")
LAUNCHING = (
    "To train in one process, take WORLD_SIZE out of the environment; several are started by "
    "python -m recipes.launcher.local, which sets it."
)
HOURS_TO_WAIT = 12
"""Long, because a dead worker is noticed anyway: its connections close at once."""


@dataclass(frozen=True)
class Workers:
    """Rank and number of workers; with one worker no process group exists."""

    rank: int
    count: int
    device: torch.device
    local_rank: int = 0
    """Rank among the workers of this machine."""
    tensor_parallel: int = 1
    """Neighboring workers that compute the same rows, each with a part of every matrix."""
    pipeline_parallel: int = 1
    """Stages, each of a run of workers, that compute the same rows one after another."""
    chips: int = 1
    """Of a TPU that this worker spreads its rows over."""
    group: dist.ProcessGroup | None = None
    """On the host, for what is told beside the GPU's work, while one worker may work for long; None
    of one alone."""

    @property
    def is_rank_zero(self) -> bool:
        """True on the one worker that writes logs and manifests."""
        return self.rank == 0

    @property
    def is_local_rank_zero(self) -> bool:
        """True on one worker of every machine."""
        return self.local_rank == 0

    @property
    def dp_rank(self) -> int:
        """Which part of the global batch this worker computes, alone or with others."""
        # Ranks go through the stages, within each through its parts, and within each part through
        # the neighbors that split its matrices.
        return self.rank // self.tensor_parallel % self.dp_size

    @property
    def dp_size(self) -> int:
        """Into how many parts the global batch is divided."""
        return self.count // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def is_first_of_part(self) -> bool:
        """True on one of the workers that compute the same rows."""
        return self.rank % self.tensor_parallel == 0 and self.stage == 0

    @property
    def stage(self) -> int:
        """Of the pipeline, from 0."""
        return self.rank * self.pipeline_parallel // self.count

    @property
    def described(self) -> str:
        """How many there are, in words."""
        return f"{self.count} worker(s)" + (f", {self.chips} chips" if self.chips > 1 else "")

    def rows_per_pass(self, device_batch_size: int) -> int:
        """Rows that a worker computes at once where a device takes so many."""
        return device_batch_size * self.chips

    def sum(self, *values: float) -> list[float]:
        """Sums over all parts of the global batch of each value's mean over a part's workers."""
        if self.count == 1:
            return list(values)
        # On the host: a sum on a GPU would wait for all that it still computes.
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return (tensor / (self.count // self.dp_size)).tolist()

    def agree(self, *wishes: bool) -> list[bool]:
        """For each wish, whether any worker has it; the same answer on all workers."""
        return [count > 0 for count in self.sum(*wishes)]

    def sum_parts(self, part: np.ndarray) -> np.ndarray:
        """The sum of all workers' integer arrays of one shape, in place: each has filled in its
        part, and all get the whole."""
        if self.count == 1:
            return part
        tensor = torch.from_numpy(part)
        dist.all_reduce(tensor, group=self.group)
        return part

    def share(self, value: Value) -> Value:
        """What the first worker gives, on all of them."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0, group=self.group)
        return values[0]

    def gather(self, value: Value) -> list[Value]:
        """What each worker gives, by rank, on all of them."""
        if self.count == 1:
            return [value]
        values = [value] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[[], Value]) -> Value:
        """What a worker's own part of some work gives; raises the UserError of the first worker
        that has met one, on all of them, so that the one that speaks can say it."""
        fault: UserError | None = None
        try:
            done = work()
        except UserError as error:
            fault = error
        for found in filter(None, self.gather(fault)):
            raise found
        return done

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.count > 1:
            dist.barrier(group=self.group)


def join_workers(strategy: StrategySettings | None = None) -> Workers:
    """Enter the group that the launcher describes in the environment; alone without one. Raises
    UserError where there is less hardware than workers, or not the strategy's own."""
    count, local_rank = _number("WORLD_SIZE", 1, 1), _number("LOCAL_RANK", 0, 0)
    if strategy and strategy.joins:
        return resolve_name(strategy.joins)(count)
    device = local_device(local_rank)
    if device.type == "cuda":
        here, found = _number("LOCAL_WORLD_SIZE", 1, 1), count_gpus()
        if here > found:
            raise UserError(
                f"{here} processes train on this machine, each on a GPU of its own, but it has "
                f"{found}. Set `checkpoint.placement.workers` to at most {found}."
            )
        # NCCL, and whoever asks for `cuda` alone, takes the current one.
        torch.cuda.set_device(device)
    if count > 1:
        try:
            dist.init_process_group(device_of(device).group_backend)
        except ValueError as error:
            # One of the launcher's variables is not set, or is no number.
            raise UserError(f"{first_line(error)}. {LAUNCHING}") from error
        group = host_group()
        # Until all have connected, none may go on: one that refuses its input and ends would fail
        # the others.
        dist.barrier(group=group)
        rank, size = dist.get_rank(), dist.get_world_size()
        return Workers(rank, size, device, local_rank, group=group)
    return Workers(0, 1, device, local_rank)


def _number(variable: str, otherwise: int, least: int) -> int:
    text = os.environ.get(variable, str(otherwise))
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{variable} has to be a number from {least}, not {text!r}. {LAUNCHING}")
    return int(text)


def form_group_of_one(device: torch.device) -> None:
    """The process group that some libraries want of a single worker too; it listens nowhere."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = device_of(device).group_backend
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def host_group() -> dist.ProcessGroup:
    """A group on the host that waits for the one worker that writes or checks files.

    NCCL ends a training in which a worker has waited for 10 minutes, and gloo after 30.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(hours=HOURS_TO_WAIT))


def leave_workers() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
