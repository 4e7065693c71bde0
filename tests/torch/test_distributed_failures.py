# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on the backend "commlib" is raised, on all ranks, by all that wait; and nothing is left behind."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from tests.torch import message_of
from tests.torch.test_distributed import job_of, results_of


def zeros(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.zeros(*shape, dtype=dtype)


def large() -> Any:
    return zeros(30_000)


def rows(make: Callable[[], Any] = lambda: zeros(3)) -> Any:
    return [make() for _ in range(dist.get_world_size())]


# Pairs of calls that do not belong together: one rank makes the second, all others the first.
DISAGREEMENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dtype": (lambda: dist.all_reduce(zeros(3)), lambda: dist.all_reduce(zeros(3, dtype=torch.int32))),
    "shape": (lambda: dist.all_reduce(zeros(2, 3)), lambda: dist.all_reduce(zeros(3, 2))),
    "size": (lambda: dist.all_reduce(zeros(3)), lambda: dist.all_reduce(zeros(4_000_000))),
    "reduction": (lambda: dist.all_reduce(zeros(3)), lambda: dist.all_reduce(zeros(3), dist.ReduceOp.MAX)),
    "root": (lambda: dist.broadcast(zeros(3), 0), lambda: dist.broadcast(zeros(3), 1)),
    "root of reduce": (lambda: dist.reduce(zeros(3), 0), lambda: dist.reduce(zeros(3), 1)),
    "dtype of bytes": (lambda: dist.broadcast(zeros(4), 0), lambda: dist.broadcast(zeros(2, dtype=torch.float64), 0)),
    "kind": (lambda: dist.all_reduce(zeros(3)), lambda: dist.broadcast(zeros(3), 0)),
    "kind of sum": (
        lambda: dist.all_reduce(zeros(3)),
        lambda: dist.reduce_scatter_tensor(zeros(1), zeros(dist.get_world_size())),
    ),
    "kind of large": (lambda: dist.all_reduce(large()), lambda: dist.all_gather(rows(large), large())),
    "barrier": (lambda: dist.all_reduce(zeros(3)), dist.barrier),
    "gather": (lambda: dist.all_gather(rows(), zeros(3)), lambda: dist.all_gather(rows(large), large())),
    "coalesced": (
        lambda: dist.all_reduce_coalesced([zeros(3), zeros(2)]),
        lambda: dist.all_reduce_coalesced([zeros(3), zeros(3)]),
    ),
    "exchange": (
        lambda: dist.all_to_all_single(zeros(dist.get_world_size()), zeros(dist.get_world_size())),
        lambda: dist.all_to_all_single(
            zeros(dist.get_world_size()),
            zeros(dist.get_world_size() + 1),
            None,
            [2, *[1] * (dist.get_world_size() - 1)],
        ),
    ),
}


def disagreements() -> dict[str, tuple[str, str]]:
    """What each rank gets; after each of them the group can be used."""
    warnings.simplefilter("ignore")
    found = {}
    for name, calls in DISAGREEMENTS.items():
        found[name] = message_of(calls[dist.get_rank() == 1])
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((5,), float(dist.get_world_size()))), name
    # The order of two operations, started together.
    first, second = zeros(7), zeros(7, dtype=torch.float64)
    if dist.get_rank() == 1:
        first, second = second, first
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    for work in works:
        found[f"order {works.index(work)}"] = message_of(work.wait)
        assert isinstance(work.exception(), ValueError)
        assert not work.is_success()
    # Messages are the affair of two.
    if dist.get_rank() == 0:
        found["message"] = message_of(lambda: dist.send(zeros(3), 1))
    elif dist.get_rank() == 1:
        found["message"] = message_of(lambda: dist.recv(zeros(4), 0))
    failed = dist.all_reduce(zeros(3 + (dist.get_rank() == 1)), async_op=True).get_future()
    found["future"] = message_of(failed.wait)
    dist.barrier()
    return found


def refusals() -> dict[str, tuple[str, str]]:
    """What cannot be done anywhere is refused at once, everywhere, and costs nobody anything."""
    calls: dict[str, Callable[[], Any]] = {
        "device": lambda: dist.all_reduce(torch.zeros(3, device="meta")),
        "dtype": lambda: dist.all_reduce(torch.zeros(3).to(torch.float8_e4m3fn)),
        "bits of floats": lambda: dist.all_reduce(zeros(3), dist.ReduceOp.BAND),
        "average of bool": lambda: dist.all_reduce(zeros(3, dtype=torch.bool), dist.ReduceOp.AVG),
        "any source": lambda: dist.recv(zeros(3)),
        "room": lambda: dist.all_gather_into_tensor(zeros(5), zeros(3)),
        "list": lambda: dist.all_gather(rows()[1:], zeros(3)),
        "splits": lambda: dist.all_to_all_single(zeros(2), zeros(3), [1] * 5, [1] * 5),
    }
    warnings.simplefilter("ignore")
    found = {name: message_of(call) for name, call in calls.items()}
    dist.barrier()
    return found


def timeouts() -> None:
    """An operation whose time has passed stays in flight, and may be waited for again."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier(group)
    tensor, messages = torch.ones(3), []
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        messages = [message_of(lambda: work.wait(timedelta(seconds=0.2))), message_of(work.wait)]
        assert not work.is_completed()
    dist.barrier()
    if dist.get_rank() != 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert tensor[0] == dist.get_world_size()
    assert all(kind == "OperationTimeout" for kind, _ in messages), messages
    # A future ends, too, when nobody comes.
    if dist.get_rank() == 0:
        future = dist.irecv(zeros(3), 1, group).get_future()
        assert "OperationTimeout" in message_of(future.wait)[1]


def again() -> None:
    """A process may leave, and form another group under the same name and store."""
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("commlib")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor[0] == dist.get_world_size()


WORKERS = [disagreements, refusals, timeouts, again]


def test_disagreements_are_raised_everywhere() -> None:
    results = results_of(disagreements, (3,))
    for rank, found in enumerate(results):
        assert set(DISAGREEMENTS) <= found.keys()
        assert {name: kind for name, (kind, _) in found.items() if kind != "MismatchError" and name != "future"} == {}
        assert "MismatchError" in " ".join(found["future"])
        assert "message" in found or rank == 2
    texts = {name: text for name, (_, text) in results[0].items()}
    assert "all_reduce(SUM) of float32 [2, 3] on rank 0; all_reduce(SUM) of float32 [3, 2] on rank 1" in texts["shape"]
    assert "all_reduce(MAX)" in texts["reduction"]
    assert "reduce(SUM, rank 1)" in texts["root of reduce"]
    assert "broadcast(rank 1)" in texts["root"]
    assert "float64 [2] on rank 1" in texts["dtype of bytes"]
    assert "This one called all_reduce(SUM) of float32 [30000]" in texts["kind of large"]
    assert "This one called all_gather of float32 [30000]" in results[1]["kind of large"][1]
    assert "rank 1 sends 8 bytes to rank 0, which expects 4" in texts["exchange"]
    assert "message 1 of tag 0 from rank 0 to rank 1" in texts["message"]


def test_refusals_say_what_is_wrong() -> None:
    for found in results_of(refusals, (3,)):
        kinds = {name: kind for name, (kind, _) in found.items()}
        assert {kinds[name] for name in ("device", "dtype", "bits of floats", "average of bool", "any source")} == {
            "UnsupportedError"
        }
        assert {kinds[name] for name in ("room", "list", "splits")} == {"ValueError"}


@pytest.mark.parametrize("worker", [timeouts, again])
def test_lives_on(worker: Callable[[], None]) -> None:
    results_of(worker, (3,))


def test_lost_peer_is_raised_by_everybody() -> None:
    """Whatever they wait for; also for a message of the lost one, with whom they never had spoken."""
    script = """
import time
group = dist.new_group([0, 2])
tensor = torch.ones(1000)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 9))
model(torch.ones(2, 9)).sum().backward()
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    dist.all_reduce(tensor, group=group) if False else None
work = dist.all_reduce(tensor, async_op=True) if dist.get_rank() != 2 else None
announce("ready")
if dist.get_rank() == 2:
    listen()
since = time.monotonic()
calls = [lambda: dist.recv(tensor, 2), work.wait, lambda: dist.all_reduce(tensor), lambda: dist.barrier(),
         lambda: dist.all_gather([torch.zeros(30_000)] * 3, torch.zeros(30_000))]
if dist.get_rank() == 0:
    calls.append(lambda: dist.all_reduce(tensor, group=group))
errors = []
for call in calls:
    try:
        call()
    except commlib.errors.PeerLostError as error:
        errors.append(error.rank)
for call in (
    lambda: dist.all_reduce(tensor, async_op=True).get_future().wait(),
    lambda: model(torch.ones(2, 9)).sum().backward(),
):
    try:
        call()
    except RuntimeError as error:
        errors.append("rank 2 on host" in str(error))
give((errors, time.monotonic() - since))
"""
    with job_of(__name__, script, 3) as job:
        job.await_event("ready")
        job.kill(2, signal.SIGKILL)
        outcomes = job.wait(30)
    assert outcomes[2].status == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes[:2]):
        assert outcome.status == 0, outcome
        errors, seconds = outcome.value
        assert errors == [2] * (6 if rank == 0 else 5) + [True, True], outcome
        assert seconds < 10


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [("pass", 0, ""), ("raise ValueError('mine')", 1, "ValueError: mine")],
)
def test_ends_without_destroy(end: str, status: int, words: str) -> None:
    script = f"""
tensors = [torch.ones(1000) for _ in range(3)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
works[0].get_future()
works[1].wait()
dist.send(tensors[1], 1) if dist.get_rank() == 0 else dist.recv(tensors[1], 0)
works[2].wait()
{end}
"""
    with job_of(__name__, script, 2) as job:
        outcomes = job.wait(30)
    for outcome in outcomes:
        assert outcome.status == status, outcome
        assert words in outcome.stderr
        assert "Fatal" not in outcome.stderr
        assert "terminate" not in outcome.stderr
