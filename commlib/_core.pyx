# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, auto_pickle=False, freethreading_compatible=False
"""The binding: checks arguments, drops the GIL, calls one thing of the core. What it does not know it asks Session."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetInterrupt
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy
from libcpp cimport bool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.vector cimport vector

from commlib._native cimport *

import threading
import time

from commlib import errors


cdef extern from "Python.h":
    int PyObject_CheckBuffer(object obj)
    int PyObject_GetBuffer(object obj, Py_buffer* view, int flags) except -1
    void PyBuffer_Release(Py_buffer* view)
    int PyBuffer_FillInfo(Py_buffer* view, object exporter, void* buf, Py_ssize_t bytes, int readonly,
                          int flags) except -1
    int PyBUF_FORMAT
    int PyBUF_ND
    int PyBUF_C_CONTIGUOUS
    int PyBUF_STRIDES
    int PyBUF_WRITABLE


# The layout of DLPack's unversioned capsule (https://dmlc.github.io/dlpack/latest/c_api.html).
cdef struct DLTensor:
    void* data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset


cdef int kCpuDevice = 1

DTYPE_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OP_NAMES = ("average", "sum", "min", "max", "product")
COLLECTIVE_NAMES = ("push_pull", "broadcast", "barrier", "accumulate")
cdef dict DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPE_NAMES)}
cdef int[10] ITEM_BYTES = [1, 1, 1, 2, 4, 8, 2, 2, 4, 8]
cdef int kUint8 = 1
cdef int kBfloat16 = 7
cdef int kAverage = 0
cdef int kSum = 1
cdef int kReduce = 0
cdef int kBroadcast = 1
cdef int kBarrier = 2
cdef int kAccumulate = 3  # has no unnamed ones
cdef int kUnnamed = 1024
cdef uint64_t kMaxBytes = <uint64_t>1 << 47
cdef uint64_t kBriefBytes = 16384
# Ctrl-C is seen between waits of this length.
cdef int kSliceMs = 100


def dtype_number(dtype) -> int:
    """The number in the core of a dtype given by number or name; UnsupportedError if it is none of the ten."""
    if isinstance(dtype, int) and 0 <= dtype < 10:
        return dtype
    number = DTYPE_NUMBERS.get(str(dtype))
    if number is None:
        raise _unsupported_dtype(dtype)
    return number


def _unsupported_dtype(dtype):
    text = f"dtype {dtype} is not supported; commlib moves {', '.join(DTYPE_NAMES)}"
    if not getattr(dtype, "isnative", True):
        text += "; convert it to this machine's byte order first, with astype(dtype.newbyteorder('='))"
    elif getattr(dtype, "kind", "") == "c":
        text += "; of complex numbers, send the real and imaginary parts"
    return errors.UnsupportedError(text)


cdef int op_number(object op) except -1:
    cdef int number
    try:
        number = PyNumber_Index(op)  # a plain conversion would take 1.5 for 1
    except TypeError:
        raise TypeError(f"op is {op!r}; expected commlib.Average, Sum, Min, Max or Product") from None
    if number < 0 or number > 4:
        raise ValueError(f"op is {op!r}; expected commlib.Average, Sum, Min, Max or Product")
    return number


cdef int check_average(int dtype, int op) except -1:
    if dtype == 0 and op == kAverage:
        raise errors.UnsupportedError("bool has no average; use op=Sum or Max (or), Product or Min (and)")
    return 0


@cython.final
@cython.no_gc  # the memory must outlive whoever still reads it, also in a reference cycle; only operations hold one
cdef class Buffer:
    """Somebody's contiguous CPU memory, held from creation to destruction: it cannot be moved or freed meanwhile."""

    cdef Py_buffer view
    cdef bint has_view
    cdef void* data
    cdef uint64_t count
    cdef int dtype
    cdef int ndim
    cdef const int64_t* dims  # the shape, where it lies: in the view, in DLPack's tensor, or in `given`
    cdef vector[int64_t] given
    cdef object owner  # whose memory it is, or what the caller says keeps it alive
    cdef object capsule  # of DLPack
    cdef Buffer target  # of the operation whose source this is: held for as long
    cdef bint is_group  # `dims` has the shapes of several tensors, before each −1 − its number of dimensions

    def __dealloc__(self):
        if self.has_view:
            PyBuffer_Release(&self.view)

    cdef uint64_t nbytes(self):
        return self.count * ITEM_BYTES[self.dtype]

    @staticmethod
    cdef Buffer of(object tensor, bint writable):
        cdef Buffer self = Buffer.__new__(Buffer)
        self.owner = tensor
        if PyObject_CheckBuffer(tensor):
            self.take_buffer(tensor, writable)
        elif hasattr(tensor, "__dlpack__"):
            self.take_dlpack(tensor)
        else:
            raise errors.UnsupportedError(
                f"a {type(tensor).__name__} has neither the buffer protocol nor DLPack; pass a NumPy array, "
                "a memoryview or a CPU tensor, or use push_pull_ptr"
            )
        return self

    @staticmethod
    cdef Buffer at(uintptr_t address, uint64_t count, int dtype, object owner):
        cdef Buffer self = Buffer.__new__(Buffer)
        if address == 0 and count != 0:
            raise ValueError("the address of the buffer is 0")
        if count > kMaxBytes // ITEM_BYTES[dtype]:
            raise ValueError(f"{count} elements of {DTYPE_NAMES[dtype]} are more than memory has addresses")
        self.data = <void*>address
        self.count = count
        self.dtype = dtype
        self.give_shape((count,))
        self.owner = owner
        return self

    cdef int give_shape(self, object shape) except -1:
        self.given.clear()
        for dim in shape:
            self.given.push_back(dim)
        self.ndim = <int>self.given.size()
        self.dims = self.given.data()
        return 0

    cdef tuple shape(self):
        if self.is_group:
            return self.shapes()
        return tuple([self.dims[i] for i in range(self.ndim)])

    cdef tuple shapes(self):
        cdef list found = []
        for i in range(self.ndim):
            if self.dims[i] < 0:
                found.append([])
            else:
                (<list>found[-1]).append(self.dims[i])
        return tuple([tuple(one) for one in found])

    cdef bint has_shape(self, const vector[int64_t]& shape):
        cdef int i
        if <size_t>self.ndim != shape.size():
            return False
        for i in range(self.ndim):
            if self.dims[i] != shape[i]:
                return False
        return True

    cdef int take_buffer(self, object tensor, bint writable) except -1:
        cdef int flags = PyBUF_FORMAT | PyBUF_ND | PyBUF_C_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0)
        cdef int override = -1
        try:
            PyObject_GetBuffer(tensor, &self.view, flags)
        except (BufferError, ValueError) as error:
            # NumPy cannot export ml_dtypes.bfloat16; its bits it can.
            if getattr(getattr(tensor, "dtype", None), "name", None) != "bfloat16":
                raise self.why_refused(tensor, writable, error) from None
            override = kBfloat16
            bits = tensor.view("int16")
            try:
                PyObject_GetBuffer(bits, &self.view, flags)
            except (BufferError, ValueError) as error:
                raise self.why_refused(bits, writable, error) from None
        self.has_view = True
        self.dtype = override if override >= 0 else dtype_of_format(self.view.format, self.view.itemsize)
        if self.dtype < 0:
            raise _unsupported_dtype(getattr(tensor, "dtype", None) or self.view.format.decode("ascii", "replace"))
        self.data = self.view.buf
        self.count = self.view.len // self.view.itemsize
        self.ndim = self.view.ndim
        self.dims = <const int64_t*>self.view.shape  # Py_ssize_t has 64 bits wherever commlib runs
        return 0

    cdef object why_refused(self, object tensor, bint writable, object error):
        cdef Py_buffer any_view
        try:
            PyObject_GetBuffer(tensor, &any_view, PyBUF_FORMAT | PyBUF_STRIDES)
        except (BufferError, ValueError):
            return _unsupported_dtype(getattr(tensor, "dtype", f"of this {type(tensor).__name__}"))
        PyBuffer_Release(&any_view)
        try:
            PyObject_GetBuffer(tensor, &any_view, PyBUF_FORMAT | PyBUF_ND | PyBUF_C_CONTIGUOUS)
        except (BufferError, ValueError):
            return errors.UnsupportedError(
                f"the buffer is not C-contiguous ({error}); pass a contiguous copy, as numpy.ascontiguousarray makes"
            )
        PyBuffer_Release(&any_view)
        return errors.UnsupportedError(f"the buffer is read-only, but the result is to be written there ({error})")

    cdef int take_dlpack(self, object tensor) except -1:
        device = tensor.__dlpack_device__() if hasattr(tensor, "__dlpack_device__") else (kCpuDevice, 0)
        if int(device[0]) != kCpuDevice:
            raise errors.UnsupportedError("the tensor is not in CPU memory; copy it to the CPU first")
        try:
            capsule = tensor.__dlpack__()
        except BufferError as error:
            raise errors.UnsupportedError(f"the {type(tensor).__name__} does not give its memory: {error}") from None
        if not PyCapsule_IsValid(capsule, "dltensor"):
            raise errors.UnsupportedError(f"the {type(tensor).__name__} gave no DLPack capsule that commlib can read")
        # The capsule is not consumed: its own destructor gives the memory back when this object goes.
        self.capsule = capsule
        cdef DLTensor* dl = <DLTensor*>PyCapsule_GetPointer(capsule, "dltensor")
        self.dtype = dtype_of_dlpack(dl.code, dl.bits, dl.lanes)
        if self.dtype < 0:
            raise _unsupported_dtype(getattr(tensor, "dtype", "of DLPack"))
        cdef int i
        cdef int64_t expected = 1
        cdef bint contiguous = True
        self.count = 1
        for i in range(dl.ndim - 1, -1, -1):
            if dl.strides != NULL and dl.shape[i] > 1 and dl.strides[i] != expected:
                contiguous = False
            expected *= dl.shape[i]
            self.count *= <uint64_t>dl.shape[i]
        if not contiguous and self.count != 0:
            raise errors.UnsupportedError("the tensor is not C-contiguous; pass a contiguous copy")
        self.ndim = dl.ndim
        self.dims = dl.shape
        self.data = <char*>dl.data + dl.byte_offset
        return 0


cdef int dtype_of_format(const char* format, Py_ssize_t itemsize) noexcept:
    """The dtype of a PEP 3118 format in native byte order, −1 if it is not one of the ten."""
    if format == NULL:
        return kUint8
    cdef int i = 1 if format[0] in b"@=<" else 0
    cdef char kind = format[i]
    if kind == 0 or format[i + 1] != 0:
        return -1
    if kind == b"?":
        return 0
    if kind in b"bhilqn":
        return 2 if itemsize == 1 else 3 if itemsize == 2 else 4 if itemsize == 4 else 5 if itemsize == 8 else -1
    if kind in b"BHILQN":
        return kUint8 if itemsize == 1 else -1
    if kind == b"e":
        return 6
    if kind == b"f":
        return 8
    if kind == b"d":
        return 9
    return -1


cdef int dtype_of_dlpack(int code, int bits, int lanes) noexcept:
    if lanes != 1:
        return -1
    if code == 6 and bits == 8:
        return 0
    if code == 1:
        return kUint8 if bits == 8 else -1
    if code == 0:
        return 2 if bits == 8 else 3 if bits == 16 else 4 if bits == 32 else 5 if bits == 64 else -1
    if code == 4 and bits == 16:
        return kBfloat16
    if code == 2:
        return 6 if bits == 16 else 8 if bits == 32 else 9 if bits == 64 else -1
    return -1


@cython.final
cdef class Group:
    """Tensors that are summed as one: laid one behind the other in one block, and fetched from there afterwards."""

    cdef list buffers  # what holds the tensors' memory
    cdef vector[char*] addresses
    cdef vector[size_t] sizes
    cdef Buffer block
    cdef object lock  # they are fetched once, whoever waits
    cdef bint is_over

    cdef int add(self, object tensor) except -1:
        cdef Buffer buffer = Buffer.of(tensor, True)
        cdef Buffer first = self.buffers[0] if self.buffers else buffer
        if buffer.dtype != first.dtype:
            raise ValueError(f"a group is of one dtype: its first tensor is {DTYPE_NAMES[first.dtype]}, "
                             f"no. {len(self.buffers)} is {DTYPE_NAMES[buffer.dtype]}")
        self.buffers.append(buffer)
        self.addresses.push_back(<char*>buffer.data)
        self.sizes.push_back(buffer.nbytes())
        return 0

    cdef int lay(self, object session) except -1:
        """The tensors into a new block, which speaks of all of them."""
        cdef Buffer buffer
        cdef size_t nbytes = 0
        cdef vector[int64_t] shapes
        for size in self.sizes:
            nbytes += size
        self.block = Buffer.of(session.empty(nbytes, "uint8"), True)
        self.block.dtype = (<Buffer>self.buffers[0]).dtype
        self.block.count = nbytes // ITEM_BYTES[self.block.dtype]
        for buffer in self.buffers:
            shapes.push_back(-1 - buffer.ndim)
            shapes.insert(shapes.end(), buffer.dims, buffer.dims + buffer.ndim)
        self.block.is_group = True
        self.block.given.swap(shapes)
        self.block.ndim, self.block.dims = <int>self.block.given.size(), self.block.given.data()
        with nogil:
            self.move(True)
        return 0

    cdef void move(self, bint into) noexcept nogil:
        cdef char* at = <char*>self.block.data
        cdef size_t i
        for i in range(self.sizes.size()):
            if into:
                memcpy(at, self.addresses[i], self.sizes[i])
            else:
                memcpy(self.addresses[i], at, self.sizes[i])
            at += self.sizes[i]

    cdef int fetch(self) except -1:
        """What has become of them, to where they come from."""
        with self.lock:
            if not self.is_over:
                with nogil:
                    self.move(False)
                self.is_over = True
        return 0


@cython.final
cdef class Key:
    """A name: the core's record, and what was last said of it, so that it is said again without work."""

    cdef str name
    cdef bint is_named
    cdef shared_ptr[CppKeyRecord] record
    cdef shared_ptr[CppOperation] last
    cdef int collective, op, dtype, root
    cdef vector[int64_t] shape
    cdef str compression
    cdef uint64_t hash  # of the signature
    cdef list history  # (first round, signature): enough to explain a recent mismatch

    cdef bint says(self, int collective, int op, Buffer buffer, int root, str compression):
        """Is this what was said last time?"""
        return (self.history is not None and collective == self.collective and op == self.op
                and buffer.dtype == self.dtype and root == self.root and buffer.has_shape(self.shape)
                and (compression is self.compression or compression == self.compression))

    cdef int say(self, object session, int collective, int op, Buffer buffer, int root, str compression) except -1:
        """Another signature from now on. Only by who has taken the key."""
        signature = (COLLECTIVE_NAMES[collective], OP_NAMES[op] if collective == kReduce else "",
                     DTYPE_NAMES[buffer.dtype], buffer.shape(), root if collective == kBroadcast else None, compression)
        # All that can raise, if only because a signal comes, is done before anything is changed: a new signature with
        # the old hash would be taken for agreement.
        cdef uint64_t new_hash = session.hash_of(signature)
        cdef list history = [] if self.history is None else self.history[-7:]
        history.append((self.record.get().rounds() + 1, signature))
        self.hash, self.history = new_hash, history
        self.collective, self.op, self.dtype, self.root = collective, op, buffer.dtype, root
        self.shape.assign(buffer.dims, buffer.dims + buffer.ndim)
        self.compression = compression
        return 0


@cython.final
@cython.no_gc_clear
cdef class Handle:
    """An operation in flight. It holds its buffers; dropping it does not cancel anything.

    May be waited for from any thread, polled, and awaited in any asyncio event loop.
    """

    cdef shared_ptr[CppOperation] operation
    cdef Worker worker
    cdef object result
    cdef Key key
    cdef Group group  # whose tensors get the result when somebody waits; None of one tensor
    cdef bint driving  # the thread that is about to wait carries it out

    def __dealloc__(self):
        # Nobody will wait for it or look at it any more: the loop takes over.
        if self.operation.get() != NULL and self.worker is not None and self.worker.core != NULL:
            self.leave()

    cdef void leave(self) noexcept:
        """What nobody but this handle's user carries out goes to the loop."""
        cdef CppWorker* core = self.worker.core
        if not self.operation.get().completion.done() and not core.is_forked():
            if self.driving or core.take(self.operation.get()[0]):
                self.driving = False
                core.hand_over(self.operation.get()[0])

    @property
    def name(self) -> str:
        """The operation's name; one that begins with a NUL where none was given."""
        return self.key.name

    def done(self) -> bool:
        """True when the operation has ended, with a result or with an error. Does not block."""
        return self.worker.core.poll(self.operation.get()[0])

    def wait(self, timeout=None):
        """Block until the operation has ended and return its result: the array that was given, or the new one.

        `timeout` in seconds; None: the job's COMMLIB_OPERATION_TIMEOUT_S. The GIL is released and Ctrl-C is seen within
        0.1 s. Raises what the operation failed with, or OperationTimeout, which names who is late: the operation then
        stays in flight, holds its buffers, and may be waited for again.
        """
        if not self.worker.core.poll(self.operation.get()[0]):
            self.block(self.worker.checked_timeout(timeout))
        self.worker.reap()
        self.worker.check_outcome(self.operation.get(), self.key)
        cdef Group group = self.group  # another thread may be here, too
        if group is not None:
            group.fetch()
            self.group = None
        return self.result

    cdef int block(self, double timeout) except -1:
        cdef double deadline = -1  # what ends within the first slice needs none
        cdef double left = timeout
        cdef int slice_ms
        cdef bint done = False
        cdef CppWorker* core = self.worker.core
        # This thread; another one may wait, too.
        cdef bint driving = self.driving or (not core.is_forked() and core.take(self.operation.get()[0]))
        self.driving = False
        try:
            while True:
                if deadline < 0 and left * 1000 <= kSliceMs:
                    deadline = time.monotonic() + left
                slice_ms = kSliceMs if left * 1000 > kSliceMs else max(<int>(left * 1000), 0)
                with nogil:
                    if driving:
                        done = core.drive(self.operation.get()[0], slice_ms)
                    else:
                        done = core.wait(self.operation.get()[0], slice_ms)
                if done:
                    return 0
                PyErr_CheckSignals()
                if core.is_forked():
                    raise self.worker.session.refusal(<int>Errc.kNotInitialized, None)
                if deadline < 0:
                    deadline = time.monotonic() + left - kSliceMs / 1000.0
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.worker.session.timed_out(self, self.name, self.operation.get().round, timeout)
        finally:
            if driving and not done and not core.is_forked():
                core.hand_over(self.operation.get()[0])

    def exception(self):
        """What the operation failed with, None if it succeeded. Raises OperationTimeout if it has not ended yet."""
        try:
            self.wait(0)
        except errors.OperationTimeout as error:
            if not self.done():
                raise
            return error
        except errors.CommlibError as error:
            return error
        return None

    def __await__(self):
        return self.worker.session.wait_in_event_loop(self).__await__()

    def subscribe(self, CompletionQueue queue, uint64_t token):
        """Have `token` put into `queue` when the operation ends."""
        self.leave()
        self.operation.get().completion.subscribe(queue.queue, token)


@cython.final
cdef class CompletionQueue:
    """Tokens of operations that have ended, and a descriptor that is readable when there are any."""

    cdef shared_ptr[CppCompletionQueue] queue

    def __cinit__(self):
        self.queue = make_shared[CppCompletionQueue]()

    def fileno(self) -> int:
        return self.queue.get().event.descriptor()

    def take(self) -> list:
        cdef vector[uint64_t] tokens
        self.queue.get().event.drain()
        self.queue.get().tokens.drain(&tokens)
        return list(tokens)


@cython.final
@cython.no_gc_clear  # gives its memory back to the worker
cdef class ArenaBlock:
    """Memory of the arena, as a buffer of bytes. Back in the arena when nothing refers to it any more."""

    cdef Worker worker
    cdef void* data
    cdef Py_ssize_t bytes

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.bytes, 0, flags)

    def __len__(self):
        return self.bytes

    def __dealloc__(self):
        # A forked child must not give back what is the parent's.
        if self.data != NULL and not self.worker.core.is_forked():
            with nogil:
                self.worker.core.free(self.data)


@cython.final
@cython.no_gc_clear  # C++ depends on it as long as an operation is in flight
cdef class Worker:
    """This process's part of the job. Made by Session from what the control plane has connected."""

    cdef CppWorker* core
    cdef dict keys
    cdef list unnamed_keys  # Key or None, by collective and number
    cdef readonly object session
    cdef double default_timeout
    cdef uint64_t[3] unnamed
    cdef uint64_t partition_bytes
    cdef int size

    def __cinit__(self, session, wiring, *, double default_timeout, int route, int log_level):
        self.keys = {}
        self.unnamed_keys = [None] * (3 * kUnnamed)
        self.session = session
        self.default_timeout = default_timeout
        self.size = wiring.size
        self.partition_bytes = wiring.parameters.partition_bytes
        cdef WorkerOptions options
        options.rank, options.size = wiring.rank, wiring.size
        options.local_rank, options.local_size = wiring.local_rank, wiring.local_size
        options.node, options.nodes, options.servers = wiring.node, wiring.num_nodes, wiring.num_servers
        options.node_of_rank = [member.node for member in wiring.members]
        local = sorted((m for m in wiring.members if m.node == wiring.node), key=lambda m: m.local_rank)
        options.local_ranks = [member.rank for member in local]
        options.roots = roots_of(wiring)
        options.ranks_per_host = wiring.ranks_per_node
        options.table_fd = wiring.table_fd
        options.arena_fds = wiring.arena_fds
        options.arena_bytes = wiring.arena_bytes
        options.local_pids = wiring.local_pids
        options.local_sockets = [wiring.local_socket_fds.get(rank, -1) for rank in range(wiring.local_size)]
        options.streams = streams_of(wiring)
        options.partition_bytes = wiring.parameters.partition_bytes
        options.credit_bytes = wiring.parameters.credit_bytes
        options.peer_timeout_ms = <int64_t>(wiring.parameters.peer_timeout_s * 1000)
        options.route = <LocalRoute>route
        options.log_level = log_level
        self.core = new CppWorker(options)

    def __dealloc__(self):
        # C++ does nothing of consequence here in a forked child, and gives nothing back that another class owns.
        if self.core != NULL:
            with nogil:
                del self.core

    # Operations ------------------------------------------------------------------------------------------------------

    def push_pull(self, tensor, name, op, out, bint in_place, int priority, str compression=""):
        """Check, submit, and return the Handle."""
        cdef int which = op_number(op)
        cdef Buffer source = self.prepared(tensor, which, out, in_place)
        return self.begin(source, self.result_of(source, tensor), name, kReduce, which, 0, priority, compression)

    def push_pull_now(self, tensor, name, op, out, bint in_place, int priority, timeout):
        """The same, carried out by the calling thread to its end; returns the result."""
        cdef int which = op_number(op)
        cdef Buffer source = self.prepared(tensor, which, out, in_place)
        return self.carry_out(source, self.result_of(source, tensor), name, kReduce, which, 0, priority, timeout)

    def push_pull_group(self, tensors, name, op, int priority):
        """The same for several tensors of one dtype, in place, as one operation."""
        cdef int which = op_number(op)
        cdef list given = list(tensors)
        cdef Group group = self.group_of(given, which)
        cdef Handle handle = self.begin(group.block, given, name, kReduce, which, 0, priority, "")
        handle.group = group
        return handle

    def push_pull_group_now(self, tensors, name, op, int priority, timeout):
        cdef int which = op_number(op)
        cdef list given = list(tensors)
        cdef Group group = self.group_of(given, which)
        self.carry_out(group.block, given, name, kReduce, which, 0, priority, timeout, group)
        group.fetch()
        return given

    cdef Group group_of(self, list tensors, int op):
        if not tensors:
            raise ValueError("a group has at least one tensor")
        cdef Group group = Group.__new__(Group)
        group.buffers, group.lock = [], threading.Lock()
        for tensor in tensors:
            group.add(tensor)
        check_average((<Buffer>group.buffers[0]).dtype, op)
        group.lay(self.session)
        return group

    def push_pull_ptr(self, uintptr_t ptr, uint64_t count, dtype, out_ptr, name, op, int priority, owner,
                      shape=None, str compression=""):
        cdef int number = dtype_number(dtype)
        cdef int which = op_number(op)
        check_average(number, which)
        cdef Buffer source = Buffer.at(ptr, count, number, owner)
        if out_ptr is not None:
            source.target = Buffer.at(<uintptr_t>out_ptr, count, number, owner)
            check_target(source, source.target)
        if shape is not None:
            source.give_shape(shape)
        return self.begin(source, owner, name, kReduce, which, 0, priority, compression)

    def broadcast(self, tensor, int root, name, int priority, timeout):
        """In place, to its end; only the root's buffer may be read-only."""
        self.check_root(root)
        cdef Buffer buffer = Buffer.of(tensor, root != self.session.rank)
        return self.carry_out(buffer, tensor, name, kBroadcast, kSum, root, priority, timeout)

    def broadcast_ptr(self, uintptr_t ptr, uint64_t count, dtype, int root, name, int priority, owner, shape=None):
        self.check_root(root)
        cdef Buffer buffer = Buffer.at(ptr, count, dtype_number(dtype), owner)
        if shape is not None:
            buffer.give_shape(shape)
        return self.begin(buffer, owner, name, kBroadcast, kSum, root, priority, "")

    def barrier(self, timeout):
        self.carry_out(Buffer.at(0, 0, kUint8, None), None, None, kBarrier, kSum, 0, 0, timeout)

    def accumulate(self, tensor, str name not None, int priority):
        """Check, submit, in place, and return the Handle."""
        cdef Buffer buffer = Buffer.of(tensor, True)
        if DTYPE_NAMES[buffer.dtype] not in ("float32", "float64"):
            raise errors.UnsupportedError(f"only float32 and float64 are accumulated, not {DTYPE_NAMES[buffer.dtype]}")
        return self.begin(buffer, tensor, name, kAccumulate, kSum, 0, priority, "")

    cdef int check_root(self, int root) except -1:
        if not 0 <= root < self.size:
            raise ValueError(f"root_rank is {root}, but ranks go from 0 to {self.size - 1}")
        return 0

    cdef Buffer prepared(self, object tensor, int op, object out, bint in_place):
        """The source of a push_pull, with its target if that is another buffer."""
        in_place = in_place or out is tensor
        cdef Buffer source = Buffer.of(tensor, in_place)
        check_average(source.dtype, op)
        if not in_place:
            if out is None:
                out = self.session.empty_for(tensor, source.shape(), DTYPE_NAMES[source.dtype])
            source.target = Buffer.of(out, True)
            check_target(source, source.target)
        return source

    cdef object result_of(self, Buffer source, object tensor):
        return tensor if source.target is None else source.target.owner

    cdef object carry_out(self, Buffer source, object result, name, int collective, int op, int root, int priority,
                          timeout, Group group=None):
        """Submit, and drive it to its end in this thread where that is possible."""
        cdef shared_ptr[CppOperation] operation
        cdef bint done
        cdef Handle handle
        cdef Key key = self.submit(source, name, collective, op, root, priority, "", Driver.kCaller, &operation)
        cdef CppOperation* running = operation.get()
        cdef bint driving = running.is_callers
        cdef bint is_patient = timeout is None and self.default_timeout * 1000 > kSliceMs
        # Most end before the first look at the clock, and need no handle.
        done = running.completion.done()
        if not done and is_patient:
            with nogil:
                done = self.core.drive(running[0], kSliceMs) if driving else self.core.wait(running[0], kSliceMs)
        if not done:
            handle = self.handle_of(operation, key, result, driving)
            handle.group = group
            return handle.wait(timeout)
        self.reap()
        self.check_outcome(running, key)
        return result

    cdef Handle begin(self, Buffer source, object result, name, int collective, int op, int root, int priority,
                      str compression):
        cdef shared_ptr[CppOperation] operation
        self.reap()
        cdef Key key = self.submit(source, name, collective, op, root, priority, compression, Driver.kLater, &operation)
        return self.handle_of(operation, key, result, False)

    cdef Handle handle_of(self, const shared_ptr[CppOperation]& operation, Key key, object result, bint driving):
        cdef Handle handle = Handle.__new__(Handle)
        handle.operation = operation
        handle.worker = self
        handle.result = result
        handle.key = key
        handle.driving = driving
        return handle

    cdef double checked_timeout(self, timeout) except? -1:
        cdef double seconds = self.default_timeout if timeout is None else float(timeout)
        if seconds != seconds:
            raise ValueError("timeout is not a number; expected seconds")
        return seconds

    cdef int check_outcome(self, CppOperation* operation, Key key) except -1:
        """Raise what a finished operation has failed with."""
        cdef CppFailure failure = operation.completion.failure()
        if failure.code != Errc.kOk:
            raise self.session.failure(<int>failure.code, failure.member, key.name, operation.round)
        return 0

    cdef Key submit(self, Buffer source, name, int collective, int op, int root, int priority, str compression,
                    Driver driver, shared_ptr[CppOperation]* operation):
        cdef Key key = self.take_key(name, collective, source.nbytes())
        cdef Request request
        cdef Errc code
        if not key.says(collective, op, source, root, compression):
            self.say(key, name is None, collective, op, source, root, compression)
        request.hash = key.hash
        request.key = key.record
        request.collective = <Collective>collective
        request.op = <ReduceOp>op
        request.dtype = <DType>source.dtype
        request.root = root
        request.priority = priority
        request.input = source.data
        request.output = source.data if source.target is None else source.target.data
        request.count = source.count
        request.custody = <void*>source
        request.driver = driver
        # The core's reference, given back by reap().
        Py_INCREF(source)
        if source.nbytes() <= kBriefBytes:  # sooner over than the GIL given and taken
            code = self.core.submit(request, operation)
        else:
            with nogil:
                code = self.core.submit(request, operation)
        if code != Errc.kOk:
            Py_DECREF(source)
            self.give_back(key, name is None, collective)
            raise self.session.refusal(<int>code, name)
        key.last = operation[0]
        return key

    cdef int give_back(self, Key key, bint is_unnamed, int collective) except -1:
        """The key has been taken, and nothing comes of it."""
        key.record.get().give_back()
        if is_unnamed:
            self.unnamed[collective] -= 1  # it has not taken part
        return 0

    cdef int say(self, Key key, bint is_unnamed, int collective, int op, Buffer buffer, int root,
                 str compression) except -1:
        try:
            key.say(self.session, collective, op, buffer, root, compression)
        except BaseException:
            self.give_back(key, is_unnamed, collective)
            raise
        return 0

    cdef Key take_key(self, name, int collective, uint64_t nbytes):
        """The key, taken, with rows enough."""
        cdef Key key = self.unnamed_key(collective) if name is None else self.named_key(name, nbytes)
        cdef uint64_t rows = 1 if nbytes <= self.partition_bytes else (nbytes - 1) // self.partition_bytes + 1
        if not key.record.get().try_take():
            self.await_key(key, collective)
        if key.record.get().rows() < rows:
            self.declare_more(key, collective, nbytes)
        return key

    cdef int await_key(self, Key key, int collective) except -1:
        """Take a key in flight: it may be over, and nobody has looked; else only an unnamed one is waited for."""
        if key.last.get() != NULL:
            self.core.poll(key.last.get()[0])
        while not key.record.get().try_take():
            if key.is_named:
                raise errors.DuplicateNameError(
                    f'"{key.name}" is in flight already: wait for it first, or give each tensor a name of its own'
                )
            # The same key, 1,024 operations ago; all ranks are here in the same order, so it will end.
            try:
                self.join(key)
            except BaseException:
                self.unnamed[collective] -= 1
                raise
        return 0

    cdef int declare_more(self, Key key, int collective, uint64_t nbytes) except -1:
        """More rows, for a tensor larger than all before under this name."""
        try:
            place = self.session.declare(key.name, nbytes)
            self.set_extents(key, place[0], place[1], place[2])
        except BaseException:
            self.give_back(key, not key.is_named, collective)
            raise
        return 0

    cdef Key named_key(self, name, uint64_t nbytes):
        cdef Key key = self.keys.get(name)
        if key is None:
            name = self.session.checked_name(name)
            place = self.session.declare(name, nbytes)
            key = self.add_key(name, place[0], place[1], place[2])
        elif not key.is_named:
            self.session.checked_name(name)  # refuses it: an unnamed operation has this key
        return key

    cdef Key unnamed_key(self, int collective):
        """The next of the recycled keys of this kind of operation."""
        cdef uint64_t number = self.unnamed[collective] % kUnnamed
        cdef Py_ssize_t index = collective * kUnnamed + <Py_ssize_t>number
        self.unnamed[collective] += 1
        cdef Key key = self.unnamed_keys[index]
        if key is None:
            place = self.session.unnamed_key(COLLECTIVE_NAMES[collective], number)
            key = self.add_key(f"\0{COLLECTIVE_NAMES[collective]}.{number}", place[0], place[1], place[2])
            self.unnamed_keys[index] = key
        return key

    cdef int join(self, Key key) except -1:
        cdef shared_ptr[CppOperation] last = key.last
        if last.get() != NULL and self.core.take(last.get()[0]):
            self.core.hand_over(last.get()[0])
        while last.get() != NULL and not last.get().completion.done():
            with nogil:
                last.get().completion.wait(kSliceMs)
            PyErr_CheckSignals()
        time.sleep(0)  # another thread may have the key and be about to submit
        return 0

    cdef Key add_key(self, str name, uint64_t declared_key, uint64_t cursor, extents):
        cdef Key key = Key.__new__(Key)
        key.name = name
        key.is_named = not name.startswith("\0")
        key.record = make_shared[CppKeyRecord]()
        key.record.get().name = name.encode()
        self.set_extents(key, declared_key, cursor, extents)
        # Two threads may have declared it at once; the first one's stays.
        return self.keys.setdefault(name, key)

    cdef int set_extents(self, Key key, uint64_t declared_key, uint64_t cursor, extents) except -1:
        key.record.get().declared_key = declared_key
        key.record.get().cursor = cursor
        key.record.get().extents.clear()
        for first, rows in extents:
            key.record.get().extents.push_back(pair[uint32_t, uint32_t](first, rows))
        return 0

    def add_declared(self, name, declared_key, cursor, extents):
        """Take in what the scheduler said of a name before its first use."""
        if name not in self.keys:
            self.add_key(name, declared_key, cursor, extents)

    def knows(self, name) -> bool:
        return name in self.keys

    cdef int reap(self) except -1:
        """Give back what finished operations have held."""
        cdef shared_ptr[CppOperation] operation
        while True:
            operation = self.core.reap()
            if operation.get() == NULL:
                return 0
            Py_DECREF(<object>operation.get().custody)

    # Memory ----------------------------------------------------------------------------------------------------------

    def allocate(self, size_t nbytes):
        """A view of a new ArenaBlock, or None when the arena is full."""
        cdef ArenaBlock block = ArenaBlock.__new__(ArenaBlock)
        block.worker = self
        block.bytes = nbytes
        with nogil:
            block.data = self.core.allocate(nbytes)
        return memoryview(block) if block.data != NULL else None

    def allocated_bytes(self) -> int:
        return self.core.allocated_bytes()

    # For the control plane -------------------------------------------------------------------------------------------

    def submitted_round(self, str name) -> int:
        cdef Key key = self.keys.get(name)
        return 0 if key is None else key.record.get().rounds()

    def disagreement_descriptor(self) -> int:
        return self.core.disagreement_descriptor()

    def take_disagreements(self) -> list:
        """(name, round, signature) of rounds that have failed because the ranks disagree."""
        cdef vector[CppDisagreement] found
        self.core.take_disagreements(&found)
        cdef Key key
        result = []
        for i in range(found.size()):
            name = (<bytes>found[i].name).decode()
            key = self.keys[name]
            signature = next((s for first, s in reversed(key.history) if first <= found[i].round), key.history[0][1])
            result.append((name, found[i].round, signature))
        return result

    def waiting(self, double older_than_s, size_t limit=64) -> list:
        """(name, round) of the oldest operations that have been in flight for longer than that."""
        cdef vector[CppWaiting] found
        self.core.waiting(<int64_t>(older_than_s * 1000), limit, &found)
        return [((<bytes>found[i].name).decode(), found[i].round) for i in range(found.size())]

    def take_log(self) -> list:
        """(level, text) of what the core has to say."""
        return take_log_of(self.core, NULL)

    def abort(self, uint32_t member, int cause):
        self.core.abort(member, cause)

    def aborted(self):
        """(member, cause) once the job has failed, else None."""
        return (self.core.aborted_member(), self.core.aborted_cause()) if self.core.aborted() else None

    def is_forked(self) -> bool:
        return self.core.is_forked()

    def is_readable_by_others(self) -> bool:
        return self.core.is_readable_by_others()

    def finished_bytes(self) -> int:
        self.reap()
        return self.core.finished_bytes()

    def owner_bytes(self) -> tuple:
        """(received, sent) by this process as an owner of bytes; after shutdown."""
        return self.core.owner_received_bytes(), self.core.owner_sent_bytes()

    def settle(self):
        """What nobody has looked at yet goes to the loop, and is over soon if it can be."""
        with nogil:
            self.core.settle()

    def shutdown(self, double timeout):
        cdef int timeout_ms = <int>(timeout * 1000)
        with nogil:
            self.core.shutdown(timeout_ms)
        self.reap()


cdef list take_log_of(CppWorker* worker, CppServer* server):
    cdef CppLogRecord record
    found = []
    while worker.take_log(&record) if worker != NULL else server.take_log(&record):
        found.append((<int>record.level, (<bytes>record.text).decode("utf-8", "replace")))
    return found


cdef int check_target(Buffer source, Buffer target) except -1:
    if target.dtype != source.dtype or target.shape() != source.shape():
        raise ValueError(
            f"out is {DTYPE_NAMES[target.dtype]} of shape {target.shape()}, the tensor is "
            f"{DTYPE_NAMES[source.dtype]} of shape {source.shape()}"
        )
    cdef char* a = <char*>source.data
    cdef char* b = <char*>target.data
    if a != b and a < b + target.nbytes() and b < a + source.nbytes():
        raise ValueError("out overlaps the tensor; it must be the same memory or other memory")
    return 0


def roots_of(wiring) -> list:
    """Global ranks of the local roots, by node."""
    roots = {member.node: member.rank for member in wiring.members if member.local_rank == 0}
    return [roots[node] for node in range(wiring.num_nodes)]


def streams_of(wiring) -> list:
    """Descriptors by PeerId; empty for a member that talks to no other host."""
    if not wiring.peers:
        return []
    return [list(wiring.peers.get(peer, ())) for peer in range(wiring.num_nodes + wiring.num_servers)]


@cython.final
@cython.no_gc_clear
cdef class Server:
    """A dedicated summation server, serving from its creation on."""

    cdef CppServer* core

    def __cinit__(self, wiring, int log_level):
        cdef ServerOptions options
        options.index = wiring.peer_id - wiring.num_nodes
        options.nodes, options.servers = wiring.num_nodes, wiring.num_servers
        options.roots = roots_of(wiring)
        options.ranks_per_host = wiring.ranks_per_node
        options.streams = streams_of(wiring)
        options.partition_bytes = wiring.parameters.partition_bytes
        options.credit_bytes = wiring.parameters.credit_bytes
        options.peer_timeout_ms = <int64_t>(wiring.parameters.peer_timeout_s * 1000)
        options.log_level = log_level
        self.core = new CppServer(options)

    def __dealloc__(self):
        if self.core != NULL:
            with nogil:
                del self.core

    def stop(self, double timeout):
        cdef int timeout_ms = <int>(timeout * 1000)
        with nogil:
            self.core.stop(timeout_ms)

    def abort(self, uint32_t member, int cause):
        self.core.abort(member, cause)

    def aborted(self):
        return (self.core.aborted_member(), self.core.aborted_cause()) if self.core.aborted() else None

    def owner_bytes(self) -> tuple:
        return self.core.received_bytes(), self.core.sent_bytes()

    def take_log(self) -> list:
        return take_log_of(NULL, self.core)


def table_bytes(local_size: int) -> int:
    """Size of the ready table of a host."""
    return CppWorker.table_bytes(local_size)


# The C interface: commlib.h ------------------------------------------------------------------------------------------

cdef extern from "commlib/commlib.h" nogil:
    ctypedef struct commlib_handle:
        pass

    ctypedef struct commlib_functions:
        size_t bytes
        int (*rank)() noexcept
        int (*size)() noexcept
        commlib_handle* (*push_pull)(const void*, void*, size_t, int, int, const char*, int) noexcept
        int (*wait)(commlib_handle*, double) noexcept
        int (*done)(commlib_handle*) noexcept
        const char* (*last_error)() noexcept


last_error = threading.local()  # .text: the bytes that commlib_last_error points to


cdef int keep_error(object error) noexcept:
    """Remember it for this thread; returns its code."""
    last_error.text = f"{type(error).__name__}: {error}".encode()
    return getattr(error, "code", <int>Errc.kInternal)


cdef int c_rank() noexcept with gil:
    from commlib import api
    return api.rank() if api.is_initialized() else -1


cdef int c_size() noexcept with gil:
    from commlib import api
    return api.size() if api.is_initialized() else -1


cdef commlib_handle* c_push_pull(const void* source, void* out, size_t count, int dtype, int op, const char* name,
                                 int priority) noexcept with gil:
    from commlib import api
    try:
        handle = api.push_pull_ptr(
            <uintptr_t>source, count, dtype, out_ptr=<uintptr_t>out, op=op, priority=priority,
            name=None if name == NULL else name.decode(),
        )
    except BaseException as error:
        keep_error(error)
        return NULL
    Py_INCREF(handle)
    return <commlib_handle*><PyObject*>handle


cdef int c_wait(commlib_handle* handle, double timeout_s) noexcept with gil:
    cdef Handle waited = <Handle><PyObject*>handle
    cdef int code = 0
    try:
        waited.wait(None if timeout_s < 0 else timeout_s)
    except KeyboardInterrupt as error:
        # The caller is C and cannot raise: Python sees the signal again when it runs.
        PyErr_SetInterrupt()
        keep_error(error)
        return <int>Errc.kTimeout
    except BaseException as error:
        code = keep_error(error)
        if not waited.done():
            return <int>Errc.kTimeout
    Py_DECREF(waited)
    return code


cdef int c_done(commlib_handle* handle) noexcept with gil:
    return (<Handle><PyObject*>handle).done()


cdef const char* c_last_error() noexcept with gil:
    return <bytes>getattr(last_error, "text", b"")


cdef commlib_functions functions
functions.bytes = sizeof(functions)
functions.rank = c_rank
functions.size = c_size
functions.push_pull = c_push_pull
functions.wait = c_wait
functions.done = c_done
functions.last_error = c_last_error
_C_API = PyCapsule_New(&functions, "commlib._core._C_API", NULL)
