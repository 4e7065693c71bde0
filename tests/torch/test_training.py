# SPDX-License-Identifier: Apache-2.0
"""Twenty steps on several ranks give the weights of one process with the whole batch, and the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import commlib.torch as bps
from commlib.torch import reducer
from tests.lab import Lab
from tests.launch import run_job
from tests.torch import results_of

STEPS = 20
BATCH = 12  # can be dealt to 1, 2 and 4 ranks evenly


class Lion(torch.optim.Optimizer):
    """A custom optimizer, after Chen et al. 2023: the step is the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                first, second = group["betas"]
                # In steps, so that what is nothing but rounding does not get a sign.
                update = (momentum * first + param.grad * (1 - first)).div(1e-3).round().sign()
                param.add_(update, alpha=-group["lr"])
                momentum.lerp_(param.grad, 1 - second)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.002),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "lion": lambda params: Lion(params, lr=0.003),
}


def network(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    ).to(dtype)


def batches(dtype: torch.dtype, count: int) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(11)
    for _ in range(count):
        yield (
            torch.randn(BATCH, 7, generator=generator, dtype=torch.float64).to(dtype),
            torch.randn(BATCH, 3, generator=generator, dtype=torch.float64).to(dtype),
        )


def passes_of(step: int, passes: int) -> int:
    """How many backward passes a step has: now and then, as at the end of an epoch, fewer."""
    return max(1, passes - 1) if step % 7 == 6 else passes


def plainly(name: str, dtype: torch.dtype, passes: int, clip: bool) -> torch.nn.Module:
    net = network(dtype)
    optimizer = OPTIMIZERS[name](net.parameters())
    data = batches(dtype, STEPS * passes)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes_of(step, passes)):
            x, y = next(data)
            torch.nn.functional.mse_loss(net(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
    return net


def distributed(name: str, dtype: torch.dtype, passes: int, clip: bool) -> torch.nn.Module:
    net = network(dtype)
    inner = OPTIMIZERS[name](net.parameters())
    optimizer = bps.DistributedOptimizer(inner, net.named_parameters(), backward_passes_per_step=passes)
    data = batches(dtype, STEPS * passes)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes_of(step, passes)):
            x, y = (part.tensor_split(bps.size())[bps.rank()] for part in next(data))
            torch.nn.functional.mse_loss(net(x), y).backward()
        if clip:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
    optimizer.unwrap()
    return net


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def train_all() -> dict[str, tuple[float, bool]]:
    """For each case: the largest difference from one process, relative to the largest weight; same bits as rank 0?"""
    usual = reducer.BUCKET_BYTES
    found: dict[str, tuple[float, bool]] = {}
    for name in OPTIMIZERS:
        for dtype in (torch.float64, torch.float32):
            for passes in (1, 2, 3):
                clip = (passes + len(name)) % 2 == 0
                reducer.BUCKET_BYTES = 100 if passes == 2 else usual  # several buckets, or one
                mine, truth = (weights(train(name, dtype, passes, clip)) for train in (distributed, plainly))
                apart = ((mine - truth).abs().max() / truth.abs().max()).item()
                same = torch.equal(mine, bps.broadcast(mine, 0, name=f"weights.{dtype}"))
                found[f"{name} {str(dtype)[6:]} {passes}"] = apart, same
    reducer.BUCKET_BYTES = usual
    return found


WORKERS = [train_all]

SCRIPT = """
    import torch
    torch.set_num_threads(1)
    import commlib
    from tests.launch import give
    from tests.torch.test_training import train_all
    commlib.init()
    give(train_all())
    commlib.shutdown()
"""


def check(results: list[dict[str, tuple[float, bool]]]) -> None:
    assert len(results[0]) == 6 * len(OPTIMIZERS)
    for found in results:
        for case, (apart, same) in found.items():
            limit = 1e-12 if "float64" in case else 1e-4 if "rmsprop" in case else 1e-5
            assert same, case
            assert apart < limit, (case, apart)


@pytest.mark.parametrize("size", [2, 4])
def test_one_host(size: int) -> None:
    check(results_of(train_all, size))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts, and one for a server."""
    with Lab(3) as made:
        yield made


@pytest.mark.lab
@pytest.mark.parametrize("servers", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_two_hosts(servers: int, lab: Lab) -> None:
    check(run_job(SCRIPT, hosts=[2, 2], servers=servers, lab=lab, timeout=100))
