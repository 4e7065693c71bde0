# SPDX-License-Identifier: Apache-2.0
"""Gradients through push_pull, and what autograd is told about memory that was written."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import commlib.torch as bps
from tests.torch import message_of, results_of

SIZES = [1, 2, 4]


def leaf(rank: int) -> Any:
    return torch.full((3,), rank + 1.0, requires_grad=True)


def weight(rank: int) -> Any:
    return torch.tensor([1.0, 2.0, 4.0]) * (rank + 1)


def differentiate() -> dict[str, Any]:
    """Each rank's loss weighs the reduced tensor differently; returns what the ranks got as gradients."""
    rank = bps.rank()
    grads: dict[str, Any] = {}
    for op in (bps.Average, bps.Sum):
        for name in (None, "x"):
            x = leaf(rank)
            (bps.push_pull(x, name=name, op=op) * weight(rank)).sum().backward()
            grads[f"{op.name} {name}"] = x.grad.tolist()

        # Both branches of the sum get the same gradient tensor; reducing it in place would spoil the other one.
        x = leaf(rank)
        y = x * 1
        ((bps.push_pull(y, op=op) + y) * weight(rank)).sum().backward()
        grads[f"{op.name} branches"] = x.grad.tolist()

        x = leaf(rank)
        y = x * 1
        assert bps.push_pull_inplace(y, op=op) is y
        (y * weight(rank)).sum().backward()
        grads[f"{op.name} in place"] = x.grad.tolist()
        grads[f"{op.name} in place value"] = y.tolist()

        x = leaf(rank)
        y = x * 1
        handle = bps.push_pull_async_inplace(y, op=op)
        (handle.wait() * weight(rank)).sum().backward()
        grads[f"{op.name} in place async"] = x.grad.tolist()

        # d/dx of (reduced x)² is 2 · reduced, and the gradient of that goes through the reduction of a gradient.
        x = leaf(rank)
        (first,) = torch.autograd.grad((bps.push_pull(x, op=op) ** 2).sum(), x, create_graph=True)
        (first * weight(rank)).sum().backward()
        grads[f"{op.name} twice"] = x.grad.tolist()

    x = leaf(rank)
    (bps.push_pull(x, average=False, compression=bps.Compression.fp16) * weight(rank)).sum().backward()
    grads["compressed"] = x.grad.tolist()
    return grads


def mark() -> dict[str, Any]:
    rank = bps.rank()

    def stale() -> None:
        x = leaf(rank)
        y = x * 1
        z = y.exp()  # its backward needs z
        bps.push_pull_inplace(z.detach())
        z.sum().backward()

    def stale_copy() -> None:
        x = torch.ones(3, 5, requires_grad=True)
        z = x.exp()
        bps.push_pull_inplace(z.detach().t())
        z.sum().backward()

    def stale_broadcast() -> None:
        z = leaf(rank).exp()
        bps.broadcast_(z.detach(), 0)
        z.sum().backward()

    param = torch.nn.Parameter(torch.full((3,), float(rank)))
    bps.push_pull_inplace(param, average=False)
    with torch.no_grad():
        plain = bps.push_pull(leaf(rank))
    maximum = bps.push_pull(leaf(rank), op=bps.Max)
    with torch.inference_mode():
        inference = bps.push_pull_inplace(torch.full((3,), float(rank)))
    return {
        "stale": message_of(stale),
        "stale copy": message_of(stale_copy),
        "stale broadcast": message_of(stale_broadcast),
        "parameter": param.is_leaf and param.requires_grad and param.tolist() == [sum(range(bps.size()))] * 3,
        "no_grad": not plain.requires_grad,
        "max": maximum.tolist() == [bps.size()] * 3,
        "max backward": message_of(maximum.sum().backward),
        "async": not bps.push_pull_async(leaf(rank)).wait().requires_grad,
        "inference": inference.tolist() == [(bps.size() - 1) / 2] * 3,
    }


def forbid() -> dict[str, Any]:
    """What autograd forbids is refused before anything is sent, so the next operation meets its like."""
    param = torch.nn.Parameter(torch.ones(4))
    results = {
        "view of a leaf": message_of(lambda: bps.push_pull_inplace(param[1:])),
        "one of several views": message_of(lambda: bps.push_pull_inplace((param * 2).chunk(2)[0])),
    }
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        results["dual"] = message_of(lambda: bps.push_pull_inplace(dual))
    results["view of a frozen one"] = message_of(lambda: bps.push_pull_inplace(param.detach()[1:]))
    dropped = leaf(bps.rank()).exp()
    bps.push_pull_async_inplace(dropped.detach())  # nobody waits
    bps.barrier()
    results["dropped handle"] = message_of(dropped.sum().backward)
    return results


WORKERS = [differentiate, mark, forbid]


@pytest.mark.parametrize("size", SIZES)
def test_gradients(size: int) -> None:
    ranks = range(size)
    total = sum(weight(rank) for rank in ranks)
    value = sum(rank + 1.0 for rank in ranks)
    for rank, grads in enumerate(results_of(differentiate, size)):
        for op, divisor in (("Average", size), ("Sum", 1)):
            reduced = (total / divisor).tolist()
            assert grads[f"{op} None"] == pytest.approx(reduced)
            assert grads[f"{op} x"] == pytest.approx(reduced)
            assert grads[f"{op} branches"] == pytest.approx((total / divisor + weight(rank)).tolist())
            assert grads[f"{op} in place"] == pytest.approx(reduced)
            assert grads[f"{op} in place value"] == pytest.approx([value / divisor] * 3)
            assert grads[f"{op} in place async"] == pytest.approx(reduced)
            # first = R(2 R(x)); its gradient by x, weighed, is R(2 R(w)), and R of what is equal everywhere is
            # that for Average, `size` times that for Sum.
            repeated = 1 if divisor == size else size
            assert grads[f"{op} twice"] == pytest.approx((2 * repeated * total / divisor).tolist())
        assert grads["compressed"] == pytest.approx(total.tolist())


@pytest.mark.parametrize("size", [1, 2])
def test_what_autograd_forbids_is_not_sent(size: int) -> None:
    for results in results_of(forbid, size):
        assert "leaf" in results["view of a leaf"][1]
        assert "multiple views" in results["one of several views"][1]
        assert results["dual"][0] == "UnsupportedError"
        assert results["view of a frozen one"] == ("", "")
        assert "modified by an inplace operation" in results["dropped handle"][1]


@pytest.mark.parametrize("size", [1, 2])
def test_what_autograd_is_told(size: int) -> None:
    for results in results_of(mark, size):
        for case in ("stale", "stale copy", "stale broadcast"):
            assert "modified by an inplace operation" in results.pop(case)[1], case
        error, words = results.pop("max backward")
        assert error == "UnsupportedError"
        assert "detach()" in words
        assert all(results.values()), results
