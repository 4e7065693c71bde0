# SPDX-License-Identifier: Apache-2.0
"""A network on which nothing comes when it is expected: links change their rate, and drop out for moments."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

from tests.lab import Lab

RATES = ("40mbit", "100mbit", "400mbit", "none")


@contextlib.contextmanager
def jostled(lab: Lab, hosts: int, seed: int) -> Iterator[None]:
    """Disturb the links of the first `hosts` hosts until the `with` ends; then they are as fast as the machine is."""
    over = threading.Event()
    failure: list[BaseException] = []

    def disturb() -> None:
        rng = random.Random(seed)
        try:
            while not over.wait(rng.uniform(0.01, 0.1)):
                host = rng.randrange(hosts)
                if rng.random() < 0.3:
                    lab.cut(host)
                    over.wait(rng.uniform(0.005, 0.05))
                    lab.heal(host)
                else:
                    lab.pace(host, rng.choice(RATES))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for host in range(hosts):
            lab.heal(host)
            lab.pace(host, "none")
    assert not failure, failure
