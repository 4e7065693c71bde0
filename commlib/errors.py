# SPDX-License-Identifier: Apache-2.0
"""What commlib raises. Every class is a :class:`CommlibError` and also the builtin one would expect to catch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AuthenticationError",
    "Code",
    "CommlibError",
    "ConfigError",
    "DuplicateNameError",
    "MismatchError",
    "NotInitializedError",
    "OperationTimeout",
    "PeerLostError",
    "UnsupportedError",
    "from_code",
]


class Code(enum.IntEnum):
    """The outcomes of the core: the numbers of ``enum class Errc`` in ``src/base/errc.hpp`` (a test compares them)."""

    OK = 0
    AGAIN = 1
    NOT_INITIALIZED = 2
    MISMATCH = 3
    DUPLICATE_NAME = 4
    PEER_LOST = 5
    TIMEOUT = 6
    AUTHENTICATION = 7
    UNSUPPORTED = 8
    CONFIG = 9
    OUT_OF_MEMORY = 10
    SHUT_DOWN = 11
    INTERNAL = 12


class CommlibError(RuntimeError):
    """Base of all errors of commlib; raised itself when memory runs out and for faults of the library.

    ``code`` is the number of the outcome in the core, see :class:`Code`.
    """

    default_code: ClassVar[Code] = Code.INTERNAL

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.code: int = int(self.default_code)


class NotInitializedError(CommlibError):
    """The library is used before ``commlib.init()`` or after ``commlib.shutdown()``."""

    default_code = Code.NOT_INITIALIZED


class MismatchError(CommlibError, ValueError):
    """The ranks do not agree about an operation. Raised on all of them; the name stays usable.

    ``tensor`` is the tensor's name, ``field`` what they disagree about (``"shape"``, ``"dtype"``, …), and ``values``
    what each rank said, by rank. They are empty where the ranks' reports could not be collected.
    """

    default_code = Code.MISMATCH

    def __init__(
        self,
        message: str = "",
        *,
        tensor: str = "",
        field: str = "",
        values: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.field = field
        self.values: dict[int, Any] = dict(values or {})


class DuplicateNameError(CommlibError, ValueError):
    """An operation of this name is already in flight in this process."""

    default_code = Code.DUPLICATE_NAME


class PeerLostError(CommlibError, ConnectionError):
    """A member of the job is gone: it was killed, crashed, stopped answering, or the network to it failed.

    ``rank`` is the lost worker's rank (None for a server or the scheduler), ``host`` the name of its host, and
    ``cause`` how it was noticed. The contents of buffers in flight are undefined.
    """

    default_code = Code.PEER_LOST

    def __init__(self, message: str = "", *, rank: int | None = None, host: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.cause = cause


class OperationTimeout(CommlibError, TimeoutError):  # noqa: N818 - the public name, beside the builtin TimeoutError
    """A time limit has passed.

    An operation stays in flight: ``handle`` is its handle, and may be waited for again; it is None where the limit was
    that of something else, as ``init``.
    """

    default_code = Code.TIMEOUT

    def __init__(self, message: str = "", *, handle: Any = None) -> None:
        super().__init__(message)
        self.handle = handle


class AuthenticationError(CommlibError, PermissionError):
    """The other side does not know this job's secret."""

    default_code = Code.AUTHENTICATION


class UnsupportedError(CommlibError, TypeError):
    """A dtype, memory layout or device that commlib cannot handle."""

    default_code = Code.UNSUPPORTED


class ConfigError(CommlibError, ValueError):
    """A setting is missing, malformed, or contradicts another one or another rank's."""

    default_code = Code.CONFIG


_CLASSES: dict[int, type[CommlibError]] = {
    cls.default_code: cls
    for cls in (
        NotInitializedError,
        MismatchError,
        DuplicateNameError,
        PeerLostError,
        OperationTimeout,
        AuthenticationError,
        UnsupportedError,
        ConfigError,
    )
}
_CLASSES[Code.SHUT_DOWN] = NotInitializedError


def from_code(code: int, message: str = "") -> CommlibError:
    """The error for an outcome of the core. Its ``code`` is `code`, also where several codes share a class.

    After a shutdown the message always says that the library has been shut down.
    """
    if code == Code.SHUT_DOWN and "shut down" not in message:
        message = f"commlib has been shut down: {message}" if message else "commlib has been shut down"
    error = _CLASSES.get(code, CommlibError)(message)
    error.code = int(code)
    return error
