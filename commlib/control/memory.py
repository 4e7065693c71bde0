# SPDX-License-Identifier: Apache-2.0
"""Shared memory without names: segments that exist only as descriptors, and vanish with the last one."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from commlib.errors import Code, CommlibError, from_code

__all__ = ["MIN_ARENA_BYTES", "check_segment", "make_segment", "mappable_bytes"]

MIN_ARENA_BYTES = 1 << 20
# For stacks and heaps of threads: where ZeroMQ gets none it ends the process.
THREADS_BYTES = 256 << 20


def make_segment(name: str, segment_bytes: int) -> int:
    """A sparse segment of exactly this size, as a close-on-exec descriptor.

    Its size is sealed: nobody who is given it can shrink it and so crash the others. Raises CommlibError.
    """
    fd = -1
    try:
        fd = os.memfd_create(f"commlib-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, segment_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise from_code(
            Code.OUT_OF_MEMORY, f"no shared memory of {segment_bytes} bytes can be made: {error.strerror}"
        ) from None
    return fd


def check_segment(fd: int, segment_bytes: int) -> None:
    """Raise CommlibError unless `fd` is a segment of at least this size that cannot shrink."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise CommlibError("a process of this host sent a descriptor that is no shared memory") from None
    if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < segment_bytes:
        raise CommlibError("a process of this host sent shared memory of another size than it said")


def mappable_bytes(wanted_bytes: int, segments: int, besides_bytes: int = 0) -> int:
    """How large each of `segments` arenas can be, at most `wanted_bytes` and in whole pages, for all to be mapped here.

    Where the address space is limited (``ulimit -v``), room is left for `besides_bytes` and some threads, and half of
    what then remains for the program. Raises CommlibError if there is no room for any arena worth having.
    """
    arena_bytes = wanted_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    while arena_bytes >= MIN_ARENA_BYTES:
        try:
            # No access, no memory: only addresses are taken, for a moment.
            room = 2 * segments * arena_bytes + besides_bytes + THREADS_BYTES
            mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
            return arena_bytes
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                break
        arena_bytes = arena_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    raise from_code(
        Code.OUT_OF_MEMORY,
        f"the address space has no room for {segments} arenas of at least {MIN_ARENA_BYTES} bytes; raise its limit "
        "(ulimit -v)",
    )
