"""Muon for matrices that are split over workers."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz


class SplitMuon(torch.optim.Muon):
    """Muon (Jordan et al., 2024) whose update is that of the whole matrix.

    A matrix's update cannot be computed from a part of it: the momentum, which stays split, is
    gathered, orthogonalised by every worker alike, and each applies its part. One matrix is whole
    at a time. Parameters are DTensors; the arithmetic is that of torch's own step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: DTensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.to_local().lerp_(gradient.to_local(), 1 - group["momentum"])
        update = momentum
        if group["nesterov"]:
            part = gradient.to_local().lerp(momentum.to_local(), group["momentum"])
            update = DTensor.from_local(
                part,
                gradient.device_mesh,
                gradient.placements,
                run_check=False,
                shape=gradient.shape,
                stride=gradient.stride(),
            )
        whole = _zeropower_via_newtonschulz(
            update.full_tensor(), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        mine = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        ).to_local()
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        local = parameter.to_local()
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(mine, alpha=-rate)
