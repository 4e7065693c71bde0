# SPDX-License-Identifier: Apache-2.0
"""A job that cannot begin: everybody is told soon, in words, who or what is wrong, and ends with status 1."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.launch import Job, Outcome

LIMIT_S = 2.0
# Interpreters that start side by side do not begin to wait at the same time, and rank 0's scheduler is another one.
SLACK_S = 6.0

WORKER = """
    import time
    import commlib
    from tests.launch import give

    began = time.monotonic()
    try:
        commlib.init()
    except BaseException as error:
        give((type(error).__name__, str(error), time.monotonic() - began))
        raise
"""

Env = Mapping[str, str | None]


def attempt(
    hosts: Sequence[int],
    *,
    servers: int = 0,
    env: Env | None = None,
    rank_env: Mapping[int, Env] | None = None,
    limit_s: float = LIMIT_S,
) -> list[Outcome]:
    """What comes of a job that cannot begin."""
    limits = {"COMMLIB_CONNECT_TIMEOUT_S": str(limit_s)}
    with Job(WORKER, hosts=hosts, servers=servers, env={**limits, **(env or {})}, rank_env=rank_env) as job:
        outcomes = job.wait(30)
    for outcome in outcomes[: sum(hosts)]:
        assert outcome.status == 1, outcome
        assert outcome.value is not None, outcome
        assert outcome.value[2] < limit_s + SLACK_S, outcome
    for outcome in outcomes[sum(hosts) :]:
        assert outcome.status == 1, outcome
        assert "Traceback" not in outcome.stderr, outcome
    return outcomes


def check(outcome: Outcome, kinds: Sequence[str], *words: str) -> None:
    kind, text, _ = outcome.value
    assert kind in kinds, outcome
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of loopback that nobody listens at, or will."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_is_missing(missing: int) -> None:
    # The places of three, of which only two come.
    places: dict[int, Env] = {
        process: {"COMMLIB_RANK": str(rank), "COMMLIB_LOCAL_RANK": str(rank)}
        for process, rank in enumerate(rank for rank in range(3) if rank != missing)
    }
    outcomes = attempt([2], env={"COMMLIB_SIZE": "3", "COMMLIB_LOCAL_SIZE": "3"}, rank_env=places)
    for outcome in outcomes:
        # Without rank 0 there is no scheduler, and nobody to know more than that.
        check(
            outcome,
            ["OperationTimeout"],
            f"rank {missing}" if missing else "no scheduler of the job",
            "CONNECT_TIMEOUT",
        )


def test_a_host_is_missing() -> None:
    for outcome in attempt([1, 1], env={"COMMLIB_SIZE": "4"}):
        check(outcome, ["OperationTimeout"], "rank 2, 3", "COMMLIB_CONNECT_TIMEOUT_S")


def test_a_server_is_missing() -> None:
    # Of two one comes, and may have given up again before the workers do.
    outcomes = attempt([1, 1], servers=1, env={"COMMLIB_NUM_SERVERS": "2"}, limit_s=4.0)
    for outcome in outcomes[:2]:
        check(outcome, ["OperationTimeout"], "dedicated server", "COMMLIB_CONNECT_TIMEOUT_S")
    assert re.search("still waits for .*(dedicated server|workers)", outcomes[2].stderr)


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_one_has_another_secret(hosts: list[int]) -> None:
    outcomes = attempt(hosts, rank_env={1: {"COMMLIB_SECRET": "of somebody else"}})
    check(outcomes[0], ["OperationTimeout"], "rank 1")
    check(outcomes[1], ["AuthenticationError"], "the job secret", "COMMLIB_SECRET")


def test_a_server_has_another_secret() -> None:
    with Job(WORKER, hosts=[1, 1], env={"COMMLIB_NUM_SERVERS": "1", "COMMLIB_CONNECT_TIMEOUT_S": str(LIMIT_S)}) as job:
        for outcome in job.wait(30):
            check(outcome, ["OperationTimeout"], "1 dedicated server")


def test_one_looks_for_the_scheduler_elsewhere(closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    outcomes = attempt([1, 1], rank_env={1: {"COMMLIB_SCHEDULER": address}})
    check(outcomes[0], ["OperationTimeout"], "rank 1")
    check(outcomes[1], ["OperationTimeout"], "no scheduler of the job", address)


def test_the_scheduler_s_host_is_unknown() -> None:
    outcomes = attempt([1, 1], rank_env={1: {"COMMLIB_SCHEDULER": "no-such-host.invalid:5555"}})
    check(outcomes[0], ["OperationTimeout"], "rank 1")
    check(outcomes[1], ["OperationTimeout", "ConfigError"], "no-such-host.invalid")


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", bytes(64), b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_something_else_listens_where_the_scheduler_should(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        accepted: list[socket.socket] = []
        env = {
            "COMMLIB_CONNECT_TIMEOUT_S": str(LIMIT_S),
            "COMMLIB_SCHEDULER": address,
            "COMMLIB_SCHEDULER_EXTERNAL": "1",
        }
        with Job(WORKER, hosts=[1, 1], env=env) as job:
            deadline = time.monotonic() + 30
            while any(process.popen.poll() is None for process in job.workers) and time.monotonic() < deadline:
                try:
                    accepted.append(listener.accept()[0])
                except TimeoutError:
                    continue
                accepted[-1].sendall(greeting)
            outcomes = job.wait(5)
        for one in accepted:
            one.close()
    for outcome in outcomes:
        assert outcome.status == 1
        check(outcome, ["OperationTimeout", "ConfigError", "AuthenticationError"], address)
        assert outcome.value[2] < LIMIT_S + SLACK_S


@pytest.mark.parametrize("hosts", [[3], [2, 1], [1, 1, 1]])
def test_two_have_the_same_rank(hosts: list[int]) -> None:
    outcomes = attempt(hosts, rank_env={2: {"COMMLIB_RANK": "1", "COMMLIB_LOCAL_RANK": "0" if hosts != [3] else "1"}})
    for outcome in outcomes:
        check(outcome, ["ConfigError"], "rank 1")


def test_two_are_rank_0() -> None:
    # Both want to be the scheduler, too.
    outcomes = attempt([2], rank_env={1: {"COMMLIB_RANK": "0", "COMMLIB_LOCAL_RANK": "0"}})
    for outcome in outcomes:
        check(outcome, ["ConfigError", "AddressTaken"], "rank 0")


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_two_disagree_about_the_size(hosts: list[int]) -> None:
    sizes = {"COMMLIB_SIZE": "3"} if hosts != [2] else {"COMMLIB_SIZE": "3", "COMMLIB_LOCAL_SIZE": "3"}
    for outcome in attempt(hosts, rank_env={1: sizes}):
        check(outcome, ["ConfigError"], "2", "3", "disagree")


def test_hosts_with_the_same_label() -> None:
    outcomes = attempt([1, 1], env={"COMMLIB_NODE": "the same"})
    for outcome in outcomes:
        check(outcome, ["ConfigError"], "'the same'", "COMMLIB_NODE")
