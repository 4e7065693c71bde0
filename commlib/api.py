# SPDX-License-Identifier: Apache-2.0
"""The functions of ``import commlib``: named buffers in, the same buffers summed or averaged over all processes out.

What a *tensor* may be here: a NumPy array, anything with the buffer protocol (bytearray, array.array, memoryview), or
anything on the CPU with DLPack (a torch tensor, …). C-contiguous, any shape (0-d and zero-size included), any
alignment, of dtype bool, uint8, int8, int16, int32, int64, float16, bfloat16 (``ml_dtypes``), float32 or float64. A
buffer in flight is held by the operation and must not be written; it cannot be resized or freed.

Numerics: see :func:`push_pull`. Errors are the classes of :mod:`commlib.errors`. All functions release the GIL while
they wait and see Ctrl-C within 0.1 s; all may be called from any thread.
"""

from __future__ import annotations

import atexit
import enum
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from commlib import errors
from commlib._core import Handle
from commlib.config import Config
from commlib.control.interrupt import Stop, uninterrupted
from commlib.session import FORKED, Session

T = TypeVar("T")


class ReduceOp(enum.IntEnum):
    """How the tensors of the ranks become one, element by element."""

    Average = 0  #: sum / number of ranks; integers floor (as ``//``), bool has none
    Sum = 1  #: integers wrap as NumPy's do; bool: or
    Min = 2  #: NaN where any rank has one, as numpy.minimum; bool: and
    Max = 3  #: NaN where any rank has one, as numpy.maximum; bool: or
    Product = 4  #: integers wrap; bool: and


Average, Sum, Min, Max, Product = ReduceOp

AT_EXIT_S = 1.0
_UNPICKLABLE = -1  # in place of a length

_session: Session | None = None
# In a forked child: the session of its parent. Kept, so that nothing of the parent is given back, and never used.
_parents: Session | None = None
# Guards the making and ending of _session. A signal handler may shut down what its thread is just joining.
_lock = threading.RLock()


def _forget_in_child() -> None:
    global _session, _parents, _lock
    _lock = threading.RLock()  # a thread that exists in the parent only may hold the other one
    if _session is not None:
        _parents, _session = _session, None


os.register_at_fork(after_in_child=_forget_in_child)


def init(config: Config | None = None) -> None:
    """Join the job: connect to all other ranks. Blocks until all are there.

    `config` defaults to ``Config.from_environment()``: ``COMMLIB_*``, else what torchrun, mpirun, Slurm or BytePS's
    launcher set, else a job of one process. A second call does nothing. ``shutdown`` runs at exit by itself.

    Raises ConfigError for settings that contradict each other, OperationTimeout naming who is missing after
    ``COMMLIB_CONNECT_TIMEOUT_S``, AuthenticationError where the job's secret differs, NotInitializedError without a
    `config` in a forked child of a process that had called it.
    """
    with _lock:
        if _session is not None:
            return
        if config is None and _parents is not None:
            raise errors.NotInitializedError(FORKED)  # its place in the job is its parent's
        if not isinstance(config, Config | None):
            raise TypeError(f"config is a {type(config).__name__}; expected a commlib.Config, or nothing")
        settings = Config.from_environment() if config is None else config
        uninterrupted(lambda stop: _join(settings, stop), _leave)


def _join(config: Config, stop: Stop) -> None:
    global _session
    _session = Session(config, stop)


def _leave() -> None:
    global _session
    session, _session = _session, None
    if session is not None:
        session.shutdown()


def shutdown() -> None:
    """Leave the job in order. Blocks until what others still need has left this process, at most about 10 s.

    Others go on without this rank as long as they need nothing of it: what it has not submitted fails there with
    PeerLostError. Operations in flight here are waited for up to 0.5 s. If there still are some they fail, here with
    NotInitializedError, and the job ends for all ranks. A second call does nothing; ``init`` may be called again for
    another job.
    """
    with _lock:
        if _session is not None:
            uninterrupted(lambda stop: _leave(), lambda: None)


def _shutdown_at_exit() -> None:
    # Who holds the lock for longer is a daemon thread that is still joining, and about to end with the process.
    if _lock.acquire(timeout=AT_EXIT_S):
        shutdown()
        _lock.release()


atexit.register(_shutdown_at_exit)


def is_initialized() -> bool:
    """True between ``init`` and ``shutdown``, in the process that called them. Does not block."""
    return _session is not None


def session() -> Session:
    """The session of this process, for adapters. Raises NotInitializedError before ``init`` and after ``shutdown``.

    A process that was forked from one that had called ``init`` has none.
    """
    if _session is None and _parents is not None:
        raise errors.NotInitializedError(FORKED)
    if _session is None:
        raise errors.NotInitializedError("call commlib.init() first (or again, after commlib.shutdown())")
    return _session


def rank() -> int:
    """This worker's number in the job, 0 … size() − 1. Does not block."""
    return session().wiring.rank


def size() -> int:
    """Number of workers in the job. Does not block."""
    return session().wiring.size


def local_rank() -> int:
    """This worker's number on its host, 0 … local_size() − 1. Does not block."""
    return session().wiring.local_rank


def local_size() -> int:
    """Number of workers on this host. Does not block."""
    return session().wiring.local_size


def node_rank() -> int:
    """This host's number in the job, 0 … num_nodes() − 1; hosts are numbered by their lowest rank. Does not block."""
    return session().wiring.node


def num_nodes() -> int:
    """Number of hosts with workers. Does not block."""
    return session().wiring.num_nodes


def num_servers() -> int:
    """Number of dedicated summation servers. Does not block."""
    return session().wiring.num_servers


def push_pull(
    tensor: Any,
    *,
    name: str | None = None,
    op: int = Average,
    out: Any = None,
    priority: int = 0,
    timeout: float | None = None,
) -> Any:
    """Combine `tensor` over all ranks and return the result: `out` if given, else a new NumPy array in the arena.

    All ranks must call it with the same shape, dtype and `op` under the same `name`; a rank's n-th use of a name meets
    the n-th of the others. Without a name, operations meet in program order. `out` has the tensor's shape and dtype
    and is the same memory or does not overlap it. `priority`: of several in flight, the highest moves first. `timeout`
    in seconds (None: ``COMMLIB_OPERATION_TIMEOUT_S``). Blocks until the result is there.

    The result is the same bits on all ranks, and depends only on the inputs and on which rank is on which host: each
    host's ranks are combined in local order, then the hosts in order. 16-bit floats accumulate in float32 and are
    rounded once per level. The name is BytePS's; the operation is MPI_Allreduce's.

    Raises MismatchError on all ranks when they disagree, DuplicateNameError when the name is in flight here,
    PeerLostError when a member is lost, OperationTimeout (the operation stays in flight), UnsupportedError for a
    dtype, layout or device that cannot be moved, NotInitializedError.
    """
    return (_session or session()).worker.push_pull_now(tensor, name, op, out, False, priority, timeout)


def push_pull_(
    tensor: T, *, name: str | None = None, op: int = Average, priority: int = 0, timeout: float | None = None
) -> T:
    """As :func:`push_pull`, in place: `tensor`, which must be writable, gets the result and is returned."""
    result: T = (_session or session()).worker.push_pull_now(tensor, name, op, None, True, priority, timeout)
    return result


def push_pull_async(
    tensor: Any, *, name: str | None = None, op: int = Average, out: Any = None, priority: int = 0
) -> Handle:
    """As :func:`push_pull`, but returns at once. ``handle.wait()`` gives the result; the handle may also be awaited.

    Blocks only for the first use of a name (one round trip to the scheduler; it does not wait for other ranks).
    """
    return (_session or session()).worker.push_pull(tensor, name, op, out, False, priority)


def push_pull_async_(tensor: Any, *, name: str | None = None, op: int = Average, priority: int = 0) -> Handle:
    """As :func:`push_pull_async`, in place: the handle's result is `tensor`."""
    return (_session or session()).worker.push_pull(tensor, name, op, None, True, priority)


def push_pull_group_async_(
    tensors: Iterable[T], *, name: str | None = None, op: int = Average, priority: int = 0
) -> Handle:
    """As :func:`push_pull_async_` for many tensors at once, as one operation under one name: ``handle.wait()`` gives a
    list of them.

    All of one dtype, writable; their shapes are what ranks must agree on, in order. They are copied into one buffer of
    the arena before the call returns, and get their results in the ``wait()`` that returns first: until then they keep
    what they hold. Worth it for tensors of up to some 100 KiB, for which the call costs more than the bytes. Blocks
    for that copy, and for the first use of a name. Raises ValueError for no tensors, and for several dtypes. The sums
    are the same bits as one by one. What Horovod calls a grouped allreduce.
    """
    return (_session or session()).worker.push_pull_group(tensors, name, op, priority)


def push_pull_group_(
    tensors: Iterable[T],
    *,
    name: str | None = None,
    op: int = Average,
    priority: int = 0,
    timeout: float | None = None,
) -> list[T]:
    """As :func:`push_pull_group_async_`, but waits: blocks until the results are there, and returns the tensors."""
    return (_session or session()).worker.push_pull_group_now(tensors, name, op, priority, timeout)


def push_pull_ptr(
    ptr: int,
    count: int,
    dtype: Any,
    *,
    out_ptr: int | None = None,
    name: str | None = None,
    op: int = Average,
    priority: int = 0,
    owner: Any = None,
    shape: Sequence[int] | None = None,
) -> Handle:
    """As :func:`push_pull_async` on raw memory, for adapters: `count` elements of `dtype` (a name, as ``"bfloat16"``)
    at address `ptr`, the result at `out_ptr` (None: in place).

    The memory must stay valid until the operation has ended; `owner`, any object, is kept alive until then and is the
    handle's result. `shape` is what ranks must agree on; None: `count` alone. Does not block, but for a new name.
    """
    return session().worker.push_pull_ptr(ptr, count, dtype, out_ptr, name, op, priority, owner, shape)


def declare(names: Sequence[tuple[str, int]]) -> None:
    """Number names before their first use: pairs of a name and the bytes of its tensor, all in one round trip.

    Optional: it spares the first use of each name a round trip. Waits for the scheduler, not for other ranks. Raises
    PeerLostError when the scheduler is lost.
    """
    session().declare_many(names)


def poll(handle: Handle) -> bool:
    """True when the operation has ended, with a result or an error. Does not block."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """``handle.wait()``: block until the operation has ended, and return its result or raise its error."""
    return handle.wait()


def broadcast(tensor: Any, root_rank: int, *, name: str | None = None) -> npt.NDArray[Any]:
    """A new array with what `tensor` holds on rank `root_rank` (a global rank). Shapes and dtypes are the same on all
    ranks.

    Blocks until it is here; the root until all have read. Errors as :func:`push_pull`. MPI_Bcast's semantics.
    """
    current = session()
    source = tensor if isinstance(tensor, np.ndarray) else np.asarray(tensor)
    result = current.empty(source.shape, source.dtype)
    if current.rank == root_rank:
        np.copyto(result, source)
    return broadcast_(result, root_rank, name=name)


def broadcast_(tensor: T, root_rank: int, *, name: str | None = None, timeout: float | None = None) -> T:
    """As :func:`broadcast`, in place: `tensor` is overwritten on all ranks but the root, where it may be read-only."""
    result: T = session().worker.broadcast(tensor, root_rank, name, 0, timeout)
    return result


def broadcast_object(obj: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """The root's object on every rank, by pickle: only among processes that trust each other, as those of one job do.

    Two operations: its length, then its bytes; `name` may be used again for an object of another size. Returns `obj`
    itself at the root. Blocks. Errors as :func:`push_pull`. What cannot be pickled raises pickle's error at the root,
    and CommlibError on the other ranks.
    """
    current = session()
    is_root = current.rank == root_rank
    data, error = None, None
    if is_root:
        try:
            data = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
        except Exception as caught:  # the others wait for something, and must not wait for ever
            error = caught
    length = np.array([_UNPICKLABLE if data is None else data.size], np.int64)
    broadcast_(length, root_rank, name=None if name is None else f"{name}.length")
    if error is not None:
        raise error
    if length[0] == _UNPICKLABLE:
        raise errors.CommlibError(f"rank {root_rank} cannot pickle its object; what it raised says why")
    if data is None:
        data = current.empty(int(length[0]), np.uint8)
    broadcast_(data, root_rank, name=None if name is None else f"{name}.data")
    return obj if is_root else pickle.loads(data.data)


def barrier(timeout: float | None = None) -> None:
    """Block until all ranks are here. `timeout` in seconds, then OperationTimeout. MPI_Barrier's semantics."""
    session().worker.barrier(timeout)


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> npt.NDArray[Any]:
    """A new uninitialised array in this rank's arena, 64-byte aligned: operations on it copy nothing on one host.

    It is an ordinary NumPy array in every other way, and stays valid after ``shutdown``. When the arena
    (``COMMLIB_ARENA_BYTES``) is full it lies in ordinary memory. Does not block. Raises NotInitializedError.
    """
    return session().empty(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: Any = np.float32) -> npt.NDArray[Any]:
    """As :func:`empty`, filled with zeros."""
    array = empty(shape, dtype)
    array.fill(0)
    return array


def get_push_pull_speed() -> tuple[float, float]:
    """(unix seconds, MB/s): bytes of tensors whose operations have finished here since the last call, per second.

    Does not block. The name is BytePS's.
    """
    return session().speed()


def get_include() -> str:
    """The folder of ``commlib.h``, for C and C++ extensions, and of what ``cimport commlib`` needs. Does not block."""
    return str(Path(__file__).parent / "include")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    np: int,
    servers: int = 0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call ``fn(*args)`` in `np` new worker processes on this host and return their results, by rank.

    `fn` must be importable by the new processes (a function of a module), or cloudpickle be installed. The processes
    are started afresh, with `env` added to their environment, `servers` dedicated servers beside them. Blocks until
    all have ended. What a rank raises is raised here; the others are then ended as ``commlib run`` does.
    """
    from commlib.launch.function import run_function

    return run_function(fn, args, np=np, servers=servers, env=env)
