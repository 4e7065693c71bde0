# SPDX-License-Identifier: Apache-2.0
"""Parameters that each host changes by itself, at its own pace: asynchronous training.

Design notes. The owners of a job keep, of each buffer, the total of what all hosts have added to it since the job
began (``Collective::kAccumulate`` in ``src/server/engine.hpp``). A step of the optimizer is taken on this rank's
parameters with this rank's gradients. What it has changed is added to the total, and the parameters become what they
were at the very first, which all ranks know, plus the total. Nobody waits for another host. The ranks of one host step
together.

All is counted in float32, or float64: a total of half-width floats would stand still before long.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

import commlib
from commlib import Average, Handle, ReduceOp
from commlib.api import session
from commlib.errors import UnsupportedError
from commlib.torch import ops
from commlib.torch.reducer import claim, disown

Named = Iterable[tuple[str, torch.Tensor]]


def is_asynchronous() -> bool:
    """Whether the job trains so: ``COMMLIB_ASYNC=1`` on rank 0, and there is more than one host."""
    return session().parameters.asynchronous and commlib.num_nodes() > 1


def refuse_asynchronous(what: str) -> None:
    """Raise ``UnsupportedError`` if the job trains so."""
    if is_asynchronous():
        raise UnsupportedError(f"{what} cannot be used with COMMLIB_ASYNC=1: use DistributedOptimizer")


class _Part:
    """Parameters that are counted in the same dtype, one after the other in a buffer of the arena."""

    def __init__(self, name: str, params: list[torch.Tensor], dtype: torch.dtype) -> None:
        self._name = name
        self._params = params
        count = sum(_real(param).numel() for param in params)
        self._array = commlib.empty(count, np.float64 if dtype is torch.float64 else np.float32)
        self._flat = torch.from_numpy(self._array)
        self._handle: Handle | None = None
        self._views: list[torch.Tensor] = []
        end = 0
        for param in params:
            begin, end = end, end + _real(param).numel()
            self._views.append(self._flat[begin:end].view(_real(param).shape))
        self.remember()
        commlib.broadcast_(self._array, 0, name=f"{name}.start")
        self._start = self._flat.clone()
        self._put_back()

    def remember(self) -> None:
        for view, param in zip(self._views, self._params, strict=True):
            view.copy_(_real(param))

    def push(self, share: float) -> None:
        """Begin to add what has been changed since ``remember``, times ``share``."""
        self._flat.neg_()
        for view, param in zip(self._views, self._params, strict=True):
            view.add_(_real(param))
        self._flat.mul_(share)
        self._handle = session().worker.accumulate(self._array, self._name, 0)

    def pull(self) -> None:
        """Wait until that has been added, and take over what all hosts have. Nothing, if there is nothing in flight."""
        if self._handle is None:
            return
        self._handle.wait()  # still there, should this be a timeout
        self._handle = None
        self._flat.add_(self._start)
        self._put_back()

    def _put_back(self) -> None:
        with torch.no_grad():
            for view, param in zip(self._views, self._params, strict=True):
                _real(param).copy_(view)


class Deltas:
    """What DistributedOptimizer has in asynchronous training, where it otherwise has a Reducer."""

    is_active = True

    def __init__(self, prefix: str, named: Named, op: ReduceOp) -> None:
        self.prefix = prefix
        self.op = op
        self._fresh: list[torch.Tensor] = []  # of which nobody knows yet where the others start
        self._parts: list[_Part] = []
        self._claimed: list[torch.Tensor] = []
        self._stages = 0
        self.add(named)

    def add(self, named: Named) -> None:
        """Take further parameters. Raises ``ValueError`` for one that another wrapped optimizer has."""
        named = list(named)
        for _, param in named:
            ops.check(param)
        params = claim(named, self)
        self._fresh += params
        self._claimed += params

    def remove(self) -> None:
        """Finish what is in flight, and leave the parameters to others."""
        self._finish()
        disown(self._claimed, self)

    def begin_step(self) -> None:
        """Note what the parameters are. The first time, they become rank 0's; that waits for all ranks."""
        self._finish()
        if self._fresh:
            made = []
            for dtype in (torch.float32, torch.float64):
                params = [param for param in self._fresh if _counted_in(param) is dtype]
                if params:
                    name = f"{self.prefix}{self._stages}.{str(dtype).removeprefix('torch.')}"
                    made.append(_Part(name, params, dtype))
            # Not before: what fails here must not be taken for done the next time, and trained alone without a word.
            self._parts += made
            self._fresh = []
            self._stages += 1
        for part in self._parts:
            part.remember()

    def end_step(self) -> None:
        """Add what has been changed to what the owners have, and take over all that is there."""
        share = 1 / commlib.local_size() if self.op == Average else 1.0
        for part in self._parts:
            part.push(share)
        self._finish()

    def _finish(self) -> None:
        for part in self._parts:
            part.pull()


def _counted_in(param: torch.Tensor) -> torch.dtype:
    return torch.float64 if param.dtype in (torch.float64, torch.complex128) else torch.float32


def _real(param: torch.Tensor) -> torch.Tensor:
    param = param.detach()
    return torch.view_as_real(param) if param.is_complex() else param
