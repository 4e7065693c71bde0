# SPDX-License-Identifier: Apache-2.0
"""COMMLIB_ASYNC=1: hosts add their steps to the parameters of all, at their own pace, and nobody waits for anybody."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

import torch

import commlib
import commlib.torch as bps
from tests.launch import REPOSITORY, Job, run_job
from tests.torch import message_of, outcomes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def parameters(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (17,), (), (70_001,), (2, 3, 4)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    params = [value.to(dtype) for value, dtype in zip(values, DTYPES, strict=True)]
    params[0] = params[0].t()  # not contiguous
    return [torch.nn.Parameter(param) for param in params]


def gradients(rank: int) -> list[torch.Tensor]:
    return [param.detach() for param in parameters(100 + rank)]


def steps_of(node: int) -> int:
    return 3 + 4 * node


def run() -> dict[str, str]:
    return outcomes({name: scenario for name, scenario in globals().items() if name.startswith("scenario_")})


def scenario_every_step_of_every_host_is_added_once() -> None:
    for op in (commlib.Average, commlib.Sum):
        params = parameters(bps.rank())  # different ones: rank 0's are what counts
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(params, lr=2.0**-6), op=op)
        # Nobody has to know how many steps another takes.
        for _ in range(steps_of(commlib.node_rank())):
            for param, grad in zip(params, gradients(bps.rank()), strict=True):
                param.grad = grad.clone()
            optimizer.step()
        commlib.barrier()
        optimizer.pull()
        hosts = [
            commlib.broadcast_object((commlib.node_rank(), commlib.local_size()), rank) for rank in range(bps.size())
        ]
        expected = [param.detach().to(torch.complex128) for param in parameters(0)]
        for rank, (node, ranks) in enumerate(hosts):
            share = steps_of(node) * 2.0**-6 / (ranks if op == commlib.Average else 1)
            for value, grad in zip(expected, gradients(rank), strict=True):
                value -= share * grad.to(torch.complex128)
        for param, value, tolerance in zip(params, expected, (1e-12, 1e-5, 2e-2, 2e-3, 1e-5), strict=True):
            # Of narrow floats each step is rounded as it is taken, in one process too.
            limit = tolerance * (1 + value.abs()) * (20 if tolerance > 1e-4 else 1)
            assert torch.all((param.detach() - value).abs() <= limit), (op, param.dtype)
            bits = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
            mine = bits.contiguous().view(torch.uint8) if bits.ndim else bits.reshape(1).view(torch.uint8)
            assert torch.equal(mine, torch.from_numpy(commlib.broadcast(mine.numpy(), 0))), param.dtype
        optimizer.unwrap()


def scenario_nobody_waits_for_another_host() -> None:
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    param.grad = torch.zeros(1000)
    optimizer.step()  # the first one waits, for the parameters of rank 0
    last = commlib.num_nodes() - 1
    # One host after the other takes all its steps, and each of them sees what those before it have done.
    for node in range(last + 1):
        if commlib.node_rank() == node:
            for step in range(1, 6):
                param.grad = torch.full((1000,), -(10.0**node))
                optimizer.step()
                assert torch.all(param == sum(5 * 10.0**before for before in range(node)) + step * 10.0**node), step
        commlib.barrier()
    if commlib.node_rank() == 0:
        assert param[0] == 5
    optimizer.pull()
    assert param[0] == sum(5 * 10.0**node for node in range(last + 1))


def scenario_a_group_that_is_added_begins_as_on_rank_0() -> None:
    params = parameters(1)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(params[:1], lr=1.0))
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.full((5,), float(bps.rank() + 1)))]})
    added = optimizer.param_groups[1]["params"][0]
    optimizer.step()
    assert torch.all(added <= 1)  # others may be further
    added.grad = torch.ones(5)
    optimizer.step()
    commlib.barrier()
    optimizer.pull()
    assert torch.all(added == 1 - commlib.num_nodes())


def scenario_what_scripts_do_with_an_optimizer() -> None:
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = bps.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ran = []
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    # As often as they like, with closures, accumulation and clipping; nothing waits for the others.
    for step in range(1 + 2 * commlib.node_rank()):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.full((4, 3), float(step))).sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            assert optimizer.step(lambda: torch.tensor(7.0)) == 7
        scheduler.step()
    assert len(ran) == 1 + 2 * commlib.node_rank()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** len(ran)
    scaler = bps.amp.GradScaler(init_scale=2.0)
    for step in range(2 + commlib.node_rank()):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        scaler.scale(model(torch.full((4, 3), torch.inf if step == 1 else 1.0)).sum()).backward()
        scaler.step(optimizer)  # an infinity here is nobody else's matter
        scaler.update()
        assert torch.equal(before, model.weight) == (step == 1)
    assert model.weight.isfinite().all()
    commlib.barrier()
    optimizer.pull()
    optimizer.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        commlib.push_pull(parameter.detach().numpy())
    unwrapped = optimizer.unwrap()
    assert unwrapped is plain
    bps.DistributedOptimizer(unwrapped, model.named_parameters()).unwrap()


def scenario_what_cannot_be_had() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrap in (
        lambda: bps.cross_barrier.CrossBarrier(model, optimizer),
        lambda: bps.parallel.DistributedDataParallel(model),
    ):
        kind, text = message_of(wrap)
        assert kind == "UnsupportedError"
        assert "COMMLIB_ASYNC" in text
    wrapped = bps.DistributedOptimizer(optimizer)
    assert message_of(lambda: bps.DistributedOptimizer(wrapped))[0] == "ValueError"
    assert message_of(lambda: bps.DistributedOptimizer(torch.optim.SGD(model.parameters())))[0] == "ValueError"
    kind, _ = message_of(lambda: commlib.api.session().worker.accumulate(torch.ones(3, dtype=torch.int32), "x", 0))
    assert kind == "UnsupportedError"


def scenario_hosts_that_mean_different_things() -> None:
    worker = commlib.api.session().worker
    first = torch.ones(5 + commlib.node_rank())
    results = [None if commlib.node_rank() == 0 else ""]
    if commlib.node_rank() == 0:
        worker.accumulate(first, "different", 0).wait()
    commlib.barrier()
    if commlib.node_rank() != 0:
        results = [message_of(worker.accumulate(first, "different", 0).wait)[0]]
    commlib.barrier()
    assert results == [None if commlib.node_rank() == 0 else "MismatchError"]
    assert message_of(lambda: commlib.push_pull(torch.ones(5), name="different"))[0] == "MismatchError"


@pytest.mark.parametrize(("hosts", "servers"), [((1, 1), 0), ((2, 1), 1), ((1, 2, 1), 2)], ids=str)
def test_scenarios(hosts: tuple[int, ...], servers: int) -> None:
    script = """
        import torch
        torch.set_num_threads(1)
        import commlib
        from tests.launch import give
        from tests.torch import test_asynchronous
        commlib.init()
        give(test_asynchronous.run())
        commlib.barrier()
        commlib.shutdown()
    """
    for outcome in run_job(script, hosts=hosts, servers=servers, env={"COMMLIB_ASYNC": "1"}, timeout=100):
        for name, text in outcome.items():
            assert text == "passed", f"{name}: {text}"


def test_learns_digits() -> None:
    with Job(REPOSITORY / "examples" / "torch_digits.py", hosts=[1, 1], env={"COMMLIB_ASYNC": "1"}) as job:
        outcomes = job.wait(timeout=60)
    assert [outcome.status for outcome in outcomes] == [0, 0], "\n".join(map(str, outcomes))
    said = outcomes[0].stdout
    assert float(re.search(r"test accuracy: (\S+)", said)[1]) >= 0.95  # type: ignore[index]
    assert "weights identical on all ranks: yes" in said


def test_one_host_says_that_it_makes_no_difference_and_trains_as_ever() -> None:
    script = """
        import logging, torch
        torch.set_num_threads(1)
        import commlib.torch as bps
        from tests.launch import give
        bps.init()
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("commlib").addHandler(handler)
        param = torch.nn.Parameter(torch.zeros(3))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        (param * (bps.rank() + 1)).sum().backward()
        optimizer.step()
        optimizer.pull()
        give((param.tolist(), records))
    """
    for values, records in run_job(script, hosts=[2], env={"COMMLIB_ASYNC": "1"}):
        assert values == [-1.5] * 3
        assert len(records) == 1
        assert "COMMLIB_ASYNC" in records[0]
    for values, records in run_job(script, hosts=[1], env={"COMMLIB_ASYNC": "1"}):
        assert values == [-1.0] * 3
        assert not records


def test_who_leaves_early_is_named() -> None:
    # The host that leaves keeps a part of the totals: the others cannot go on, and are told so.
    script = """
        import torch
        torch.set_num_threads(1)
        import commlib, commlib.torch as bps
        from tests.launch import give
        bps.init()
        param = torch.nn.Parameter(torch.zeros(100_000))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        param.grad = torch.zeros(100_000)
        said = None
        try:
            for _ in range(3 if bps.rank() == 1 else 100_000):
                optimizer.step()
        except commlib.errors.PeerLostError as error:
            said = error.rank, str(error)
        give(said)
    """
    for said in run_job(script, hosts=[1, 1, 1], env={"COMMLIB_ASYNC": "1"})[::2]:
        assert said is not None
        rank, text = said
        assert rank == 1
        assert "rank 1" in text


def test_a_first_step_that_timed_out_is_not_taken_for_done() -> None:
    script = """
        import torch
        torch.set_num_threads(1)
        import commlib, commlib.torch as bps
        from tests.launch import announce, give, listen
        bps.init()
        param = torch.nn.Parameter(torch.zeros(3))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        param.grad = torch.ones(3)
        said = []
        if bps.rank() == 0:
            for _ in range(2):
                try:
                    optimizer.step()
                    said.append("taken")
                except commlib.errors.CommlibError as error:
                    said.append(type(error).__name__)
            announce("tried")
        listen()
        give((said, param.tolist()))
    """
    limit = {"COMMLIB_ASYNC": "1", "COMMLIB_OPERATION_TIMEOUT_S": "1"}
    with Job(script, hosts=[1, 1], env=limit) as job:
        job.await_event("tried", ranks=[0])
        for rank in range(2):
            job.tell(rank, "end")
        (said, values), _ = (outcome.value for outcome in job.wait(timeout=60))
    assert said[0] == "OperationTimeout"
    assert "taken" not in said
    assert values == [0.0] * 3  # no step was taken by itself
