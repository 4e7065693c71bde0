# SPDX-License-Identifier: Apache-2.0
"""ZeroMQ's reports about connections.

``zmq.utils.monitor`` does the same, but loads asyncio, which is more than the rest of the scheduler takes to start.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zmq

__all__ = ["take_events"]


def take_events(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """The events that wait at a monitor socket: (one of zmq.EVENT_…, its value)."""
    while True:
        try:
            head = monitor.recv_multipart(zmq.NOBLOCK)[0]
        except zmq.Again:
            return
        yield struct.unpack("=HI", head)
