# SPDX-License-Identifier: Apache-2.0
"""Loss scaling: an infinity on one rank makes all of them skip a step, and all have the same scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import commlib.torch as bps
from commlib.torch.amp import GradScaler
from commlib.torch.cross_barrier import CrossBarrier
from commlib.torch.parallel import DistributedDataParallel
from tests.torch import message_of, outcomes, results_of
from tests.torch.test_parallel import Net, assert_same_weights, data, loss_of, part_of, sgd

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def is_unlucky(step: int) -> bool:
    """Whether this rank's loss is infinite in this step."""
    return step in (0, 4) and bps.rank() == bps.size() - 1


def train(
    net: Any, optimizer: Any, reference: Any, plain: Any, *, clips: bool = False, owner: Any = None
) -> tuple[Any, Any]:
    """Train both with a scaler; return the scalers."""
    scaler = GradScaler(init_scale=8.0, growth_interval=2)
    expected = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step, (x, y) in enumerate(data(8)):
        optimizer.zero_grad()
        plain.zero_grad()
        loss = loss_of(owner or net, *part_of(x, y)) * (math.inf if is_unlucky(step) else 1)
        scaler.scale(loss).backward()
        expected.scale(loss_of(reference, x, y) * (math.inf if step in (0, 4) else 1)).backward()
        if clips:
            for each, one, of in ((scaler, optimizer, net), (expected, plain, reference)):
                each.unscale_(one)
                torch.nn.utils.clip_grad_norm_(of.parameters(), 0.1)
        scaler.step(optimizer)
        expected.step(plain)
        scaler.update()
        expected.update()
        assert scaler.get_scale() == expected.get_scale(), step
    return scaler, expected


@scenario
def distributed_optimizer() -> None:
    """With and without unscale_() and clipping; also an optimizer that unscales by itself."""
    for fused in (False, True):
        for clips in (False, True):
            net, reference = Net(), Net()
            make = functools.partial(torch.optim.Adam, lr=0.01, fused=fused)
            optimizer = bps.DistributedOptimizer(make(net.parameters()), net.named_parameters())
            scaler, expected = train(net, optimizer, reference, make(reference.parameters()), clips=clips)
            assert_same_weights(net, reference, 1e-11)
            assert scaler.state_dict() == expected.state_dict()


@scenario
def distributed_data_parallel() -> None:
    net, reference = Net(), Net()
    train(net, sgd(net), reference, sgd(reference), clips=True, owner=DistributedDataParallel(net))
    assert_same_weights(net, reference)


@scenario
def an_optimizer_of_this_rank_alone() -> None:
    """Its gradients are not reduced, so what is found on one rank has to be told to the others."""
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=8.0)
    for step in range(6):
        before = net.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2)).sum() * (math.nan if is_unlucky(step) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(net.weight, before) == (step in (0, 4))
    assert scaler.get_scale() == 2.0


@scenario
def two_optimizers() -> None:
    """Each skips by itself, on all ranks; the scale goes down once."""
    nets = [Net(), Net()]
    optimizers = [bps.DistributedOptimizer(sgd(net), net.named_parameters()) for net in nets]
    scaler = GradScaler(init_scale=8.0)
    for step, (x, y) in enumerate(data(4)):
        before = [net.last.weight.detach().clone() for net in nets]
        losses = [loss_of(net, *part_of(x, y)) for net in nets]
        losses[0] = losses[0] * (math.inf if is_unlucky(step) else 1)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(net.last.weight, old) for net, old in zip(nets, before, strict=True)]
        assert same == [step == 0, False]
    assert scaler.get_scale() == 4.0


@scenario
def half_precision() -> None:
    """float16 by autocast: what overflows on one rank is skipped by all, and then training goes on."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    scaler, losses = GradScaler(init_scale=2.0**20), []
    x, y = (tensor.float() for tensor in next(data(1)))
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(net(part_of(x)[0]).float(), part_of(y)[0])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(bps.push_pull(loss.detach()).item())
    assert losses[-1] < 0.7 * losses[0]
    assert scaler.get_scale() < 2.0**20
    flat = torch.cat([param.detach().flatten() for param in net.parameters()])
    assert torch.equal(flat, bps.broadcast(flat, 0))


@scenario
def cross_barrier_is_refused() -> None:
    net = Net()
    barrier = CrossBarrier(net, torch.optim.Adam(net.parameters(), fused=True))
    x, y = next(data(1))
    for scaler in (GradScaler(), torch.amp.GradScaler("cpu")):
        barrier.zero_grad()
        scaler.scale(loss_of(net, *part_of(x, y))).backward()
        error, words = message_of(functools.partial(scaler.step, barrier))
        assert error == "UnsupportedError"
        assert "CrossBarrier" in words
    assert message_of(functools.partial(GradScaler().unscale_, barrier))[0] == "UnsupportedError"
    disabled = GradScaler(enabled=False)
    barrier.zero_grad()
    disabled.scale(loss_of(net, *part_of(x, y))).backward()
    disabled.unscale_(barrier)
    disabled.step(barrier)
    disabled.update()
    barrier.synchronize()
    assert not torch.equal(net.last.weight, Net().last.weight)


def run_scenarios() -> dict[str, str]:
    return outcomes(SCENARIOS)


WORKERS = [run_scenarios]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, size: int) -> None:
    for results in results_of(run_scenarios, size):
        assert results[name] == "passed", results[name]
