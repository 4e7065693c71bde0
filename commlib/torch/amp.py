# SPDX-License-Identifier: Apache-2.0
"""Loss scaling that all ranks agree about."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import commlib
from commlib import Max
from commlib.errors import UnsupportedError
from commlib.torch.cross_barrier import _CrossBarrier
from commlib.torch.ops import push_pull_inplace
from commlib.torch.optimizer import _AsynchronousOptimizer, _DistributedOptimizer

# Told apart by the order in which the program makes them, which is the same on all ranks.
_instances = itertools.count()


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for training on several ranks.

    ``unscale_()``, and ``step()`` where that has not been called, waits until the gradients of a DistributedOptimizer
    are reduced, and finds an infinity or NaN on all ranks if there is one on any. So all ranks skip the same steps and
    have the same scale. Both block, and have to be called on all ranks in the same order. ``device`` is "cpu" unless
    said otherwise; all arguments are those of torch's.

    In asynchronous training each rank decides for itself.

    (torch's own works as well, with ``optimizer.synchronize()`` before ``unscale_()`` or ``step()``.)

    Raises ``UnsupportedError`` for a CrossBarrier, whose gradients have not all arrived by then.
    """

    def __init__(self, device: str = "cpu", *args: Any, **kwargs: Any) -> None:
        super().__init__(device, *args, **kwargs)
        self._name = f"GradScaler.{next(_instances)}.found_inf"

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide reduced gradients by the scale; look for infinities on all ranks. Blocks."""
        if self.is_enabled():
            _refuse(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take the optimizer's step, on all ranks or, if a gradient of any is not finite, on none."""
        if self.is_enabled():
            _refuse(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # The one place that unscale_() and the step() of a fused optimizer, which unscales by itself, both pass.
        if isinstance(optimizer, _DistributedOptimizer):
            optimizer.synchronize()
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if commlib.size() > 1 and not isinstance(optimizer, _AsynchronousOptimizer):
            # A rank without any gradient takes part as well.
            anywhere = torch.tensor(max((float(value) for value in found.values()), default=0.0))
            push_pull_inplace(anywhere, name=self._name, op=Max)
            for value in found.values():
                value.fill_(anywhere.item())
        return found


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, _CrossBarrier):
        raise UnsupportedError(
            "a GradScaler cannot be used with CrossBarrier, as it must see all gradients before step(); use "
            "DistributedOptimizer, or bfloat16, which needs no scaling"
        )
