# SPDX-License-Identifier: Apache-2.0
"""Leaving a job and joining it again with another number of workers, as BytePS's elastic training does it."""

from __future__ import annotations

import dataclasses
import socket as sockets
import time
from typing import Any

from commlib import api
from commlib.config import Config
from commlib.control.addresses import split_address
from commlib.control.bootstrap import PROBE_S
from commlib.control.rendezvous import probe
from commlib.control.scheduler_process import scheduler_addresses
from commlib.control.security import derive_keys, load_secret
from commlib.errors import NotInitializedError, OperationTimeout

__all__ = ["resume", "suspend"]

AGAIN_S = 0.05

_suspended: Config | None = None


def suspend() -> None:
    """Leave the job as :func:`commlib.shutdown` does, and keep this process's settings for :func:`resume`.

    To be called by all ranks, when none of them has an operation in flight. Dedicated servers end with the job. Arrays
    and tensors stay as they are. Raises NotInitializedError if there is no job to leave.
    """
    global _suspended
    config = api.session().config
    api.shutdown()
    _suspended = config


def resume(
    num_workers: int,
    num_servers: int,
    global_rank: int | None = None,
    context: Any = None,
    **settings: Any,
) -> None:
    """Join the job again after :func:`suspend`, with others. Blocks until all of them are there.

    `num_workers` counts as BytePS counts: *hosts*, each with as many processes as this one has, so that ``size()`` will
    be ``num_workers * local_size()``. `num_servers` dedicated servers, which have to be started anew; `global_rank` is
    this worker's new rank, None for the old one. `settings` are further fields of ``commlib.Config`` that change, as
    ``local_rank=0, local_size=2``; all others stay as they were. `context` has no meaning.

    New workers come in by ``init()``, with the job's id and size in their environment. Names need no declaration.
    An optimizer whose gradients are reduced should be wrapped anew: the number of ranks is another.

    Raises NotInitializedError without a ``suspend()`` before, ConfigError for settings that contradict each other, and
    what ``init`` raises. It may then be called again.
    """
    global _suspended
    if api.is_initialized() or _suspended is None:
        raise NotInitializedError("resume() needs a suspend() before it; a process that was in no job calls init()")
    config = _changed(_suspended, num_workers, num_servers, global_rank, settings)
    if config.rank == 0 != _suspended.rank and not config.scheduler_external:
        _await_end_of_previous(config)
    api.init(config)
    _suspended = None


def _changed(
    old: Config, num_workers: int, num_servers: int, global_rank: int | None, settings: dict[str, Any]
) -> Config:
    new: dict[str, Any] = {"rank": old.rank if global_rank is None else global_rank, "num_servers": num_servers}
    new["local_size"] = settings.get("local_size", old.local_size)
    new["size"] = num_workers * new["local_size"]
    new["local_rank"] = old.local_rank if new["rank"] == old.rank else new["rank"] % max(1, new["local_size"])
    new |= settings
    if old.node == str(old.rank - old.local_rank):  # nobody has given the host a label
        new.setdefault("node", str(new["rank"] - new["local_rank"]))
    return dataclasses.replace(old, **new)


def _await_end_of_previous(config: Config) -> None:
    """This process, which will start the scheduler, did not start the previous one: until that has gone."""
    keys = derive_keys(load_secret(config), config.job)
    deadline = time.monotonic() + config.connect_timeout_s
    # Where there are several addresses, the new one will be at another.
    addresses = scheduler_addresses(config)
    while len(addresses) == 1 and _listens(addresses[0]) and probe(addresses[0], keys, config.job, PROBE_S):
        if time.monotonic() > deadline:
            raise OperationTimeout(
                f"the previous job {config.job!r} still runs after {config.connect_timeout_s:g} s: not all of its "
                "members have called suspend() or shutdown()"
            )
        time.sleep(AGAIN_S)  # nothing tells when it has gone


def _listens(address: str) -> bool:
    """Is anybody there at all? To ask who it is takes a while where nobody answers."""
    try:
        if address.startswith("ipc://@"):
            with sockets.socket(sockets.AF_UNIX) as socket:
                socket.connect("\0" + address.removeprefix("ipc://@"))
        else:
            sockets.create_connection(split_address(address), timeout=PROBE_S).close()
    except OSError:
        return False
    return True
