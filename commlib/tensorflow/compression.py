# SPDX-License-Identifier: Apache-2.0
"""In which dtype tensors travel."""

from __future__ import annotations

import tensorflow as tf

from commlib.errors import UnsupportedError


class Cast:
    """Wider floating-point tensors travel in ``dtype``; all others, and all where it is None, as they are.

    The sum is accumulated in float32 and rounded once. float16 overflows beyond 65504: a *sum* over many ranks may
    become infinite where its average would not. bfloat16 keeps float32's range.
    """

    def __init__(self, dtype: tf.DType | None) -> None:
        self.dtype = dtype

    def on_wire(self, dtype: tf.DType) -> tf.DType:
        """The dtype in which tensors of ``dtype`` travel."""
        narrower = self.dtype is not None and dtype.is_floating and dtype.size > self.dtype.size
        return self.dtype if narrower else dtype


class Compression:
    """The compressions there are."""

    none = Cast(None)
    fp16 = Cast(tf.float16)
    bf16 = Cast(tf.bfloat16)


def checked(compression: object) -> Cast:
    """``compression``, if it is one."""
    if not isinstance(compression, Cast):
        raise UnsupportedError(f"compression is {compression!r}; expected Compression.none, .fp16 or .bf16")
    return compression
