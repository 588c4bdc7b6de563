"""Copies of the training state that the next steps do not touch."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


class StagingBuffers:
    """Host memory that every save copies into again; allocating it anew would take longer."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, state: dict[str, Any], after: torch.cuda.Event | None) -> dict[str, Any]:
        """A state dict of the same form, its tensors in buffers on the host.

        Args:
            state: tensors that nobody changes until this returns.
            after: on a GPU, the work that has to be done before the state may be read.
        """
        if after is None:
            copied: dict[str, Any] = self._copy("", state)
            return copied
        stream = torch.cuda.Stream()
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            copied = self._copy("", state)
        stream.synchronize()
        return copied

    def _copy(self, path: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(f"{path}/{key}", item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(f"{path}/{n}", item) for n, item in enumerate(value))
        if isinstance(value, DTensor):
            local = self._fill(path, value.to_local())
            return DTensor.from_local(
                local,
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        return self._fill(path, value) if isinstance(value, torch.Tensor) else value

    def _fill(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            self._buffers[path] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)


def recorded_work() -> torch.cuda.Event | None:
    """What the GPU has been given so far, to be waited for elsewhere; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()
    event.record()
    return event
