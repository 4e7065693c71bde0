# SPDX-License-Identifier: Apache-2.0
"""Who is lost and why, in words: what the core has seen and what the scheduler has said."""

from __future__ import annotations

from typing import NamedTuple

from commlib.control.wiring import Wiring
from commlib.errors import PeerLostError

__all__ = ["CAUSE_LEFT", "CAUSE_TOLD", "NOBODY", "Told", "cause_in_words", "member_in_words", "peer_lost"]

SERVER_BIT = 1 << 31  # kServerBit of src/sched/wire.hpp
NOBODY = 0xFFFFFFFF  # Failure::kNobody of src/sched/ready_table.hpp

# Cause of src/sched/ready_table.hpp, in words that go after "rank 3 on host a …".
CAUSES = (
    "is lost",
    "is lost: its process has ended",
    "is lost: it closed its connection",
    "is lost: its connection failed",
    "is lost: it has given no sign of life for the peer timeout",
    "is lost: it sent what no member of this job sends",
    "has failed with a fault of the library; see its log",
    "has left the job: it shut down while others still needed it",
    "is lost",
    "has no memory left in its arena; see COMMLIB_ARENA_BYTES",
    "has given a buffer that cannot be read: it was unmapped, or never there",
)
CAUSE_LEFT, CAUSE_TOLD = 7, 8


class Told(NamedTuple):
    """What the scheduler has said of a lost member."""

    rank: int | None  # None for a server
    host: str
    cause: str


def cause_in_words(cause: int) -> str:
    """What goes after the name of a member. Numbers of another version, or of a broken one, are just a loss."""
    return CAUSES[cause] if cause < len(CAUSES) else CAUSES[0]


def member_in_words(wiring: Wiring, member: int) -> tuple[int | None, str, str]:
    """Rank (None for a server), host, and both in words, of a member as the core numbers them."""
    if member == NOBODY:
        return None, "", "a member"
    if member & SERVER_BIT:
        index = member & ~SERVER_BIT
        host = wiring.servers[index] if index < len(wiring.servers) else "?"
        return None, host, f"server {index} on host {host}"
    host = wiring.members[member].host if member < len(wiring.members) else "?"
    return member, host, f"rank {member} on host {host}"


def peer_lost(wiring: Wiring, member: int, cause: int, told: Told | None) -> PeerLostError:
    """The error for a member and a cause as the core numbers them; `told` counts where the core was only told so."""
    rank, host, who = member_in_words(wiring, member)
    text = cause_in_words(cause)
    if cause == CAUSE_TOLD and told is not None:
        rank, host, why = told
        who = f"rank {rank} on host {host}" if rank is not None else f"a server on host {host}"
        text = f"is lost: {why}"
    return PeerLostError(f"{who} {text}", rank=rank, host=host, cause=text)
