# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer trains as one process would on the whole batch, whatever the script around it does."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import commlib.torch as bps
from tests.launch import run_job
from tests.torch import message_of, outcomes, results_of

SIZES = [1, 2, 4]
STEPS = 20
BATCH = 12  # can be dealt to 1, 2 and 4 ranks evenly


class Net(torch.nn.Module):
    """A network with a layer that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(7, 5)
        self.optional = torch.nn.Linear(5, 5)
        self.never = torch.nn.Linear(2, 2)
        self.last = torch.nn.Linear(5, 3)

    def forward(self, x: Any, optional: bool = True) -> Any:
        x = self.first(x).tanh()
        if optional:
            x = self.optional(x).tanh()
        return self.last(x)


class ConvNet(torch.nn.Module):
    """Whose weights are not all contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.last = torch.nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x).tanh().flatten(1))


def images(steps: int) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(12)
    for _ in range(steps):
        yield torch.randn(BATCH, 3, 6, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def batches(steps: int = STEPS) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        yield torch.randn(BATCH, 7, generator=generator), torch.randn(BATCH, 3, generator=generator)


def mine(*tensors: Any) -> Any:
    """This rank's part of each tensor of a global batch."""
    return [tensor.tensor_split(bps.size())[bps.rank()] for tensor in tensors]


def loss_of(net: Any, x: Any, y: Any, **options: Any) -> Any:
    return ((net(x, **options) - y) ** 2).mean()


def sgd(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def adamw(net: Any) -> Any:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def difference(net: Any, reference: Any) -> float:
    """The largest difference of two parameters, relative to the largest of them."""
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def pair(make: Callable[[Any], Any], **options: Any) -> tuple[Any, Any, Any, Any]:
    """A network with a distributed optimizer, and one with a plain one."""
    net, reference = Net(), Net()
    optimizer = bps.DistributedOptimizer(make(net), net.named_parameters(), **options)
    return net, optimizer, reference, make(reference)


def step_both(net: Any, optimizer: Any, reference: Any, plain: Any, x: Any, y: Any) -> None:
    """One step of each, on this rank's part of a batch and on the whole of it."""
    optimizer.zero_grad()
    loss_of(net, *mine(x, y)).backward()
    optimizer.step()
    plain.zero_grad()
    loss_of(reference, x, y).backward()
    plain.step()


def counted(call: Callable[[], Any]) -> int:
    """How many gradients were submitted during `call`."""
    from commlib.torch import ops

    submit = ops.submit
    names: list[str] = []

    def count(tensor: Any, op: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(name)
        return submit(tensor, op, name, *args, **kwargs)

    ops.submit = count
    try:
        call()
    finally:
        ops.submit = submit
    return sum(".used" not in name and ".loss" not in name for name in names)


# Scenarios. Each runs on all ranks and checks for itself.

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def train(make: Callable[[Any], Any], **options: Any) -> float:
    net, optimizer, reference, plain = pair(make, **options)
    for x, y in batches():
        step_both(net, optimizer, reference, plain, x, y)
    flat = torch.cat([param.detach().flatten() for param in net.parameters()])
    assert torch.equal(flat, bps.broadcast(flat, 0)), "ranks differ"
    return difference(net, reference)


@scenario
def equals_single_process() -> None:
    assert train(sgd) < 1e-5
    assert train(adamw) < 1e-4


@scenario
def compressed() -> None:
    assert train(sgd, compression=bps.Compression.fp16) < 1e-2
    assert train(sgd, compression=bps.Compression.bf16) < 1e-1


@scenario
def sums() -> None:
    net, optimizer, reference, plain = pair(sgd, op=bps.Sum)
    for x, y in batches(5):
        optimizer.zero_grad()
        (loss_of(net, *mine(x, y)) / bps.size()).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        plain.step()
    assert difference(net, reference) < 1e-5


@scenario
def accumulates() -> None:
    """Two passes a step, and now and then a step after one, as at the end of an epoch."""
    net, optimizer, reference, plain = pair(sgd, backward_passes_per_step=2)
    for step in range(9):
        optimizer.zero_grad()
        plain.zero_grad()
        for x, y in batches(1 if step % 3 == 2 else 2):
            loss_of(net, *mine(x, y)).backward()
            loss_of(reference, x, y).backward()
        optimizer.step()
        plain.step()
    optimizer.set_backward_passes_per_step(1)
    for x, y in batches(3):
        step_both(net, optimizer, reference, plain, x, y)
    assert difference(net, reference) < 1e-5


@scenario
def without_zero_grad() -> None:
    net, optimizer, reference, plain = pair(sgd)
    for x, y in batches(5):
        loss_of(net, *mine(x, y)).backward()
        optimizer.step()
        loss_of(reference, x, y).backward()
        plain.step()
    assert difference(net, reference) < 1e-5


@scenario
def keeps_zeroed_gradients() -> None:
    for zero in ("optimizer", "model"):
        net, optimizer, reference, plain = pair(sgd)
        for x, y in batches(5):
            for owner in (optimizer, plain) if zero == "optimizer" else (net, reference):
                owner.zero_grad(set_to_none=False)
            loss_of(net, *mine(x, y)).backward()
            optimizer.step()
            loss_of(reference, x, y).backward()
            plain.step()
        assert difference(net, reference) < 1e-5


@scenario
def unused_parameters() -> None:
    """A layer used by no rank, by some, and by all in turn. Where nobody used it there is no gradient at all."""
    net, optimizer, reference, plain = pair(adamw)
    for step, (x, y) in enumerate(batches(8)):
        users = [rank for rank in range(bps.size()) if (step >> rank % 3) & 1]
        optimizer.zero_grad()
        loss_of(net, *mine(x, y), optional=bps.rank() in users).backward()
        optimizer.step()
        plain.zero_grad()
        parts = zip(x.tensor_split(bps.size()), y.tensor_split(bps.size()), strict=True)
        for rank, (part_x, part_y) in enumerate(parts):
            (loss_of(reference, part_x, part_y, optional=rank in users) / bps.size()).backward()
        plain.step()
        assert net.never.weight.grad is None
        assert (net.optional.weight.grad is None) == (not users), step
    assert difference(net, reference) < 1e-4
    assert torch.equal(net.never.weight, Net().never.weight)


@scenario
def closures() -> None:
    net, optimizer, reference, plain = pair(sgd)
    for x, y in batches(5):

        def distributed(part: Any = (x, y)) -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, *mine(*part))
            loss.backward()
            return loss

        def single(part: Any = (x, y)) -> Any:
            plain.zero_grad()
            loss = loss_of(reference, *part)
            loss.backward()
            return loss

        loss = optimizer.step(distributed)
        assert torch.allclose(bps.push_pull(loss.detach()), plain.step(single).detach())
    assert difference(net, reference) < 1e-5


@scenario
def lbfgs() -> None:
    """It decides by the loss how often to call the closure: all ranks must see the same one."""
    net, reference = Net(), Net()
    optimizer = bps.DistributedOptimizer(torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe"))
    plain = torch.optim.LBFGS(reference.parameters(), line_search_fn="strong_wolfe")
    (x, y), calls = next(batches(1)), [0, 0]

    def closure_for(net: Any, optimizer: Any, *data: Any) -> Callable[[], Any]:
        def closure() -> Any:
            calls[optimizer is plain] += 1
            optimizer.zero_grad()
            loss = loss_of(net, *data)
            loss.backward()
            return loss

        return closure

    first = optimizer.step(closure_for(net, optimizer, *mine(x, y)))
    assert torch.allclose(first, plain.step(closure_for(reference, plain, x, y)), rtol=1e-5)
    assert calls[0] > 2
    flat = torch.cat([param.detach().flatten() for param in net.parameters()])
    assert torch.equal(flat, bps.broadcast(flat, 0))
    assert loss_of(net, x, y).item() == pytest.approx(loss_of(reference, x, y).item(), rel=0.05, abs=1e-4)


@scenario
def clipping() -> None:
    net, optimizer, reference, plain = pair(sgd)
    used = sum(param.numel() > 0 for name, param in net.named_parameters() if "never" not in name)
    once_known = 1  # all of this small network are in one bucket
    for step, (x, y) in enumerate(batches(6)):

        def one_step(part: Any = (x, y), skip: bool = step % 2 == 1) -> None:
            optimizer.zero_grad()
            (10 * loss_of(net, *mine(*part))).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if skip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

        assert counted(one_step) == (0 if bps.size() == 1 else used if step == 0 else once_known)
        plain.zero_grad()
        (10 * loss_of(reference, x, y)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    assert difference(net, reference) < 1e-5


@scenario
def schedulers() -> None:
    """Made before wrapping or after, they set the learning rate, see step() and do not bypass the reduction."""
    for before in (True, False):
        net, reference = Net(), Net()
        inner, plain = sgd(net), sgd(reference)
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
        optimizer = bps.DistributedOptimizer(inner, net.named_parameters())
        if not before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        expected = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for x, y in batches(6):
                optimizer.zero_grad()
                loss_of(net, *mine(x, y)).backward()
                optimizer.step()
                scheduler.step()
                plain.zero_grad()
                loss_of(reference, x, y).backward()
                plain.step()
                expected.step()
                assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert difference(net, reference) < 1e-5
        # Unwrapped, the optimizer is plain again, and the scheduler goes on with it.
        assert optimizer.unwrap() is inner

        def by_itself(inner: Any = inner, net: Any = net) -> None:
            loss_of(net, *mine(*next(batches(1)))).backward()
            inner.step()

        assert counted(by_itself) == 0
        scheduler.step()


@scenario
def state_dicts() -> None:
    """State moves between wrapped and plain optimizers, and loading does not cut what has been shared."""
    net, optimizer, reference, plain = pair(adamw)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    expected = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    for step, (x, y) in enumerate(batches(9)):
        optimizer.zero_grad()
        loss_of(net, *mine(x, y)).backward()
        optimizer.step()
        scheduler.step()
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        plain.step()
        expected.step()
        if step % 3 == 0:
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
            plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert list(optimizer.state_dict()) == ["state", "param_groups"]
    assert len(seen) == 9
    assert difference(net, reference) < 1e-4


@scenario
def looks_like_the_wrapped_one() -> None:
    class Custom(torch.optim.SGD):
        def __init__(self, params: Any, must: str, have: str) -> None:
            Custom.made += 1
            super().__init__(params, lr=0.1)

        made = 0

    net = Net()
    inner = Custom(net.parameters(), "a", have="b")
    optimizer = bps.DistributedOptimizer(inner)
    assert isinstance(optimizer, Custom)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "Custom"
    assert repr(optimizer) == repr(inner)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert Custom.made == 1
    assert set(vars(optimizer)) == set(vars(sgd(Net())))
    assert "Distributed" in message_of(lambda: bps.DistributedOptimizer(optimizer))[1]


@scenario
def copies_are_plain() -> None:
    net = Net()
    optimizer = bps.DistributedOptimizer(adamw(net), net.named_parameters())
    loss_of(net, *mine(*next(batches(1)))).backward()
    optimizer.step()
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(copied) is torch.optim.AdamW
        assert repr(copied) == repr(optimizer)
        assert str(copied.state_dict()) == str(optimizer.state_dict())


@scenario
def frozen_and_thawed() -> None:
    net, reference = Net(), Net()
    for each in (net, reference):
        each.first.requires_grad_(False)
    optimizer, plain = bps.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    assert not net.first.weight.requires_grad
    for step, (x, y) in enumerate(batches(6)):
        for each in (net, reference):
            each.first.requires_grad_(step >= 2)
            each.last.requires_grad_(step != 4)
        step_both(net, optimizer, reference, plain, x, y)
    assert difference(net, reference) < 1e-5
    assert not torch.equal(net.first.weight, Net().first.weight)


@scenario
def added_groups() -> None:
    net, reference = Net(), Net()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.first.parameters(), lr=0.05))
    plain = torch.optim.SGD(reference.first.parameters(), lr=0.05)
    for step, (x, y) in enumerate(batches(6)):
        if step == 2:
            optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 0.01})
            plain.add_param_group({"params": list(reference.last.parameters()), "lr": 0.01})
        step_both(net, optimizer, reference, plain, x, y)
    assert difference(net, reference) < 1e-5
    assert not torch.equal(net.last.weight, Net().last.weight)


@scenario
def two_optimizers() -> None:
    """Both with the same names; as in a GAN, one's backward also reaches the other's parameters."""
    nets, references = [Net(), Net()], [Net(), Net()]
    optimizers = [bps.DistributedOptimizer(sgd(net), net.named_parameters()) for net in nets]
    plains = [sgd(net) for net in references]

    def play(pair: Any, players: Any, x: Any, y: Any) -> None:
        for this, other in ((0, 1), (1, 0)):
            players[this].zero_grad()
            (loss_of(pair[this], x, y) + 0.1 * loss_of(pair[other], x, y)).backward()
            players[this].step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(6):
            play(nets, optimizers, *mine(x, y))
            play(references, plains, x, y)
    assert all("zero_grad() before step()" in str(warning.message) for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    assert bool(caught) == (bps.size() > 1)
    assert max(map(difference, nets, references)) < 1e-5


@scenario
def tied_weights() -> None:
    def tied() -> Any:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7), torch.nn.Linear(7, 3))
        net[2].weight = net[0].weight
        return net

    net, reference = tied(), tied()
    names = net.named_parameters(remove_duplicate=False)
    optimizer, plain = bps.DistributedOptimizer(sgd(net), names), sgd(reference)
    for x, y in batches(4):
        step_both(net, optimizer, reference, plain, x, y)
    assert difference(net, reference) < 1e-5


@scenario
def sparse_gradients() -> None:
    def embedding() -> Any:
        torch.manual_seed(5)
        return torch.nn.Embedding(11, 3, sparse=True)

    net, reference = embedding(), embedding()
    optimizer = bps.DistributedOptimizer(sgd(net), sparse_as_dense=True)
    refusing = bps.DistributedOptimizer(sgd(refused := embedding()))
    plain = sgd(reference)
    index = torch.arange(BATCH) % 5
    for _ in range(3):
        optimizer.zero_grad()
        net(*mine(index)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        torch.nn.functional.embedding(index, reference.weight).square().mean().backward()
        plain.step()
    assert difference(net, reference) < 1e-5
    error, words = message_of(refused(index).sum().backward)
    assert (error == "UnsupportedError" and "sparse_as_dense=True" in words) == (bps.size() > 1)
    refusing.unwrap()


@scenario
def half_precision_parameters() -> None:
    net, reference = Net().bfloat16(), Net().bfloat16()
    optimizer, plain = bps.DistributedOptimizer(sgd(net)), sgd(reference)
    for x, y in batches(5):
        x, y = x.bfloat16(), y.bfloat16()
        step_both(net, optimizer, reference, plain, x, y)
    assert difference(net, reference) < 0.05


@scenario
def second_order() -> None:
    """With create_graph, a gradient is itself part of a graph."""
    net, optimizer, reference, plain = pair(sgd)
    for x, y in batches(4):
        for each, owner, data in ((net, optimizer, mine(x, y)), (reference, plain, (x, y))):
            owner.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of the cycle that create_graph makes
                loss_of(each, *data).backward(create_graph=True)
            owner.step()
    assert difference(net, reference) < 1e-5


@scenario
def compiled() -> None:
    net, optimizer, reference, plain = pair(sgd)
    fast = torch.compile(net, backend="aot_eager")
    for x, y in batches(3):
        optimizer.zero_grad()
        loss_of(fast, *mine(x, y)).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        plain.step()
    assert difference(net, reference) < 1e-5


@scenario
def checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (True, False):
        net, optimizer, reference, plain = pair(sgd)
        for x, y in batches(3):
            optimizer.zero_grad()
            part_x, part_y = mine(x, y)
            hidden = net.first(part_x).tanh()
            hidden = checkpoint(net.optional, hidden, use_reentrant=reentrant).tanh()
            ((net.last(hidden) - part_y) ** 2).mean().backward()
            optimizer.step()
            plain.zero_grad()
            loss_of(reference, x, y).backward()
            plain.step()
        assert difference(net, reference) < 1e-5


@scenario
def touched_too_early() -> None:
    """What would be silently wrong is an error, and zero_grad() makes all good again.

    In the first step gradients are reduced by synchronize(), later while backward runs: then they may be changed.
    """
    data = mine(*next(batches(1)))
    net, optimizer, _, _ = pair(sgd)

    def clipped_too_early() -> None:
        loss_of(net, *data).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()

    def replaced() -> None:
        loss_of(net, *data).backward()
        net.last.weight.grad = torch.zeros_like(net.last.weight)
        optimizer.step()

    def one_backward_too_many() -> None:
        loss_of(net, *data).backward()
        loss_of(net, *data).backward()

    def skipped() -> None:
        loss_of(net, *data).backward()
        with optimizer.skip_synchronize():
            optimizer.step()

    for steps in (0, 2):
        for call, words in (
            (clipped_too_early, "synchronize()"),
            (replaced, "synchronize()"),
            (one_backward_too_many, "backward_passes_per_step"),
            (skipped, "skip_synchronize()"),
        ):
            net, optimizer, reference, plain = pair(sgd)
            for x, y in batches(steps):
                step_both(net, optimizer, reference, plain, x, y)
            optimizer.zero_grad()
            error, said = message_of(call)
            is_wrong = bps.size() > 1 and (steps == 0 or call in (one_backward_too_many, skipped))
            assert (error == "RuntimeError" and words in said) == is_wrong, (call, said)
            if not is_wrong and call is clipped_too_early:
                plain.zero_grad()
                loss_of(reference, *next(batches(1))).backward()
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
                plain.step()
                assert difference(net, reference) < 1e-5
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.zero_grad()
            net.load_state_dict(reference.state_dict())
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))

            # Dropped through the model, a gradient is not missed.
            loss_of(net, *data).backward()
            net.zero_grad()
            optimizer.step()
            plain.zero_grad()
            plain.step()
            assert difference(net, reference) < 1e-5
            for x, y in batches(3):
                step_both(net, optimizer, reference, plain, x, y)
            assert difference(net, reference) < 1e-5

    optimizer.unwrap()
    net.zero_grad()
    summing = bps.DistributedOptimizer(sgd(net), op=bps.Sum)
    loss_of(net, *data).backward()
    summing.synchronize()
    assert ("summed" in message_of(lambda: loss_of(net, *data).backward())[1]) == (bps.size() > 1)


@scenario
def gradients_live_in_buckets() -> None:
    """From the second step on they are views, in the parameter's own strides, and stay so through zero_grad()."""
    net, reference = ConvNet(), ConvNet()
    optimizer, plain = bps.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    addresses: list[list[int]] = []
    for step, (x, y) in enumerate(images(6)):
        if step % 3 == 2:
            net.zero_grad()  # None: the next gradients are moved in
        else:
            optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(mine(x)[0]), mine(y)[0]).backward()
        if step > 1 and bps.size() > 1:
            assert all(param.grad.stride() == param.stride() for param in net.parameters())
            addresses.append([param.grad.data_ptr() for param in net.parameters()])
        optimizer.step()
        plain.zero_grad()
        torch.nn.functional.mse_loss(reference(x), y).backward()
        plain.step()
    assert all(one == addresses[0] for one in addresses)
    assert not any(address % 64 for step in addresses for address in step)
    assert difference(net, reference) < 1e-5


@scenario
def reduced_when_backward_returns() -> None:
    net, optimizer, reference, plain = pair(sgd)
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        loss_of(net, *mine(x, y)).backward()
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        if step:
            for mine_, truth in zip(net.parameters(), reference.parameters(), strict=True):
                if truth.grad is not None:
                    assert torch.allclose(mine_.grad, truth.grad, rtol=1e-4, atol=1e-6)
            assert counted(optimizer.step) == 0
        else:
            optimizer.step()
        plain.step()
    assert difference(net, reference) < 1e-5


@scenario
def an_operation_between_backward_and_step() -> None:
    """A rank that has not used a layer does not keep in backward() those that have, or another operation would wait."""
    net, optimizer, reference, plain = pair(adamw)
    for step, (x, y) in enumerate(batches(8)):
        users = [rank for rank in range(bps.size()) if step < 3 or (rank + step) % 2]
        optimizer.zero_grad()
        loss = loss_of(net, *mine(x, y), optional=bps.rank() in users)
        loss.backward()
        bps.push_pull(loss.detach(), name="loss")
        optimizer.step()
        plain.zero_grad()
        parts = zip(x.tensor_split(bps.size()), y.tensor_split(bps.size()), strict=True)
        for rank, (part_x, part_y) in enumerate(parts):
            (loss_of(reference, part_x, part_y, optional=rank in users) / bps.size()).backward()
        plain.step()
    assert difference(net, reference) < 1e-4


@scenario
def late_gradients() -> None:
    """A step of two backward passes, each through other layers, and not always in the same order."""
    nets, references = torch.nn.ModuleList([Net(), Net()]), torch.nn.ModuleList([Net(), Net()])
    optimizer, plain = bps.DistributedOptimizer(sgd(nets)), sgd(references)
    for step, (x, y) in enumerate(batches(9)):
        order = (0, 1) if step < 3 or (step + bps.rank() * (step > 5)) % 2 else (1, 0)
        optimizer.zero_grad()
        for which in order:
            loss_of(nets[which], *mine(x, y)).backward()
        optimizer.step()
        plain.zero_grad()
        for which in (0, 1):
            loss_of(references[which], x, y).backward()
        plain.step()
        assert difference(nets, references) < 1e-5, step


@scenario
def another_dtype_later() -> None:
    """A network made double or half after some steps; the optimizer's state goes with it where torch takes it along."""
    net, reference = Net(), Net()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step, (x, y) in enumerate(batches(9)):
        if step % 3 == 0:
            dtype = (torch.float32, torch.float64, torch.float32)[step // 3]
            net.to(dtype), reference.to(dtype)
        x, y = x.to(dtype), y.to(dtype)
        step_both(net, optimizer, reference, plain, x, y)
        assert all(param.grad is None or param.grad.dtype is dtype for param in net.parameters())
    assert difference(net, reference) < 1e-5


@scenario
def several_dtypes() -> None:
    def mixed() -> Any:
        torch.manual_seed(1)
        return torch.nn.ModuleList([torch.nn.Linear(7, 3).to(dtype) for dtype in (torch.float32, torch.float64) * 2])

    nets, references = mixed(), mixed()
    optimizer, plain = bps.DistributedOptimizer(sgd(nets)), sgd(references)

    def loss(which: Any, x: Any, y: Any) -> Any:
        return sum(((layer(x.to(layer.weight.dtype)) - y) ** 2).mean() for layer in which)

    for x, y in batches(4):
        optimizer.zero_grad()
        loss(nets, *mine(x, y)).backward()
        optimizer.step()
        plain.zero_grad()
        loss(references, x, y).backward()
        plain.step()
    assert difference(nets, references) < 1e-5


@scenario
def many_buckets() -> None:
    from commlib.torch import reducer

    usual, reducer.BUCKET_BYTES = reducer.BUCKET_BYTES, 100
    try:
        for make in (sgd, adamw):
            assert train(make) < 1e-4
            assert train(make, compression=bps.Compression.bf16) < 1e-1
        accumulates()
        unused_parameters()
        late_gradients()
        an_operation_between_backward_and_step()
        touched_too_early()
        checkpointed()
    finally:
        reducer.BUCKET_BYTES = usual


@scenario
def one_owner() -> None:
    """Two would average the average."""
    net = Net()
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    error, words = message_of(lambda: bps.DistributedOptimizer(sgd(net)))
    assert error == "ValueError"
    assert "another DistributedOptimizer" in words
    for _ in range(100):
        optimizer = bps.DistributedOptimizer(optimizer.unwrap(), net.named_parameters())
        loss_of(net, *mine(*next(batches(1)))).backward()
        optimizer.step()
    hooks = [len(param._post_accumulate_grad_hooks or ()) for param in net.parameters()]
    assert set(hooks) == {int(bps.size() > 1)}
    del optimizer
    bps.DistributedOptimizer(sgd(net)).unwrap()


@scenario
def different_models() -> None:
    """Where the ranks' parameters differ in shape, all of them are told, and can go on."""
    net = torch.nn.Linear(3, 2 + bps.rank())
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    net(torch.ones(1, 3)).sum().backward()
    error, words = message_of(optimizer.step)
    assert (error == "MismatchError" and "shape" in words) == (bps.size() > 1), words
    assert train(sgd) < 1e-5


@scenario
def empty_groups() -> None:
    net = Net()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([{"params": []}, {"params": net.parameters()}], lr=0.1))
    loss_of(net, *mine(*next(batches(1)))).backward()
    optimizer.step()
    nothing = bps.DistributedOptimizer(torch.optim.SGD([{"params": []}], lr=0.1))
    nothing.step()


@scenario
def loss_scaling() -> None:
    """torch's GradScaler must see reduced gradients; then an inf of one rank makes all of them skip the step."""
    net, optimizer, reference, plain = pair(sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [param.detach().clone() for param in net.parameters()]
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = loss_of(net, *mine(x, y))
        if step == 0 and bps.rank() == bps.size() - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert all(map(torch.equal, net.parameters(), before))
            continue
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
    assert difference(net, reference) < 1e-5


@scenario
def bad_arguments() -> None:
    net = Net()
    named = list(net.named_parameters())
    for expected, call in (
        ("unique", lambda: bps.DistributedOptimizer(sgd(net), [*named, ("first.weight", torch.ones(1))])),
        ("missing", lambda: bps.DistributedOptimizer(sgd(net), named[1:])),
        ("missing", lambda: bps.DistributedOptimizer(sgd(net), [])),
        ("pairs", lambda: bps.DistributedOptimizer(sgd(net), net.parameters())),
        ("Average or Sum", lambda: bps.DistributedOptimizer(sgd(net), op=bps.Max)),
        ("at least 1", lambda: bps.DistributedOptimizer(sgd(net), backward_passes_per_step=0)),
        ("at least 1", lambda: bps.DistributedOptimizer(sgd(net)).set_backward_passes_per_step(0)),
    ):
        error, words = message_of(call)
        assert error == "ValueError", words
        assert expected in words
    assert message_of(lambda: bps.DistributedOptimizer(net))[0] == "TypeError"
    patched = sgd(net)
    patched.step = lambda: None
    assert message_of(lambda: bps.DistributedOptimizer(patched))[0] == "ValueError"
    error, words = message_of(lambda: bps.DistributedOptimizer(sgd(net.to("meta"))))
    assert (error == "UnsupportedError" and "meta" in words) == (bps.size() > 1)


@scenario
def is_not_leaked() -> None:
    net = Net()
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    loss_of(net, *mine(*next(batches(1)))).backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    hooks = [param._post_accumulate_grad_hooks for param in net.parameters()]
    assert not any(hooks)


@scenario
def alone_there_is_nothing_to_do() -> None:
    net = Net()
    optimizer = bps.DistributedOptimizer(sgd(net))
    hooks = [param._post_accumulate_grad_hooks for param in net.parameters()]
    assert all(hooks) == (bps.size() > 1)
    for _ in range(3):  # passes are not counted either
        loss_of(net, *mine(*next(batches(1)))).backward()
        optimizer.synchronize()
    optimizer.step()
    assert math.isfinite(net.last.weight.sum().item())


def run_scenarios() -> dict[str, str]:
    return outcomes(SCENARIOS)


def time_out() -> bool:
    """Rank 0 waits for a step of rank 1 in vain; repeated, it is the same step."""

    def step_at_last() -> None:
        for _ in range(50):  # the limit holds for both ranks, and this machine may be busy
            with contextlib.suppress(TimeoutError):
                optimizer.step()
                return

    net, optimizer, reference, plain = pair(sgd)
    for x, y in batches(3):
        if bps.rank() == 1:
            bps.barrier(timeout=60)
        optimizer.zero_grad()
        with contextlib.suppress(TimeoutError):  # waits for what it has submitted, once there are buckets
            loss_of(net, *mine(x, y)).backward()
        if bps.rank() == 0:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    optimizer.step()
            bps.barrier(timeout=60)
        step_at_last()
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        plain.step()
    return difference(net, reference) < 1e-5


def before_init() -> tuple[str, str]:
    bps.shutdown()
    return message_of(lambda: bps.DistributedOptimizer(sgd(Net())))


WORKERS = [run_scenarios, before_init]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, size: int) -> None:
    for results in results_of(run_scenarios, size):
        assert results[name] == "passed", results[name]


def test_buckets_are_smaller_towards_the_end() -> None:
    """What is left when backward ends is little; all are whole, in order, and none has more than one dtype."""
    from commlib.torch.reducer import BUCKET_BYTES, Slot, _divided

    large = [torch.empty(512, 512) for _ in range(11)]
    cases = [
        ([*large, torch.empty(512, 64)], [1 << 20] * 11 + [1 << 17]),  # in the order of backward
        ([torch.empty(256)] * 1000, None),
        ([torch.empty(1 << 20)], [1 << 22]),
        ([torch.empty(1)], [4]),
        ([torch.empty(100_000, dtype=dtype) for dtype in (torch.float32, torch.float64) * 9], None),
        ([], []),
    ]
    for params, expected in cases:
        slots = [Slot(i, str(i), param) for i, param in enumerate(params)]
        groups = list(_divided(slots))
        sizes = [sum(slot.param.nbytes for slot in group) for group in groups]
        assert sorted(slot.index for group in groups for slot in group) == list(range(len(params)))
        assert all(len({slot.param.dtype for slot in group}) == 1 for group in groups)
        assert expected is None or sizes == expected
        for group, size in zip(groups, sizes, strict=True):
            assert [slot.index for slot in group] == sorted(slot.index for slot in group)
            assert size - group[-1].param.nbytes < BUCKET_BYTES
        assert not sizes or len({slot.param.dtype for slot in slots}) > 1 or sizes == sorted(sizes, reverse=True)
    thousand = [
        sum(slot.param.nbytes for slot in group)
        for group in _divided([Slot(i, "", p) for i, p in enumerate(cases[1][0])])
    ]
    assert thousand[-1] < 1 << 18 < thousand[0]


def test_init_is_needed() -> None:
    assert results_of(before_init, 1)[0][0] == "NotInitializedError"


def test_a_step_that_timed_out_can_be_repeated() -> None:
    script = """
        import commlib
        from tests.launch import give
        from tests.torch.test_optimizer import time_out
        commlib.init()
        give(time_out())
        commlib.shutdown()
    """
    impatient = {"COMMLIB_OPERATION_TIMEOUT_S": "1"}
    assert run_job(script, hosts=[2], env=impatient, timeout=100) == [True, True]
