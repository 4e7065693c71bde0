# SPDX-License-Identifier: Apache-2.0
"""How ``init_process_group("commlib")`` finds its store where no launcher of torch has said where one is.

torch reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Under ``commlib run`` and other launchers that commlib knows
there are none; but there is a job, and in it rank 0 can tell the others where torch's store is.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

import commlib
from commlib.config import Config
from commlib.control.addresses import listening_address
from commlib.control.launchers import find_place
from commlib.torch.distributed.channel import NOWHERE

__all__ = ["register"]

SCHEME = "commlib"

Found = tuple[Any, int, int]  # store, rank, size


def meet(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[Found]:
    """A store for ``init_method="commlib://"``: joins commlib's job, if this process has not, and stays in it."""
    commlib.init()
    limit = {} if timeout is None else {"timeout": timeout}
    store = None
    address: tuple[str, int] | None = None
    if commlib.rank() == 0:
        host = "127.0.0.1"
        if commlib.num_nodes() > 1:
            config = Config.from_environment()
            towards = config.scheduler_addresses()[:1] or (NOWHERE,)
            host = listening_address(config.interface, towards[0], allow_loopback=config.is_one_machine)
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, **limit)
        address = host, store.port
    host, port = commlib.broadcast_object(address, 0, name="torch.distributed.store")
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, **limit)
    yield store, commlib.rank(), commlib.size()
    raise RuntimeError("the members of a group cannot change")


def _env_or_commlib(of_torch: Callable[..., Iterator[Found]]) -> Callable[..., Iterator[Found]]:
    def handler(url: str, *args: Any, **kwargs: Any) -> Iterator[Found]:
        told = "RANK" in os.environ or "WORLD_SIZE" in os.environ or bool(urlparse(url).query)
        if told or not ("COMMLIB_RANK" in os.environ or find_place(os.environ)):
            return of_torch(url, *args, **kwargs)
        return meet(url, *args, **kwargs)

    return handler


def register() -> None:
    """Let torch find stores at ``commlib://``, and at ``env://`` where only commlib knows this process's place."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name
    rendezvous.register_rendezvous_handler(SCHEME, meet)
    # torch has no way to say which method is the default of a backend.
    handlers = getattr(rendezvous, "_rendezvous_handlers", None)
    if handlers is not None and "env" in handlers:
        handlers["env"] = _env_or_commlib(handlers["env"])
