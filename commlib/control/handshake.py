# SPDX-License-Identifier: Apache-2.0
"""The hello of data-plane and local sockets: both sides prove that they know the job's secret.

Design notes. A conversation is a generator that does no input or output: it yields ``bytes`` to be sent, or the number
of bytes that it wants to be sent back in. commlib/control/streams.py drives many of them at once over sockets; tests
drive them by hand. Each part of a hello is four bytes of magic, its length, and that many bytes; the reader asks for
exactly those, so that not one byte of what follows on the socket is taken from the core.

    initiator → acceptor    who I am, whom I want, for what; a fresh nonce
    acceptor  → initiator   a fresh nonce, and HMAC("acceptor", all of the above)
    initiator → acceptor    HMAC("initiator", all of the above)
    acceptor  → initiator   welcome

Both proofs cover both nonces and everything that was claimed, so an old hello cannot be used again, and each carries
its role, so one that is sent back to its author proves nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec
from msgspec import Struct

from commlib.control.messages import PROTOCOL, Text
from commlib.errors import AuthenticationError, CommlibError, ConfigError

__all__ = ["Claim", "Conversation", "HandshakeFailed", "accept", "initiate"]

MAGIC = b"CLh1"
PREFIX = struct.Struct("<4sI")
MAX_PART_BYTES = 16384
NONCE_BYTES = 32


class HandshakeFailed(CommlibError):  # noqa: N818 - says what it is
    """The other side is not a member of this job, or broke off. An acceptor forgets it and goes on."""


class Claim(Struct, frozen=True):
    """What an initiator says about a connection: ``purpose`` is "stream" or "local"."""

    job: Text
    purpose: Text
    node: Text  # of a local connection: the host's label
    initiator: int  # PeerId of a stream, local rank of a local connection
    acceptor: int
    stream: int = 0


class _Opening(Struct, frozen=True):
    protocol: int
    claim: Claim
    nonce: bytes


class _Answer(Struct, frozen=True):
    nonce: bytes
    proof: bytes
    refusal: str = ""


class _Proof(Struct, frozen=True):
    proof: bytes


class _Accepted(Struct, frozen=True):
    refusal: str = ""


T = TypeVar("T")
Conversation = Generator[bytes | int, bytes, Claim]


def initiate(key: bytes, claim: Claim) -> Conversation:
    """The side that connected. Returns the claim; raises AuthenticationError, HandshakeFailed or ConfigError."""
    opening = msgspec.msgpack.encode(_Opening(PROTOCOL, claim, secrets.token_bytes(NONCE_BYTES)))
    yield _framed(opening)
    raw_answer = yield from _read_part()
    answer = _decoded(raw_answer, _Answer)
    if answer.refusal:
        raise ConfigError(f"the other side of a {claim.purpose} connection refused: {answer.refusal}")
    transcript = opening + answer.nonce
    if not hmac.compare_digest(answer.proof, _proof(key, b"acceptor", transcript)):
        raise AuthenticationError(f"the other side of a {claim.purpose} connection does not know this job's secret")
    yield _framed(msgspec.msgpack.encode(_Proof(_proof(key, b"initiator", transcript))))
    accepted = _decoded((yield from _read_part()), _Accepted)
    if accepted.refusal:
        raise ConfigError(f"the other side of a {claim.purpose} connection refused: {accepted.refusal}")
    return claim


def accept(key: bytes, check: Callable[[Claim], str]) -> Conversation:
    """The side that listened. Returns what the initiator claims, once it is proved.

    `check` looks at a proved claim and returns why it cannot be accepted, or "". Raises HandshakeFailed for everything
    that is wrong.
    """
    raw_opening = yield from _read_part()
    opening = _decoded(raw_opening, _Opening)
    if opening.protocol != PROTOCOL:
        refusal = (
            f"it speaks protocol {PROTOCOL} of commlib, not {opening.protocol}: install the same version everywhere"
        )
        yield _framed(msgspec.msgpack.encode(_Answer(b"", b"", refusal)))
        raise HandshakeFailed(f"a peer speaks protocol {opening.protocol}, not {PROTOCOL}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    transcript = raw_opening + nonce
    yield _framed(msgspec.msgpack.encode(_Answer(nonce, _proof(key, b"acceptor", transcript))))
    proof = _decoded((yield from _read_part()), _Proof).proof
    if not hmac.compare_digest(proof, _proof(key, b"initiator", transcript)):
        raise HandshakeFailed("a peer does not know this job's secret")
    refusal = check(opening.claim)
    yield _framed(msgspec.msgpack.encode(_Accepted(refusal)))
    if refusal:
        raise HandshakeFailed(refusal)
    return opening.claim


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + transcript, hashlib.sha256)


def _framed(part: bytes) -> bytes:
    return PREFIX.pack(MAGIC, len(part)) + part


def _read_part() -> Generator[int, bytes, bytes]:
    magic, part_bytes = PREFIX.unpack((yield PREFIX.size))
    if magic != MAGIC or not 0 < part_bytes <= MAX_PART_BYTES:
        raise HandshakeFailed("a peer does not speak commlib's protocol")
    return (yield part_bytes)


def _decoded(part: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(part, type=kind)
    except msgspec.MsgspecError as error:
        raise HandshakeFailed(f"a peer's hello is malformed: {error}") from None
