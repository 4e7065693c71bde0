# SPDX-License-Identifier: Apache-2.0
"""What members and the scheduler say to each other: typed, and checked when decoded.

Each message is one MessagePack map with the class's name under ``type``. Anything else, or a field of another type or
out of its range, is a :class:`MalformedMessage`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

PROTOCOL = 2  # of this file and of the hello of commlib/control/handshake.py; raised with every incompatible change
UNNAMED_KINDS = ("push_pull", "broadcast", "barrier")
UNNAMED_COUNT = 1024  # recycled keys of each kind

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0)]


class MalformedMessage(ValueError):  # noqa: N818 - says what it is
    """Bytes that are not a message of this protocol."""


# --- Parts of messages


class Parameters(Struct, frozen=True, kw_only=True):
    """What all members must share: rank 0's settings. Sizes in bytes, times in seconds."""

    partition_bytes: Count
    credit_bytes: Count
    streams: Count
    stall_warning_s: Seconds
    operation_timeout_s: Seconds
    peer_timeout_s: Seconds
    asynchronous: bool


class Member(Struct, frozen=True):
    """A worker: where it is. ``node`` is the index of its host, ``host`` the name for people."""

    rank: Count
    node: Count
    local_rank: Count
    host: Text
    pid: Count


class UnnamedKeys(Struct, frozen=True):
    """The keys of one kind of unnamed operations: number i has key, row and cursor of the first plus i strides."""

    first_key: Count
    first_row: Count
    first_cursor: Count
    cursor_stride: Count


class Declaration(Struct, frozen=True):
    """A name's place in the job: its key, its virtual address, and the runs (first row, parts) of its rows."""

    declared_key: Count
    cursor: Count
    extents: tuple[tuple[Count, Count], ...]


class Signature(Struct, frozen=True):
    """What all ranks must agree on, spelled out for people."""

    collective: Text = ""
    op: Text = ""
    dtype: Text = ""
    shape: tuple[Count | tuple[Count, ...], ...] = ()  # of a tensor, or of each of a group
    root: int | None = None
    compression: Text = ""
    group: Text = ""


# --- From members


class Probe(Struct, frozen=True, tag=True):
    """Is this the scheduler of `job`?"""

    job: Text


class Hello(Struct, frozen=True, tag=True, kw_only=True):
    """Here I am. A server has no rank, sizes or parameters: it takes what the workers say."""

    protocol: int
    version: Text
    job: Text
    instance: Text  # made at random for this one member, for this one time
    role: Text
    host: Text
    pid: Count
    rank: Count = 0
    size: Count = 0
    local_rank: Count = 0
    local_size: Count = 0
    node: Text = ""
    num_servers: Count = 0
    arena_bytes: Count = 0
    parameters: Parameters | None = None
    was_here: bool = False  # in a job of this id before: it comes for the next one, perhaps in another place


class WhoIsMissing(Struct, frozen=True, tag=True):
    """Whom does the job wait for?"""


class Endpoint(Struct, frozen=True, tag=True):
    """This local root or server listens here for its peers."""

    address: Text


class Wired(Struct, frozen=True, tag=True):
    """This member is connected to all that it must be connected to."""


class Declare(Struct, frozen=True, tag=True):
    """Number these names, each with the bytes of its tensor."""

    request: Count
    names: tuple[tuple[Text, Count], ...]


class Report(Struct, frozen=True, tag=True):
    """The ranks disagree in this round of `name`; this is what I submitted."""

    name: Text
    round: Count
    signature: Signature


class Stalled(Struct, frozen=True, tag=True):
    """I wait for this round of `name`: who has not submitted it?"""

    name: Text
    round: Count
    waiting_s: Seconds


class Submitted(Struct, frozen=True, tag=True):
    """The answer to a Query: the last round of the name that I have submitted."""

    query: Count
    round: Count


class Gone(Struct, frozen=True, tag=True):
    """This member has noticed that another one is lost. `rank` is None for a server."""

    rank: Count | None
    host: Text
    cause: Text


class Bye(Struct, frozen=True, tag=True):
    """I leave in order."""


# --- From the scheduler


class Here(Struct, frozen=True, tag=True):
    """The answer to a Probe."""

    job: Text


class Missing(Struct, frozen=True, tag=True):
    """Whom the job waits for, now.

    Ranks are in words, as ``1, 3-5``; `gone` are those that were here and have left again. Empty: none.
    """

    ranks: str
    gone: str
    servers: Count


class Welcome(Struct, frozen=True, tag=True, kw_only=True):
    """All are here. `arena_bytes` is by node: what every rank of that host can map of each other rank's arena."""

    members: tuple[Member, ...]
    servers: tuple[Text, ...]
    arena_bytes: tuple[Count, ...]
    parameters: Parameters
    unnamed: dict[str, UnnamedKeys]
    server_index: Count | None = None


class Refused(Struct, frozen=True, tag=True):
    """You cannot join, or the job cannot begin. `retry`: not now, but perhaps soon."""

    reason: str
    code: int
    retry: bool = False


class Endpoints(Struct, frozen=True, tag=True):
    """Where each local root and server listens, by PeerId."""

    addresses: tuple[Text, ...]


class Go(Struct, frozen=True, tag=True):
    """Everybody is connected to everybody."""


class Declared(Struct, frozen=True, tag=True):
    """The answer to a Declare, in its order; or an error, and nothing was declared."""

    request: Count
    declarations: tuple[Declaration, ...] = ()
    error: str = ""
    code: int = 0


class Verdict(Struct, frozen=True, tag=True):
    """What the ranks disagreed about. `values` is what each rank that reported said about `field`."""

    name: Text
    round: Count
    field: Text
    text: str
    values: dict[int, tuple[int | tuple[int, ...], ...] | int | str | None]


class Query(Struct, frozen=True, tag=True):
    """Which round of `name` have you submitted last?"""

    query: Count
    name: Text


class StallReport(Struct, frozen=True, tag=True):
    """Who has not submitted this round: (rank, host). `silent` are those that did not answer."""

    name: Text
    round: Count
    waiting_s: Seconds  # how long somebody has waited
    missing: tuple[tuple[Count, Text], ...]
    silent: tuple[tuple[Count, Text], ...]


class Lost(Struct, frozen=True, tag=True):
    """A member is lost, and with it the job. `rank` is None for a server."""

    rank: Count | None
    host: Text
    cause: Text


class Over(Struct, frozen=True, tag=True):
    """To servers: no worker needs you any more. `failed`: a member was lost."""

    failed: bool


class Farewell(Struct, frozen=True, tag=True):
    """The answer to a Bye: how many members are still there."""

    remaining: Count


class Error(Struct, frozen=True, tag=True):
    """What you sent makes no sense here."""

    reason: str


MemberSays = WhoIsMissing | Endpoint | Wired | Declare | Report | Stalled | Submitted | Gone | Bye
FromMember = Probe | Hello | MemberSays
FromScheduler = (
    Here
    | Missing
    | Welcome
    | Refused
    | Endpoints
    | Go
    | Declared
    | Verdict
    | Query
    | StallReport
    | Lost
    | Over
    | Farewell
    | Error
)

_encoder = msgspec.msgpack.Encoder()
_from_member: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)
_from_scheduler: msgspec.msgpack.Decoder[FromScheduler] = msgspec.msgpack.Decoder(FromScheduler)


def encode(message: FromMember | FromScheduler) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode_from_member(data: bytes | memoryview) -> FromMember:
    """What a member said; raises MalformedMessage."""
    try:
        return _from_member.decode(data)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(str(error)) from None


def decode_from_scheduler(data: bytes | memoryview) -> FromScheduler:
    """What the scheduler said; raises MalformedMessage."""
    try:
        return _from_scheduler.decode(data)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(str(error)) from None
