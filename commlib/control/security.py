# SPDX-License-Identifier: Apache-2.0
"""The job's secret, and the keys that are made from it.

Everybody who knows the secret may join; everybody else is turned away before he can say anything. All keys depend on
the job id too, so that members of different jobs never meet by mistake.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from commlib.errors import ConfigError

if TYPE_CHECKING:
    from commlib.config import Config

__all__ = ["Keys", "Zap", "derive_keys", "load_secret", "secret_path"]

log = logging.getLogger("commlib")

_MAKE_ONE = "python3 -c 'import secrets; print(secrets.token_hex(32))'"
HOW_TO_SHARE = (
    "All members of a job need the same secret and the same job id: set COMMLIB_SECRET to the same text everywhere, or "
    "copy ~/.commlib/secret (mode 600) from one host to the others"
)


def secret_path() -> Path:
    """Where the secret of this user is kept."""
    try:
        return Path.home() / ".commlib" / "secret"
    except RuntimeError as error:
        raise ConfigError(
            f"COMMLIB_SECRET is not set, and there is no home directory to keep one in ({error})"
        ) from None


def load_secret(config: Config) -> bytes:
    """The job's secret: the setting, else the user's file, which is made on first use.

    It is not made where the members may be on several machines: there each would make another one. Raises ConfigError
    then, and for a file that others can read.
    """
    if config.secret:
        return config.secret.encode()
    path = secret_path()
    try:
        return _read_secret(path)
    except FileNotFoundError:
        if not config.is_one_machine:
            raise ConfigError(
                f"COMMLIB_SECRET is not set and {path} does not exist, but the job may have members on several "
                f"machines. {HOW_TO_SHARE}. One can be made by: {_MAKE_ONE}"
            ) from None
    _make_secret(path)
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"the job secret {path} cannot be read: {error.strerror}. Or set COMMLIB_SECRET") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the job secret {path} is not a regular file")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"the job secret {path} has mode {stat.S_IMODE(status.st_mode):o}, so that others can read or change "
                f"it; expected 600. Others may have seen it: delete the file, or chmod 600 {path}"
            )
        if os.geteuid() not in (0, status.st_uid):
            raise ConfigError(f"the job secret {path} belongs to another user (uid {status.st_uid})")
        secret = file.read(65536).strip()
    if not secret:
        raise ConfigError(
            f"the job secret {path} is empty; delete it, or write one into it. One can be made by: {_MAKE_ONE}"
        )
    return secret


def _make_secret(path: Path) -> None:
    """Make the file, whole, unless another process has done so meanwhile."""
    draft = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # unlike a rename it cannot replace what another process has begun to use
        finally:
            os.unlink(draft)
    except OSError as error:
        raise ConfigError(f"no job secret can be kept in {path}: {error.strerror}. Set COMMLIB_SECRET") from None


@dataclass(frozen=True)
class Keys:
    """All that is derived from the secret. CURVE keys are in Z85, as ZeroMQ wants them."""

    server_public: bytes
    client_public: bytes
    server_secret: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)
    hello: bytes = field(repr=False)  # for the hello of data and local sockets

    def secure_scheduler(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before it is bound, take only clients that know the secret (with :class:`Zap`)."""
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret
        socket.curve_publickey = self.server_public
        socket.zap_domain = b"commlib"

    def secure_member(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before it is connected, speak only with a scheduler that knows the secret."""
        socket.curve_serverkey = self.server_public
        socket.curve_secretkey = self.client_secret
        socket.curve_publickey = self.client_public


def derive_keys(secret: bytes, job: str) -> Keys:
    """The keys of a job."""

    def derive(purpose: bytes) -> bytes:
        return hmac.digest(secret, b"commlib 1\0" + purpose + b"\0" + job.encode(), hashlib.sha256)

    server, client = z85.encode(derive(b"scheduler")), z85.encode(derive(b"member"))
    return Keys(zmq.curve_public(server), zmq.curve_public(client), server, client, derive(b"hello"))


class Zap:
    """Decides who may connect to the sockets of a context: ZeroMQ asks, over its own protocol (RFC 27, "ZAP").

    pyzmq has such a handler too, but only as a thread or for asyncio; this one lives in the scheduler's own poll loop.
    """

    ADDRESS = "inproc://zeromq.zap.01"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._allowed = z85.decode(keys.client_public)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(self.ADDRESS)
        self._request: list[bytes] | None = None

    def is_asked(self) -> bool:
        """Take a request, if there is one. It has to be answered before another can be taken."""
        if self._request is None and self.socket.poll(0):
            self._request = self.socket.recv_multipart()
        return self._request is not None

    def answer(self) -> None:
        """Answer the request that was taken."""
        # version, request, domain, address, routing id, mechanism, and for CURVE the client's public key
        assert self._request is not None
        frames, self._request = self._request, None
        version, request = (*frames, b"", b"")[:2]
        allowed = len(frames) == 7 and frames[5] == b"CURVE" and hmac.compare_digest(frames[6], self._allowed)
        if not allowed:
            log.warning(
                "refused a connection from %s", frames[3].decode("ascii", "replace") if len(frames) > 3 else "?"
            )
        status = (b"200", b"OK") if allowed else (b"400", b"not a member of this job")
        self.socket.send_multipart([version, request, *status, b"member" if allowed else b"", b""])

    def close(self) -> None:
        """Answer nobody any more."""
        self.socket.close()
