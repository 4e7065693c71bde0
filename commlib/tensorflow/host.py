# SPDX-License-Identifier: Apache-2.0
"""Between TensorFlow's tensors and the memory that the core works on, without copying.

Design notes. No op is compiled. In eager mode a tensor's memory is read through the buffer protocol, and what the core
has written into its arena becomes a tensor through DLPack. In a graph the core is called by ``tf.numpy_function``,
whose arguments lie where the tensors lie, and whose results TensorFlow takes over as they are. Both demand that results
begin at a multiple of 64 bytes, that nobody writes to them afterwards, and that they live as long as their tensor: each
has arena memory of its own, which goes back when the tensor is gone.

In a graph, operations run in any order, so each needs a name that is the same on all ranks and whenever the graph is
traced anew: that of the outermost function, and a number in the order in which that one's operations were traced. In
eager mode they run in the order of the program.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

import commlib
from commlib.errors import UnsupportedError

DTYPES: dict[tf.DType, Any] = {
    tf.bool: np.dtype(np.bool_),
    tf.uint8: np.dtype(np.uint8),
    tf.int8: np.dtype(np.int8),
    tf.int16: np.dtype(np.int16),
    tf.int32: np.dtype(np.int32),
    tf.int64: np.dtype(np.int64),
    tf.float16: np.dtype(np.float16),
    tf.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tf.float32: np.dtype(np.float32),
    tf.float64: np.dtype(np.float64),
}

EAGER = "tensorflow"  # what the names of all operations of eager mode begin with
_SITES = "_commlib_sites"  # attribute of a graph: how many operations have been traced in it


def check_dtype(dtype: tf.DType) -> None:
    """Raise ``UnsupportedError`` for a dtype that cannot be sent."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"tensors of dtype {dtype.name} cannot be sent; cast them to one of {_names()}")


def _names() -> str:
    return ", ".join(dtype.name for dtype in DTYPES)


def array_of(tensor: tf.Tensor) -> Any:
    """The memory of an eager tensor, not to be written to."""
    check_dtype(tensor.dtype)
    if "CPU" not in tensor.device:
        raise UnsupportedError(f"a tensor on {tensor.device} cannot be sent; copy it with tf.identity() on a CPU first")
    if tensor.dtype == tf.bfloat16:
        words = np.asarray(memoryview(tf.bitcast(tensor, tf.uint16)))
        return words.view(DTYPES[tf.bfloat16])
    return np.asarray(memoryview(tensor))


def tensor_of(array: Any) -> tf.Tensor:
    """An eager tensor in the memory of an array, which nobody else may write to from now on."""
    if array.size == 0 or array.ctypes.data % 64 != 0:  # not of the arena
        return tf.convert_to_tensor(array)
    if array.dtype == DTYPES[tf.bfloat16]:
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def in_graph() -> bool:
    """Whether what is called now is traced, and executed later."""
    return not tf.executing_eagerly()


def site(kind: str, name: str | None = None) -> str:
    """What the next operation of a kind is called, here."""
    if name is not None:
        return name
    if not in_graph():
        return f"{EAGER}.{kind}"
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    number = getattr(graph, _SITES, 0)
    setattr(graph, _SITES, number + 1)
    # The graphs of gradients have numbers in their names that differ from trace to trace.
    function = re.sub(r"_\d+$", "", getattr(graph, "name", "graph"))
    return f"{EAGER}.{function}.{kind}.{number}"


def plain_name(variable: Any) -> str:
    """Its name without the numbers that tell it from those of other models, of which ranks may have made more."""
    name = getattr(variable, "path", None) or getattr(variable, "name", None)
    return re.sub(r"_\d+(?=[/:]|$)", "", str(name or "no name"))


def refuse_xla(what: str) -> None:
    """Raise while tracing what XLA would refuse when it is run."""
    from tensorflow.python.ops import control_flow_util

    if in_graph() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedError(
            f"{what} cannot be compiled by XLA, which calls no function of the host: leave out jit_compile=True of "
            "tf.function, or say jit_compile=False to model.compile()"
        )


def call(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """The results of a function of the host on the memory of tensors: now, or when the graph is run."""
    if in_graph():
        results = tf.numpy_function(_keeping(function), list(inputs), list(dtypes), stateful=True)
        return list(results) if isinstance(results, (list, tuple)) else [results]
    return [tensor_of(array) for array in function(*map(array_of, inputs))]


_last: list[BaseException] = []


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same; keeps the exception, of which TensorFlow passes on the text alone."""

    def keeping(*arrays: Any) -> Any:
        try:
            return function(*map(np.asarray, arrays))  # TensorFlow makes scalars of 0-d tensors
        except BaseException as error:
            _last[:] = [_without_frames(error)]
            raise

    return keeping


def _without_frames(error: BaseException) -> BaseException:
    """A copy, which keeps nothing alive that was on the stack, such as the memory of tensors."""
    try:
        return copy.copy(error)
    except Exception:
        return error  # of a class that cannot be copied


def last_error() -> BaseException | None:
    """The last exception that an operation has raised inside a ``tf.function``, or inside ``fit``; None: none has.

    TensorFlow raises a ``tf.errors.OpError`` of its own there, whose text has the class, the words and the traceback of
    this one; it has no traceback itself.
    """
    return _last[0] if _last else None


def empty(shape: Sequence[int], dtype: tf.DType) -> Any:
    """New arena memory for a result."""
    return commlib.empty(tuple(shape), DTYPES[dtype])
