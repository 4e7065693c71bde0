# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every kind against finite differences, torch.func's transforms and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import commlib.torch as bps
from tests.torch import message_of, results_of

SIZE = 2


def leaf() -> Any:
    return torch.full((3,), bps.rank() + 1.0, requires_grad=True)


class Shared(torch.autograd.Function):
    """Makes a function of what all ranks have out of one that is the same on all of them, as gradcheck wants it."""

    @staticmethod
    def forward(ctx: Any, everything: Any) -> Any:
        return everything.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return bps.push_pull(grad)


def check_numerically() -> bool:
    """First and second derivatives against finite differences, with other data and another function on each rank."""
    rank, size = bps.rank(), bps.size()
    generator = torch.Generator().manual_seed(3)
    everything = torch.rand(size, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    complex_ones = torch.rand(size, 2, generator=generator, dtype=torch.complex128, requires_grad=True)

    def through(reduce: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        def function(everything: Any) -> Any:
            x = Shared.apply(everything)[rank]
            y = reduce((x * (rank + 1)).sin() * x)
            return again((y * x).exp() * (rank + 2))

        return function

    def total(x: Any) -> Any:
        return bps.push_pull(x, average=False, name="total")

    def in_place(x: Any) -> Any:
        return bps.push_pull_inplace(x, name="in place")

    def in_place_async(x: Any) -> Any:
        return bps.push_pull_async_inplace(x * 1, average=False).wait()

    def part_in_place(x: Any) -> Any:
        y = x * 2
        bps.push_pull_inplace(y[1:])
        return y

    def from_last(x: Any) -> Any:
        return bps.broadcast(x, size - 1, "last")

    for reduce in (bps.push_pull, total, in_place, in_place_async, part_in_place, from_last):
        for again in (bps.push_pull, total):
            assert torch.autograd.gradcheck(through(reduce, again), everything)
            assert torch.autograd.gradgradcheck(through(reduce, again), everything)
    assert torch.autograd.gradcheck(through(bps.push_pull, total), complex_ones)
    # Without help: all ranks vary the same element at the same time.
    mine = everything[rank].detach().clone().requires_grad_()
    for linear in (bps.push_pull, total):
        assert torch.autograd.gradcheck(linear, mine, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(linear, mine)
    return True


def transform() -> dict[str, Any]:
    """torch.func, and what it cannot be used with."""
    func, rank = torch.func, bps.rank()
    x = torch.arange(12.0).reshape(3, 4) + rank
    mean = bps.push_pull(x)

    def square(x: Any) -> Any:
        return (bps.push_pull(x) ** 2).sum()

    def after(form: Callable[[Any], Any], x: Any) -> Any:
        form(x * 1)
        return x.sum()

    good = {
        "grad": torch.equal(func.grad(square)(x), 2 * mean),
        "vmap": torch.equal(torch.vmap(bps.push_pull, in_dims=1, out_dims=1)(x), mean),
        "named": torch.equal(torch.vmap(lambda x: bps.push_pull(x, name="v"))(x), mean),
        "constant": torch.equal(torch.vmap(lambda _: bps.push_pull(x[0]))(x), mean[0].expand(3, 4)),
        "vmap of grad": torch.equal(torch.vmap(func.grad(square))(x), 2 * mean),
        "jvp": torch.equal(func.jvp(bps.push_pull, (x,), (x,))[1], mean),
        "jacrev": torch.equal(func.jacrev(bps.push_pull)(x[0]), torch.eye(4)),
        "jacfwd": torch.equal(func.jacfwd(bps.push_pull)(x[0]), torch.eye(4)),
        "hessian": torch.equal(func.hessian(square)(x[0]), 2 * torch.eye(4)),
        "vmap of broadcast": torch.equal(torch.vmap(lambda x: bps.broadcast(x, 0))(x), x - rank),
        "jvp of broadcast": torch.equal(func.jvp(lambda x: bps.broadcast(x, 0), (x,), (x,))[1], x - rank),
    }
    forms = {
        "async": bps.push_pull_async,
        "in place": bps.push_pull_inplace,
        "async in place": bps.push_pull_async_inplace,
        "broadcast_": lambda x: bps.broadcast_(x, 0),
    }
    for name, form in forms.items():
        good[f"{name} in vmap"] = message_of(partial(torch.vmap(partial(after, form)), x))
        good[f"{name} in grad"] = message_of(partial(func.grad(partial(after, form)), x[0]))
    leaf = x.clone().requires_grad_()
    good["batched grads"] = message_of(
        lambda: torch.autograd.functional.jacobian(bps.push_pull, leaf[0], vectorize=True)
    )
    return good


def compile_around() -> dict[str, Any]:
    """Operations are called between two graphs, and are not looked into."""
    from torch._dynamo.utils import counters

    def function(x: Any) -> Any:
        y = bps.push_pull(x * 2)
        z = bps.push_pull_async(y.sin(), name="z")
        return (y.exp() * bps.synchronize(z)).sum() * bps.broadcast(y, 0).sum()

    compiled = torch.compile(function, backend="eager")
    ours, theirs = leaf(), leaf()
    outputs = []
    for _ in range(3):
        ours.grad = theirs.grad = None
        outputs += [function(ours), compiled(theirs)]
        for output in outputs[-2:]:
            output.backward()
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return {
        "graphs": 3 <= graphs <= 5,
        "outputs": len({output.item() for output in outputs}) == 1,
        "gradients": torch.equal(ours.grad, theirs.grad),
        "fullgraph": message_of(lambda: torch.compile(function, backend="eager", fullgraph=True)(ours)),
    }


WORKERS = [check_numerically, transform, compile_around]


def test_gradients_against_finite_differences() -> None:
    assert results_of(check_numerically, SIZE) == [True] * SIZE


def test_torch_func() -> None:
    for results in results_of(transform, SIZE):
        for case, result in results.items():
            if isinstance(result, tuple):
                assert result[0] == "UnsupportedError", (case, result)
                assert "torch.func" in result[1], (case, result)
            else:
                assert result, case


def test_torch_compile() -> None:
    for results in results_of(compile_around, SIZE):
        error, _ = results.pop("fullgraph")
        assert error == "Unsupported"
        assert all(results.values()), results
