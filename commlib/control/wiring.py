# SPDX-License-Identifier: Apache-2.0
"""What a member has when it is connected: everything that the core is built from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commlib.control.messages import Member, Parameters, UnnamedKeys

if TYPE_CHECKING:
    from commlib.control.interface import Control

__all__ = ["Member", "Parameters", "UnnamedKeys", "Wiring"]


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """A member's connections. All descriptors are close-on-exec and belong to whoever holds this object.

    Give them all to the core, which closes them, and end with ``client.bye()`` and ``client.close()``; or call
    :meth:`close`, which closes everything.
    """

    rank: int  # −1 for a server
    size: int
    local_rank: int  # −1 for a server
    local_size: int  # 0 for a server
    node: int  # index of this host; −1 for a server
    num_nodes: int
    num_servers: int
    peer_id: int  # this host's or server's own PeerId: hosts 0 … n−1, then servers
    members: tuple[Member, ...]  # by rank
    servers: tuple[str, ...]  # host names, by server index
    ranks_per_node: tuple[int, ...]
    parameters: Parameters  # the same in the whole job
    table_fd: int  # the ready table of this host, −1 for a server
    arena_fds: tuple[int, ...]  # by local rank
    arena_bytes: tuple[int, ...]  # by local rank
    local_pids: tuple[int, ...]  # by local rank, as the kernel told; 0: in a PID namespace out of sight
    local_socket_fds: Mapping[
        int, int
    ]  # local rank → unix socket, non-blocking: the root's to all others, theirs to it
    peers: Mapping[int, tuple[int, ...]]  # PeerId → one TCP socket a stream, non-blocking. Only local roots and servers
    client: Control
    unnamed: Mapping[str, UnnamedKeys]  # by kind of operation

    def descriptors(self) -> tuple[int, ...]:
        """All descriptors, each once."""
        table = () if self.table_fd < 0 else (self.table_fd,)
        streams = (fd for fds in self.peers.values() for fd in fds)
        return (*table, *self.arena_fds, *self.local_socket_fds.values(), *streams)

    def close_memory(self) -> None:
        """Close the descriptors of shared memory, when it is mapped."""
        for fd in {self.table_fd, *self.arena_fds}:
            os.close(fd)

    def close(self) -> None:
        """Leave without a word: close the descriptors and the client. Only if the core has not been given them."""
        self.client.close()
        for fd in self.descriptors():
            with contextlib.suppress(OSError):
                os.close(fd)
