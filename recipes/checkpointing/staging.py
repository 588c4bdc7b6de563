"""Copies of the training state that the next steps do not touch."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


class StagingBuffers:
    """Host memory that every save copies into again; allocating it again would take longer."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, state: dict[str, Any], stream: torch.cuda.Stream | None) -> dict[str, Any]:
        """A state dict of the same form, its tensors in buffers on the host.

        Args:
            state: tensors that nobody changes until this returns.
            stream: where to copy on a GPU, from `side_stream`.
        """
        if stream is None:
            copied: dict[str, Any] = self._copy("", state)
            return copied
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


def side_stream() -> torch.cuda.Stream | None:
    """A stream beside the training's, for what may start once its work so far is done."""
    if not torch.cuda.is_available():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream
