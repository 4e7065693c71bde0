# SPDX-License-Identifier: Apache-2.0
"""Messages between two members of a group: a broadcast in a session of the two, under a name for direction and tag.

Each tag in each direction has 16 names, used in turn and kept; so many messages may be in flight, later ones wait.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from commlib.errors import CommlibError
from commlib.torch.distributed import collectives
from commlib.torch.distributed.channel import Channel, Directory, Slot
from commlib.torch.distributed.lane import Lane, described
from commlib.torch.distributed.work import Work

__all__ = ["Messages"]

SLOTS = 16


class Messages:
    """Those that one member sends and receives, to and from all others and itself."""

    def __init__(
        self,
        directory: Directory,
        ranks: Sequence[int],
        of_group: Channel,
        hopeless: Callable[[], CommlibError | None],
    ) -> None:
        """`ranks` of the members in the whole job; `of_group`: the session of all members; `hopeless`: see Channel."""
        self._directory = directory
        self._rank, self._size = directory.rank, directory.size
        self._ranks = ranks
        self._of_group = of_group
        self._hopeless = hopeless
        self._lock = threading.Lock()  # guards what follows
        self._closed: CommlibError | None = None
        self._pairs: dict[int, Channel] = {}  # by the other's rank
        self._slots: dict[tuple[int, int, int, int], Slot] = {}
        self._counts: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._to_self: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)  # by tag: sent, and not yet received
        self._from_self: defaultdict[int, deque[tuple[Work, deque[torch.Tensor]]]] = defaultdict(deque)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, group: str, timeout_s: float) -> Work:
        """A message to a member; `group` is the group's name, for errors. Ends when it has arrived."""
        if peer == self._rank:
            return self._send_to_self(tensor, tag, timeout_s)
        return self._move(tensor, self._rank, peer, tag, group, timeout_s)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, group: str, timeout_s: float) -> Work:
        """A message from a member."""
        if peer == self._rank:
            return self._receive_from_self(tensor, tag, timeout_s)
        return self._move(tensor, peer, self._rank, tag, group, timeout_s)

    def close(self, error: CommlibError) -> None:
        """End all sessions but the group's. May be repeated."""
        with self._lock:
            self._closed = error
            channels = list(self._pairs.values())
        for channel in channels:
            channel.close(error)

    def _move(
        self, tensor: torch.Tensor, source: int, destination: int, tag: int, group: str, timeout_s: float
    ) -> Work:
        members = sorted((source, destination))
        with self._lock:
            channel = self._channel_with(destination if source == self._rank else source, members)
            number = self._counts[source, destination, tag]
            self._counts[source, destination, tag] += 1
            key = (source, destination, tag, number % SLOTS)
            slot = self._slots.setdefault(key, Slot(f"torch.{source}>{destination}.{tag}.{key[3]}"))
        subject = (
            f"message {number + 1} of tag {tag} from rank {self._ranks[source]} to rank {self._ranks[destination]} in "
            f"the process group {group!r}"
        )
        lane = Lane(channel, slot.name, subject, "send and recv", 0, described([tensor]))
        plan = collectives.broadcast(lane, tensor, members.index(source))
        work = Work(plan, [tensor], timeout_s, explain=lane.explain, source_rank=source)
        channel.submit(work, slot, self._hopeless)
        return work

    def _channel_with(self, peer: int, members: Sequence[int]) -> Channel:
        """Called with the lock held."""
        if not 0 <= peer < self._size:
            raise ValueError(f"there is no rank {peer} in a group of {self._size}")
        if self._size == 2:  # the two have a session already
            return self._of_group
        channel = self._pairs.get(peer)
        if channel is None:
            ranks = [self._ranks[member] for member in members]
            channel = self._pairs[peer] = Channel(self._directory, members, ranks)
            if self._closed is not None:
                channel.close(self._closed)
        return channel

    def _send_to_self(self, tensor: torch.Tensor, tag: int, timeout_s: float) -> Work:
        work = Work(collectives.nothing(), [], timeout_s, source_rank=self._rank)
        with self._lock:
            self._to_self[tag].append(tensor.detach().clone())
        work.begin()
        self._match(tag)
        return work

    def _receive_from_self(self, tensor: torch.Tensor, tag: int, timeout_s: float) -> Work:
        received: deque[torch.Tensor] = deque()
        work = Work(collectives.take(received, tensor), [tensor], timeout_s, source_rank=self._rank)
        work.begin_after(None)
        with self._lock:
            self._from_self[tag].append((work, received))
        self._match(tag)
        return work

    def _match(self, tag: int) -> None:
        with self._lock:
            if not self._to_self[tag] or not self._from_self[tag]:
                return
            work, received = self._from_self[tag].popleft()
            received.append(self._to_self[tag].popleft())
        work.begin()
