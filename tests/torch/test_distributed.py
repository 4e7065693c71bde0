# SPDX-License-Identifier: Apache-2.0
"""The operations of the torch.distributed backend: the same as gloo's, where gloo has them."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from tests.launch import Job, JobError, run_job, unused_port

CASES = 300
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
REDUCTIONS = ["SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]
SUBSETS = [[0, 1, 2], [0, 1], [0, 2], [1, 2], [2]]


# What other modules of these tests use, too.


def environment(size: int) -> dict[str, Any]:
    """What a launcher of torch sets, as arguments of `run_job` and `Job`."""
    return {
        "env": {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(unused_port()),
            "WORLD_SIZE": str(size),
            "GLOO_SOCKET_IFNAME": "lo",
        },
        "rank_env": {rank: {"RANK": str(rank)} for rank in range(size)},
    }


def script_of(module: str, body: str) -> str:
    """A worker's program, in which all that `module` defines is at hand."""
    return f"""
import torch
torch.set_num_threads(1)
import commlib.torch.distributed
import torch.distributed as dist
from tests.launch import announce, give, listen
from {module} import *
dist.init_process_group("commlib")
{body}
"""


@cache
def _workers(module: str, hosts: tuple[int, ...], timeout: float) -> list[Any] | JobError:
    size = sum(hosts)
    body = "give({worker.__name__: worker() for worker in WORKERS})\ndist.destroy_process_group()"
    try:
        return run_job(script_of(module, body), hosts=list(hosts), timeout=timeout, **environment(size))
    except JobError as error:
        return error


def results_of(worker: Callable[[], Any], hosts: tuple[int, ...], timeout: float = 60) -> list[Any]:
    """What `worker`, one of the WORKERS of its module, returned, by rank. All of them run in one job."""
    outcome = _workers(worker.__module__, hosts, timeout)
    if isinstance(outcome, JobError):
        raise outcome
    return [results[worker.__name__] for results in outcome]


def job_of(module: str, body: str, size: int) -> Job:
    """A job of which the test watches every process."""
    return Job(script_of(module, body), hosts=[size], **environment(size))


# Random cases, the same on all ranks.


class Case:
    """One operation, its group, dtype and shape; the numbers in it are exact in any order of additions."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.members = self.random.choice(SUBSETS)
        self.size = len(self.members)
        self.dtype = getattr(torch, self.random.choice(DTYPES))
        self.operation = self.random.choice(sorted(OPERATIONS))
        self.op = getattr(dist.ReduceOp, self.random.choice(REDUCTIONS))
        self.root = self.random.choice(self.members)
        dims = self.random.choice([0, 1, 1, 2, 3])
        self.shape = tuple(self.random.choice([0, 1, 2, 3, 5, 7]) for _ in range(dims))
        if self.random.random() < 0.15:
            self.shape = (self.random.choice([1023, 20_000]),)
        self.is_transposed = self.random.random() < 0.3
        self.seed = self.random.randrange(1 << 30)

    def __str__(self) -> str:
        return f"{self.operation} {self.op} of {self.dtype} {self.shape} among {self.members}, root {self.root}"

    def tensor(self, shape: Sequence[int] | None = None, salt: int = 0) -> Any:
        """This rank's numbers: few bits each, so that products of three and sums are exact in every dtype."""
        shape = self.shape if shape is None else tuple(shape)
        generator = torch.Generator().manual_seed(self.seed + 100 * salt + dist.get_rank())
        numbers = torch.randint(0, 2 if self.dtype is torch.bool else 5, shape, generator=generator)
        if self.is_transposed and len(shape) > 1:
            return numbers.to(self.dtype).transpose(0, 1).contiguous().transpose(0, 1)
        return numbers.to(self.dtype)

    def room(self, shape: Sequence[int] | None = None) -> Any:
        """Where something is to be received."""
        return torch.full_like(self.tensor(shape), 1)


def reduced(case: Case, group: Any) -> Any:
    tensor = case.tensor()
    dist.all_reduce(tensor, case.op, group)
    return [tensor]


def reduced_to_root(case: Case, group: Any) -> Any:
    tensor = case.tensor()
    dist.reduce(tensor, case.root, case.op, group)
    return [tensor] if dist.get_rank() == case.root else []  # torch leaves it open what the others have


def reduced_together(case: Case, group: Any) -> Any:
    tensors = [case.tensor(salt=salt) for salt in range(3)]
    dist.all_reduce_coalesced(tensors, case.op, group)
    return tensors


def broadcasted(case: Case, group: Any) -> Any:
    tensor = case.tensor()
    dist.broadcast(tensor, case.root, group)
    return [tensor]


def gathered(case: Case, group: Any) -> Any:
    outputs = [case.room() for _ in case.members]
    dist.all_gather(outputs, case.tensor(), group)
    return outputs


def gathered_in_a_row(case: Case, group: Any) -> Any:
    first, *rest = case.shape or (1,)
    output = case.room((case.size * first, *rest))
    dist.all_gather_into_tensor(output, case.tensor(), group)
    return [output]


def gathered_together(case: Case, group: Any) -> Any:
    outputs = [[case.room(), case.room((2, 3))] for _ in case.members]
    dist.all_gather_coalesced(outputs, [case.tensor(), case.tensor((2, 3))], group)
    return [tensor for row in outputs for tensor in row]


def gathered_at_root(case: Case, group: Any) -> Any:
    outputs = [case.room() for _ in case.members] if dist.get_rank() == case.root else None
    dist.gather(case.tensor(), outputs, case.root, group)
    return outputs or []


def scattered(case: Case, group: Any) -> Any:
    output, is_root = case.room(), dist.get_rank() == case.root
    inputs = [case.tensor(salt=salt) for salt in range(case.size)] if is_root else None
    dist.scatter(output, inputs, case.root, group)
    return [output]


def reduce_scattered(case: Case, group: Any) -> Any:
    output = case.room()
    dist.reduce_scatter(output, [case.tensor(salt=salt) for salt in range(case.size)], case.op, group)
    return [output]


def reduce_scattered_in_a_row(case: Case, group: Any) -> Any:
    first, *rest = case.shape or (1,)
    output = case.room((first, *rest))
    dist.reduce_scatter_tensor(output, case.tensor((case.size * first, *rest)), case.op, group)
    return [output]


def exchanged(case: Case, group: Any) -> Any:
    """What rank i sends to rank j has (i + 2 j) % 4 rows."""
    me = case.members.index(dist.get_rank())
    rest = case.shape[1:]
    sent = [(me + 2 * other) % 4 for other in range(case.size)]
    received = [(other + 2 * me) % 4 for other in range(case.size)]
    output = case.room((sum(received), *rest))
    dist.all_to_all_single(output, case.tensor((sum(sent), *rest)), received, sent, group)
    return [output]


def exchanged_evenly(case: Case, group: Any) -> Any:
    output = case.room((2 * case.size, *case.shape))
    dist.all_to_all_single(output, case.tensor((2 * case.size, *case.shape)), group=group)
    return [output]


def exchanged_lists(case: Case, group: Any) -> Any:
    outputs = [case.room() for _ in case.members]
    dist.all_to_all(outputs, [case.tensor(salt=salt) for salt in range(case.size)], group)
    return outputs


def passed_on(case: Case, group: Any) -> Any:
    """To the next one of the ring, from the one before."""
    if case.size == 1:
        return []
    me = case.members.index(dist.get_rank())
    output = case.room()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, case.tensor(), case.members[(me + 1) % case.size], group, tag=3),
            dist.P2POp(dist.irecv, output, case.members[me - 1], group, tag=3),
        ]
    )
    for work in works:
        work.wait()
    return [output]


OPERATIONS: dict[str, Callable[[Case, Any], Any]] = {
    function.__name__: function
    for function in (
        reduced,
        reduced_to_root,
        reduced_together,
        broadcasted,
        gathered,
        gathered_in_a_row,
        gathered_together,
        gathered_at_root,
        scattered,
        reduce_scattered,
        reduce_scattered_in_a_row,
        exchanged,
        exchanged_evenly,
        exchanged_lists,
        passed_on,
    )
}


def attempt(case: Case, group: Any) -> Any:
    """The tensors that one backend gives, or the words in which it refuses."""
    try:
        return OPERATIONS[case.operation](case, group)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def groups() -> Iterator[tuple[Any, Any]]:
    for members in SUBSETS:
        ours = None if len(members) == dist.get_world_size() else dist.new_group(members)
        yield ours, dist.new_group(members, backend="gloo")


# What the ranks do.


def compare_with_gloo() -> Any:
    """Run the cases on both, and count: compared, refused by gloo alone, refused by both; and list what is wrong."""
    warnings.simplefilter("ignore")
    pairs = list(groups())
    counts: Counter[str] = Counter()
    wrong = []
    for number in range(CASES):
        case = Case(number)
        if dist.get_rank() not in case.members:
            continue
        ours, theirs = (attempt(case, group) for group in pairs[SUBSETS.index(case.members)])
        if isinstance(theirs, str):
            counts["gloo refuses"] += 1
            counts["both refuse"] += isinstance(ours, str)
        elif isinstance(ours, str):
            wrong.append(f"{case}: {ours}")
        else:
            counts["compared"] += 1
            counts[case.operation] += 1
            if len(ours) != len(theirs) or not all(map(same_bits, ours, theirs)):
                wrong.append(f"{case}: {ours} instead of {theirs}")
    return counts, wrong


def other_forms() -> None:
    """What gloo cannot do, against what is known; each rank checks for itself."""
    warnings.simplefilter("ignore")
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = range(1, size + 1)

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128):
        tensor = torch.full((7,), float(rank + 1)).to(dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert torch.equal(tensor, torch.full((7,), sum(everybody) / size).to(dtype)), tensor
    odd = torch.arange(999, dtype=torch.float64).mul(rank + 1).requires_grad_()
    with torch.no_grad():
        dist.all_reduce(odd)
    assert torch.equal(odd.detach(), torch.arange(999.0, dtype=torch.float64) * sum(everybody))

    # What is only moved may have any dtype.
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.complex32):
        bits = torch.arange(16, dtype=torch.uint8) + 16 * rank
        outputs = [torch.zeros(16, dtype=torch.uint8).view(dtype) for _ in range(size)]
        dist.group.WORLD.allgather([outputs], [bits.view(dtype)]).wait()
        for other, output in enumerate(outputs):
            assert torch.equal(output.view(torch.uint8), torch.arange(16, dtype=torch.uint8) + 16 * other)

    # Sizes that differ, small and large.
    for unit in (3, 9000):
        outputs = [torch.zeros(unit * other) for other in everybody]
        dist.all_gather(outputs, torch.full((unit * (rank + 1),), float(rank)))
        assert all(torch.equal(output, torch.full_like(output, other)) for other, output in enumerate(outputs))

    # Large ones: the other route of gather and all_to_all. From memory that is not contiguous, into such.
    wide = torch.zeros(300, size * 200).t()
    dist.all_gather_into_tensor(wide, torch.full((300, 200), float(rank)).t())
    assert torch.equal(wide, torch.arange(float(size)).repeat_interleave(200).unsqueeze(1).expand(-1, 300))
    large = torch.zeros(size * 40_000)
    dist.all_to_all_single(large, torch.arange(float(size)).repeat_interleave(40_000) + 10 * rank)
    assert torch.equal(large, (10 * torch.arange(float(size)) + rank).repeat_interleave(40_000))

    # Several together.
    with dist.distributed_c10d._coalescing_manager():
        rows = [torch.zeros(size, shape) for shape in (3, 20_000)]
        for row in rows:
            dist.all_gather_into_tensor(row, torch.full(row.shape[1:], float(rank)))
    assert all(torch.equal(row, torch.arange(float(size)).unsqueeze(1).expand_as(row)) for row in rows)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as together:
        parts = [torch.zeros(shape) for shape in (3, 20_000)]
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.arange(float(size)).repeat_interleave(part.numel()))
    together.wait()
    assert all(torch.equal(part, torch.full_like(part, rank * size)) for part in parts)

    # Sparse ones, also where a rank has nothing.
    for unit in (1, 5000):
        indices = torch.arange(rank * 2 * unit).remainder(17 * unit).unsqueeze(0)
        sparse = torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1], 3), (17 * unit, 3))
        expected = sparse.to_dense()
        dist.all_reduce(expected)
        dist.all_reduce(sparse)
        assert sparse.is_sparse
        assert torch.equal(sparse.to_dense(), expected)

    # Functional collectives, and objects.
    import torch.distributed._functional_collectives as functional

    names = dist.group.WORLD
    assert torch.equal(functional.all_reduce(torch.ones(3), "sum", names), torch.full((3,), float(size)))
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, names)
    assert torch.equal(gathered.clone(), torch.arange(float(size)).repeat_interleave(2))
    part = functional.reduce_scatter_tensor(torch.arange(2.0 * size), "avg", 0, names)
    assert torch.equal(part.clone(), torch.arange(2.0 * rank, 2.0 * rank + 2))
    swapped = functional.all_to_all_single(torch.arange(float(size)) + 10 * rank, None, None, names)
    assert torch.equal(swapped.clone(), 10 * torch.arange(float(size)) + rank)
    assert torch.equal(functional.broadcast(torch.full((2,), float(rank)), 1, names), torch.ones(2))

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 10_000 * rank})
    assert [found["rank"] for found in objects] == list(range(size))
    found = [{"from": 1}] if rank == 1 else [None]
    dist.broadcast_object_list(found, 1)
    assert found == [{"from": 1}]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(size)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]
    dist.gather_object(rank, objects if rank == 2 else None, 2)
    assert rank != 2 or objects == list(range(size))


def messages() -> None:
    """Tags, orders, sizes, many at once, oneself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    first, second = torch.zeros(5), torch.zeros(30_000, dtype=torch.int64)
    works = [dist.isend(torch.full((5,), rank + 0.5), after, tag=1), dist.isend(torch.arange(30_000) + rank, after)]
    dist.recv(second, before)  # sent later, with another tag
    assert dist.recv(first, before, tag=1) == before
    assert torch.equal(first, torch.full((5,), before + 0.5))
    assert torch.equal(second, torch.arange(30_000) + before)
    # More than can be in flight at once, and nobody waits for them before all have been sent.
    works += [dist.isend(torch.full((3,), 100.0 * rank + number), after) for number in range(100)]
    rooms = [torch.zeros(3) for _ in range(100)]
    works += [dist.irecv(room, before) for room in rooms]
    for work in works:
        assert work.wait()
    assert torch.equal(torch.stack(rooms)[:, 0], 100.0 * before + torch.arange(100.0))
    own = torch.zeros(2)
    received, sent = dist.irecv(own, rank), dist.isend(torch.full((2,), 7.0), rank)
    assert received.wait()
    assert sent.wait()
    assert own.tolist() == [7, 7]
    strided = torch.zeros(4, 6)[:, ::2]
    if rank == 0:
        dist.send(torch.arange(12.0).view(3, 4).t(), 1)
    elif rank == 1:
        dist.recv(strided, 0)
        assert torch.equal(strided, torch.arange(12.0).view(3, 4).t())
    if rank < 2:
        found: list[Any] = [{"to": 1}] if rank == 0 else [None]
        dist.send_object_list(found, 1) if rank == 0 else dist.recv_object_list(found, 0)
        assert found == [{"to": 1}]


def handles() -> None:
    """What is promised of works: waiting again, in any order; futures; polling; and more of them than names."""
    size = dist.get_world_size()
    total = float(sum(range(1, size + 1)))
    tensors = [torch.full((11,), dist.get_rank() + 1.0) for _ in range(200)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait()
        assert work.wait(timedelta(seconds=5))
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    assert all(torch.equal(tensor, torch.full((11,), total)) for tensor in tensors)
    assert works[0].result()[0] is tensors[0]

    # Futures end although nobody waits, also those of operations of several stages.
    outputs = [torch.zeros(30_000) for _ in range(size)]
    futures = [
        dist.all_reduce(torch.ones(3), async_op=True).get_future(),
        dist.all_gather(outputs, torch.full((30_000,), float(dist.get_rank())), async_op=True).get_future(),
    ]
    chained = futures[0].then(lambda future: future.value()[0] * 2)
    assert torch.equal(chained.wait(), torch.full((3,), 2.0 * size))
    assert [tensor[0].item() for tensor in futures[1].wait()] == list(range(size))
    # A callback may itself communicate.
    nested = dist.all_reduce(torch.ones(1), async_op=True).get_future()

    def again(future: Any) -> Any:
        tensor = future.value()[0].clone()
        dist.all_reduce(tensor)
        return tensor

    assert nested.then(again).wait().item() == size * size
    assert dist.barrier(async_op=True).wait()


def names() -> Any:
    group = dist.new_group([0, 2])
    described: tuple[Any, ...] = (dist.get_backend(), dist.get_backend(group) if dist.get_rank() != 1 else None)
    if dist.get_rank() != 1:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
        described += (tensor.item(), dist.get_process_group_ranks(dist.group.WORLD))
    return described


WORKERS = [compare_with_gloo, other_forms, messages, handles, names]


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_same_as_gloo(hosts: tuple[int, ...]) -> None:
    results = results_of(compare_with_gloo, hosts)
    for counts, wrong in results:
        assert not wrong, "\n".join(wrong)
        assert counts["both refuse"] <= counts["gloo refuses"]
    compared: Counter[str] = sum((counts for counts, _ in results), Counter())
    assert compared["compared"] > CASES  # by two or three ranks each
    assert all(compared[name] > 0 for name in OPERATIONS), compared


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
@pytest.mark.parametrize("worker", [other_forms, messages, handles])
def test_operations(worker: Callable[[], None], hosts: tuple[int, ...]) -> None:
    results_of(worker, hosts)


def test_names() -> None:
    assert results_of(names, (3,)) == [
        ("commlib", "commlib", 2.0, [0, 1, 2]),
        ("commlib", None),
        ("commlib", "commlib", 2.0, [0, 1, 2]),
    ]
