# SPDX-License-Identifier: Apache-2.0
"""Making all ranks start from the same state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import commlib
from commlib.errors import UnsupportedError
from commlib.torch.ops import broadcast_

Params = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]


def broadcast_parameters(params: Params, root_rank: int, prefix: str = "Parameter.") -> None:
    """Overwrite parameters and buffers with those of rank ``root_rank``; blocks.

    ``params`` is a ``model.state_dict()``, or ``model.named_parameters()``, or an iterable of tensors in the same
    order on all ranks. They are changed in place, as under ``torch.no_grad()``. Entries that are ``None`` are skipped.

    Raises ``UnsupportedError`` for entries that are not tensors (send those with ``broadcast_object``), ``ValueError``
    for names that occur twice.
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, entry in enumerate(params.items() if isinstance(params, Mapping) else params):
        name, value = entry if isinstance(entry, tuple) else (str(index), entry)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"{name!r} is a {type(value).__name__}, not a tensor; send it with broadcast_object")
        if prefix + name in tensors:
            raise ValueError(f"{name!r} occurs twice")
        tensors[prefix + name] = value
    commlib.declare([(name, tensor.nbytes) for name, tensor in tensors.items()])
    for name, tensor in tensors.items():
        broadcast_(tensor, root_rank, name)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return a copy of the object of rank ``root_rank``, whatever ``obj`` is on the other ranks; blocks.

    The object is pickled, so it must come from a rank that you trust, and all ranks must be able to import its class.
    """
    return commlib.broadcast_object(obj, root_rank, name=name)
