# SPDX-License-Identifier: Apache-2.0
"""What is done to a tensor before it travels, and undone after."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """The interface of a compressor; any object with these two methods can be used as one.

    Both run on every rank, in the thread that submits and in the one that waits. What is reduced is what
    ``compress`` returns, so the reduction of compressed tensors has to mean something: casting does.
    """

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels and whatever ``decompress`` needs to know.

        Must not change ``tensor``, which is detached from autograd's graph. What is returned may be ``tensor`` or a
        view of it; in any other tensor the result is written, so that must not be kept and used again.
        """

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in the dtype and shape of the original one."""


class NoneCompressor:
    """Sends tensors as they are."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return ``tensor`` itself."""
        return tensor, None

    def decompress(self, tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        """Return ``tensor`` itself."""
        return tensor


class CastCompressor:
    """Sends wider floating-point tensors in a 16-bit dtype; all others travel as they are. So do their gradients.

    The sum is accumulated in float32 and rounded once. float16 overflows beyond 65504: a *sum* over many ranks may
    become infinite where its average would not. bfloat16 keeps float32's range.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return ``tensor`` in the 16-bit dtype, and its own dtype."""
        narrower = tensor.is_floating_point() and tensor.element_size() > self.dtype.itemsize
        return (tensor.to(self.dtype) if narrower else tensor), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return ``tensor`` in the dtype it had before."""
        return tensor.to(ctx)


class Compression:
    """The compressors that come with commlib."""

    none: Compressor = NoneCompressor()
    fp16: Compressor = CastCompressor(torch.float16)
    bf16: Compressor = CastCompressor(torch.bfloat16)
