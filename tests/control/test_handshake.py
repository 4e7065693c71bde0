# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.control import handshake
from commlib.control.handshake import MAX_PART_BYTES, PREFIX, Claim, Conversation, HandshakeFailed, accept, initiate
from commlib.control.messages import PROTOCOL
from commlib.errors import AuthenticationError, ConfigError

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
CLAIM = Claim("job", "stream", "", 2, 1, 0)


def welcome(claim: Claim) -> str:
    return ""


class Side:
    """One side of a conversation, and what it has said that was not read yet."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.said = bytearray()
        self.result: Claim | None = None
        self.asked_bytes = 0
        self._step(next(conversation))

    def _step(self, request: bytes | int) -> None:
        try:
            while isinstance(request, bytes):
                self.said += request
                request = self.conversation.send(b"")
            self.asked_bytes = request
        except StopIteration as end:
            self.result, self.asked_bytes = end.value, 0

    def hear(self, data: bytearray) -> None:
        """Take exactly what it asks for out of `data`, as often as there is enough."""
        while 0 < self.asked_bytes <= len(data):
            part = bytes(data[: self.asked_bytes])
            del data[: self.asked_bytes]
            try:
                self._step(self.conversation.send(part))
            except StopIteration as end:
                self.result, self.asked_bytes = end.value, 0


def converse(initiator: Side, acceptor: Side) -> None:
    while initiator.said or acceptor.said:
        acceptor.hear(initiator.said)
        initiator.hear(acceptor.said)
        if not initiator.asked_bytes and not acceptor.asked_bytes:
            return


def talk(
    key: bytes = KEY, acceptor_key: bytes = KEY, claim: Claim = CLAIM, check: Callable[[Claim], str] = welcome
) -> tuple[Side, Side]:
    sides = Side(initiate(key, claim)), Side(accept(acceptor_key, check))
    converse(*sides)
    return sides


def test_both_sides_agree_and_take_not_one_byte_more() -> None:
    initiator, acceptor = Side(initiate(KEY, CLAIM)), Side(accept(KEY, welcome))
    acceptor.hear(initiator.said)
    initiator.hear(acceptor.said)
    initiator.said += b"the core's first frame"
    acceptor.hear(initiator.said)
    acceptor.said += b"and its answer"
    initiator.hear(acceptor.said)
    assert initiator.result == acceptor.result == CLAIM
    assert initiator.said == b"the core's first frame"
    assert acceptor.said == b"and its answer"


def test_another_secret_is_seen_by_the_one_who_connected() -> None:
    with pytest.raises(AuthenticationError, match="secret"):
        talk(acceptor_key=OTHER_KEY)


def test_another_secret_is_seen_by_the_one_who_accepts() -> None:
    initiator, acceptor = Side(initiate(KEY, CLAIM)), Side(accept(KEY, welcome))
    acceptor.hear(initiator.said)
    forged = msgspec.msgpack.encode({"proof": b"\0" * 32})
    with pytest.raises(HandshakeFailed, match="secret"):
        acceptor.hear(bytearray(PREFIX.pack(handshake.MAGIC, len(forged)) + forged))
    assert acceptor.result is None


def test_a_hello_that_is_sent_back_proves_nothing() -> None:
    """The reflected hello: what an initiator says comes back to it, part by part."""
    initiator = Side(initiate(KEY, CLAIM))
    with pytest.raises((HandshakeFailed, AuthenticationError)):
        initiator.hear(bytearray(initiator.said))


def test_an_acceptors_proof_does_not_serve_as_an_initiators() -> None:
    """A stranger plays the initiator and gives the acceptor its own proof back."""
    opening = msgspec.msgpack.encode({"protocol": PROTOCOL, "claim": msgspec.to_builtins(CLAIM), "nonce": b"n" * 32})
    acceptor = Side(accept(KEY, welcome))
    acceptor.hear(bytearray(PREFIX.pack(handshake.MAGIC, len(opening)) + opening))
    answer = msgspec.msgpack.decode(bytes(acceptor.said)[PREFIX.size :])
    proof = msgspec.msgpack.encode({"proof": answer["proof"]})
    with pytest.raises(HandshakeFailed, match="secret"):
        acceptor.hear(bytearray(PREFIX.pack(handshake.MAGIC, len(proof)) + proof))


def test_an_old_hello_cannot_be_used_again() -> None:
    initiator, first = Side(initiate(KEY, CLAIM)), Side(accept(KEY, welcome))
    recorded = bytes(initiator.said)
    first.hear(initiator.said)
    initiator.hear(first.said)
    recorded += bytes(initiator.said)
    first.hear(initiator.said)
    assert first.result == CLAIM
    second = Side(accept(KEY, welcome))
    with pytest.raises(HandshakeFailed, match="secret"):
        second.hear(bytearray(recorded))


def test_a_claim_that_was_changed_on_the_way_is_not_believed() -> None:
    initiator, acceptor = Side(initiate(KEY, CLAIM)), Side(accept(KEY, welcome))
    opening = msgspec.msgpack.decode(bytes(initiator.said)[PREFIX.size :])
    opening["claim"]["initiator"] = 3
    changed = msgspec.msgpack.encode(opening)
    acceptor.hear(bytearray(PREFIX.pack(handshake.MAGIC, len(changed)) + changed))
    with pytest.raises(AuthenticationError):
        initiator.hear(acceptor.said)


def test_who_proves_itself_but_is_not_expected_is_told_so() -> None:
    with pytest.raises(HandshakeFailed, match="not here"):
        talk(check=lambda claim: "not here")
    initiator, acceptor = Side(initiate(KEY, CLAIM)), Side(accept(KEY, lambda claim: "not here"))
    acceptor.hear(initiator.said)
    initiator.hear(acceptor.said)
    with pytest.raises(HandshakeFailed):
        acceptor.hear(initiator.said)
    with pytest.raises(ConfigError, match="not here"):
        initiator.hear(acceptor.said)


def test_another_protocol_is_told_so_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL", PROTOCOL + 1)
    initiator = Side(initiate(KEY, CLAIM))
    monkeypatch.undo()
    acceptor = Side(accept(KEY, welcome))
    with pytest.raises(HandshakeFailed, match=f"protocol {PROTOCOL + 1}"):
        acceptor.hear(initiator.said)
    with pytest.raises(ConfigError, match="same version"):
        initiator.hear(acceptor.said)


@given(st.binary(min_size=PREFIX.size, max_size=300))
def test_garbage_is_refused_at_once(data: bytes) -> None:
    if data.startswith(handshake.MAGIC):
        return
    with pytest.raises(HandshakeFailed):
        Side(accept(KEY, welcome)).hear(bytearray(data))
    with pytest.raises(HandshakeFailed):
        Side(initiate(KEY, CLAIM)).hear(bytearray(data))


@given(st.binary(min_size=1, max_size=300))
def test_a_malformed_part_is_refused(part: bytes) -> None:
    with pytest.raises(HandshakeFailed):
        Side(accept(KEY, welcome)).hear(bytearray(PREFIX.pack(handshake.MAGIC, len(part)) + part))


@pytest.mark.parametrize("length", [0, MAX_PART_BYTES + 1, 0xFFFFFFFF])
def test_no_stranger_chooses_how_much_is_read(length: int) -> None:
    acceptor = Side(accept(KEY, welcome))
    with pytest.raises(HandshakeFailed):
        acceptor.hear(bytearray(PREFIX.pack(handshake.MAGIC, length)))
