# SPDX-License-Identifier: Apache-2.0
"""Small experiments for `commlib doctor`: what the kernel lets two processes of one user do with each other."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

__all__ = ["abstract_sockets", "memfd", "other_memory", "pidfd", "shared_futex"]

_PROBE_TIMEOUT_S = 10.0
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}

# Says where 16 bytes of it lie, then waits for the end of its standard input and says what they have become.
_OWNER = """
import ctypes, os, sys
data = ctypes.create_string_buffer(b"as it was before", 16)
print(os.getpid(), ctypes.addressof(data), flush=True)
sys.stdin.read()
print(data.raw.decode())
"""
# Reads them and writes them, as one worker does with the buffer of another; says 0 or errno for both.
_VISITOR = """
import ctypes, sys
class Range(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
pid, address = int(sys.argv[1]), int(sys.argv[2])
mine, theirs = ctypes.create_string_buffer(16), Range(address, 16)
own = Range(ctypes.addressof(mine), 16)
for transfer in (libc.process_vm_readv, libc.process_vm_writev):
    transfer.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    transfer.restype = ctypes.c_ssize_t
    done = transfer(pid, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0)
    print(0 if done == 16 else ctypes.get_errno() or -1)
    mine.raw = mine.raw.upper()
"""
# Waits on the first word of a shared file, and says 0 or errno.
_SLEEPER = """
import ctypes, mmap, sys
descriptor, call = int(sys.argv[1]), int(sys.argv[2])
word = ctypes.c_uint.from_buffer(mmap.mmap(descriptor, 4096))
class Span(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
libc = ctypes.CDLL(None, use_errno=True)
print("waiting", flush=True)
status = libc.syscall(call, ctypes.byref(word), 0, 0, ctypes.byref(Span(10, 0)), None, 0)
print(0 if status == 0 else ctypes.get_errno())
"""


def memfd() -> str | None:
    """Memory without a name that two mappings share: None, or why not."""
    try:
        descriptor = os.memfd_create("commlib-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return _words(error.errno)
    with os.fdopen(descriptor, "rb") as file:
        os.ftruncate(file.fileno(), 1 << 30)  # sparse
        with mmap.mmap(file.fileno(), 4096) as one, mmap.mmap(file.fileno(), 4096) as two:
            one[:4] = b"seen"
            return None if two[:4] == b"seen" else "two mappings of one memfd do not see each other"


def abstract_sockets() -> str | None:
    """A unix socket in the abstract namespace that carries a descriptor: None, or why not."""
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
            listener.bind(f"\0commlib-doctor-{os.getpid()}")
            listener.listen()
            caller.connect(listener.getsockname())
            answerer, _ = listener.accept()
            with answerer:
                socket.send_fds(caller, [b"x"], [caller.fileno()])
                _, descriptors, _, _ = socket.recv_fds(answerer, 1, 1)
                for descriptor in descriptors:
                    os.close(descriptor)
                return None if len(descriptors) == 1 else "descriptors do not come through"
    except OSError as error:
        return _words(error.errno)


def pidfd() -> str | None:
    """A descriptor that tells the end of a process: None, or why not."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return _words(error.errno)
    return None


def other_memory() -> str | None:
    """`process_vm_readv` and `writev` between two processes, neither the other's parent: None, or why not."""
    with _child(_OWNER) as owner:
        assert owner.stdout is not None
        place = owner.stdout.readline().split()
        try:
            with _child(_VISITOR, *place) as visitor:
                answer, _ = visitor.communicate(timeout=_PROBE_TIMEOUT_S)
            left, _ = owner.communicate(timeout=_PROBE_TIMEOUT_S)
        finally:
            owner.kill()
    outcomes = [int(line) for line in answer.split()]
    if len(outcomes) != 2:
        return "the experiment itself has failed"
    if any(outcomes):
        return _words(next(filter(None, outcomes)))
    return None if left.strip() == "AS IT WAS BEFORE" else "what is written does not arrive"


def shared_futex() -> str | None:
    """Waking another process through a word of shared memory: None, or why not."""
    call = _FUTEX_CALL.get(platform.machine())
    if call is None:
        return f"cannot be tried on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    with os.fdopen(os.memfd_create("commlib-doctor"), "rb") as file:
        os.ftruncate(file.fileno(), 4096)
        word = ctypes.c_uint.from_buffer(mmap.mmap(file.fileno(), 4096))
        with _child(_SLEEPER, str(file.fileno()), str(call), pass_fds=[file.fileno()]) as sleeper:
            assert sleeper.stdout is not None
            sleeper.stdout.readline()
            deadline = time.monotonic() + 2
            # It has said that it is about to wait; when it does, one is woken.
            while libc.syscall(call, ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0) == 0:
                if time.monotonic() > deadline:
                    sleeper.kill()
                    return "a waiter in another process is not woken"
                os.sched_yield()  # to the other process, which has only a system call left to make
            answer, _ = sleeper.communicate(timeout=_PROBE_TIMEOUT_S)
    return None if answer.strip() == "0" else _words(int(answer or -1))


def _child(script: str, *arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
    """A bare Python that runs `script`."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        pass_fds=pass_fds,
    )


def _words(number: int | None) -> str:
    if number is None or number not in errno.errorcode:
        return "it does not work"
    return f"{os.strerror(number)} ({errno.errorcode[number]})"
