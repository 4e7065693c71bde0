# SPDX-License-Identifier: Apache-2.0
"""A dedicated summation server: ``commlib server``."""

from __future__ import annotations

import logging
import threading

from commlib import _core
from commlib.config import Config
from commlib.control.bootstrap import connect_server
from commlib.control.interface import Hooks
from commlib.control.interrupt import uninterrupted
from commlib.control.wiring import Wiring
from commlib.errors import PeerLostError
from commlib.losses import CAUSE_TOLD, NOBODY, Told, peer_lost

log = logging.getLogger("commlib")

STOP_TIMEOUT_S = 5.0


def serve(config: Config) -> None:
    """Join the job as a server, sum until its workers have ended, and return.

    Blocks. Raises what ``commlib.init`` raises, and PeerLostError when the job has failed.
    """
    wirings: list[Wiring] = []

    def leave() -> None:
        for joined in wirings:
            joined.close()

    uninterrupted(lambda stop: wirings.append(connect_server(config, stop)), leave)
    (wiring,) = wirings
    over = threading.Event()
    failed = False
    scheduler_lost = False
    told: Told | None = None

    def on_over(job_failed: bool) -> None:
        nonlocal failed
        failed = job_failed
        over.set()

    def on_lost(rank: int | None, host: str, cause: str) -> None:
        nonlocal told
        told = Told(rank, host, cause)
        if server is not None:
            server.abort(NOBODY if rank is None else rank, CAUSE_TOLD)
        on_over(True)

    def on_scheduler_lost() -> None:
        nonlocal scheduler_lost
        scheduler_lost = True
        on_over(True)

    # A job on one host sums in shared memory: there is nothing to serve, only a member to be.
    server = _core.Server(wiring, config.log_level) if wiring.num_nodes > 1 else None
    try:
        wiring.client.attach(Hooks(on_over=on_over, on_lost=on_lost, on_scheduler_lost=on_scheduler_lost))
        over.wait()
        aborted = None
        if server is not None:
            server.stop(STOP_TIMEOUT_S)
            received, sent = server.owner_bytes()
            log.info("served: received %d bytes of pushes, sent %d bytes of results", received, sent)
            aborted = server.aborted()
        if failed or aborted is not None:
            if aborted is None and scheduler_lost:
                raise PeerLostError("the scheduler is lost", cause="is lost")
            member, cause = aborted or (NOBODY, CAUSE_TOLD)
            raise peer_lost(wiring, member, cause, told)
    finally:
        for level, text in server.take_log() if server is not None else []:
            log.log(level, "%s", text)
        wiring.client.bye()
        if server is None:
            wiring.close()
        else:
            wiring.client.close()
