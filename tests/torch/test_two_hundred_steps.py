# SPDX-License-Identifier: Apache-2.0
"""One training of 200 steps in which everything happens that scripts do to an optimizer, each thing several times.

A model that is trained on several ranks, and a reference that each rank trains by itself on the whole batch, meet the
same events in the same random order. After every step they must be equal.
"""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import commlib.torch as bps
from tests.torch import message_of, results_of

STEPS = 200
BATCH = 12  # can be dealt to 1, 2 and 4 ranks evenly
WORDS = 11

EVENTS: list[Callable[[Run], None]] = []


def event(function: Callable[[Run], None]) -> Callable[[Run], None]:
    EVENTS.append(function)
    return function


class Net(torch.nn.Module):
    """With an embedding whose weights are tied to the output, a convolution, and layers that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(WORDS, 6)
        self.sparse = torch.nn.Embedding(WORDS, 6, sparse=True)
        self.conv = torch.nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)
        self.optional = torch.nn.Linear(6, 6)
        self.never = torch.nn.Linear(2, 2)
        self.out = torch.nn.Linear(6, WORDS)
        self.out.weight = self.words.weight
        self.extra = torch.nn.ParameterList()
        self.double()

    def forward(self, x: Any, optional: bool = True) -> Any:
        hidden = (self.words(x) + self.sparse(x)).mean(1)
        if optional:
            hidden = hidden + self.optional(hidden).tanh()
        image = hidden.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)
        hidden = hidden + self.conv(image).flatten(1).mean(1, keepdim=True)
        for extra in self.extra:
            hidden = hidden + extra
        return self.out(hidden)


class Run:
    """Both trainings, and what is in force."""

    def __init__(self) -> None:
        self.net, self.reference = Net(), Net()
        self.plain = self.made(self.reference)
        inner = self.made(self.net)
        # One scheduler was there before the optimizer was wrapped, one comes after.
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(inner, 0.999)]
        self.optimizer = bps.DistributedOptimizer(inner, self.net.named_parameters(), sparse_as_dense=True)
        self.schedulers.append(torch.optim.lr_scheduler.StepLR(self.optimizer, 50, 0.9))
        self.schedulers.append(torch.optim.lr_scheduler.ExponentialLR(self.plain, 0.999))
        self.schedulers.append(torch.optim.lr_scheduler.StepLR(self.plain, 50, 0.9))
        self.data = torch.Generator().manual_seed(5)
        self.taken = 0

    @staticmethod
    def made(net: Net) -> torch.optim.Optimizer:
        groups = [
            {"params": [*net.words.parameters(), *net.sparse.parameters(), *net.conv.parameters()]},
            {"params": [*net.optional.parameters(), net.out.bias], "lr": 0.02, "weight_decay": 0.01},
            {"params": list(net.never.parameters())},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.8)

    @property
    def both(self) -> list[tuple[Net, Any, bool]]:
        return [(self.net, self.optimizer, True), (self.reference, self.plain, False)]

    def batch(self) -> tuple[Any, Any]:
        return (
            torch.randint(WORDS, (BATCH, 3), generator=self.data),
            torch.randint(WORDS, (BATCH,), generator=self.data),
        )

    def loss(self, net: Net, x: Any, y: Any, is_mine: bool, model: Any = None, **options: Any) -> Any:
        if is_mine:
            x, y = (tensor.tensor_split(bps.size())[bps.rank()] for tensor in (x, y))
        return torch.nn.functional.cross_entropy((net if model is None else model)(x, **options), y)

    def backward(self, x: Any, y: Any, **options: Any) -> None:
        for net, _, is_mine in self.both:
            self.loss(net, x, y, is_mine, **options).backward()

    def step(self, **options: Any) -> None:
        """An ordinary step of both."""
        for _, optimizer, _ in self.both:
            optimizer.zero_grad()
        self.backward(*self.batch(), **options)
        self.finish()

    def finish(self) -> None:
        """Take the step, and compare."""
        for _, optimizer, _ in self.both:
            optimizer.step()
        self.compare()

    def compare(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()
        self.taken += 1
        for (name, one), other in zip(self.net.named_parameters(), self.reference.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-12), (self.taken, name, one, other)
        rates = [[group["lr"] for group in optimizer.param_groups] for _, optimizer, _ in self.both]
        assert rates[0] == rates[1]


# Names, and what is wrapped.


@event
def wrapped_anew_without_names(run: Run) -> None:
    run.optimizer = bps.DistributedOptimizer(run.optimizer.unwrap(), sparse_as_dense=True)
    run.step()


@event
def wrapped_anew_with_names(run: Run) -> None:
    inner = run.optimizer.unwrap()
    assert type(inner) is torch.optim.SGD
    run.optimizer = bps.DistributedOptimizer(inner, run.net.named_parameters(), sparse_as_dense=True)
    run.step()


@event
def wrapped_wrongly(run: Run) -> None:
    named = list(run.net.named_parameters())
    for wrap in (
        lambda: bps.DistributedOptimizer(run.plain, [*run.reference.named_parameters(), named[0], named[0]]),
        lambda: bps.DistributedOptimizer(run.plain, list(run.reference.named_parameters())[1:]),
        lambda: bps.DistributedOptimizer(run.optimizer),
        lambda: bps.DistributedOptimizer(torch.optim.SGD(run.net.parameters())),
    ):
        assert message_of(wrap)[0] == "ValueError"
    run.step()


@event
def is_what_it_wraps(run: Run) -> None:
    assert isinstance(run.optimizer, torch.optim.SGD)
    assert "SGD" in repr(run.optimizer)
    run.step()


@event
def copied_and_pickled(run: Run) -> None:
    for copied in (copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))):
        assert type(copied) is torch.optim.SGD
    run.step()


# Which parameters there are, and which are used.


@event
def a_layer_is_frozen_for_a_while(run: Run) -> None:
    for wanted in (False, False, True):
        for net, _, _ in run.both:
            net.optional.requires_grad_(wanted)
        run.step()


@event
def some_ranks_do_not_use_a_layer(run: Run) -> None:
    def loss(net: Net, x: Any, y: Any, rank: int) -> Any:
        x, y = (tensor.tensor_split(bps.size())[rank] for tensor in (x, y))
        return torch.nn.functional.cross_entropy(net(x, optional=rank % 2 == 0), y)

    x, y = run.batch()
    for _, optimizer, _ in run.both:
        optimizer.zero_grad()
    loss(run.net, x, y, bps.rank()).backward()
    (sum(loss(run.reference, x, y, rank) for rank in range(bps.size())) / bps.size()).backward()
    run.finish()


@event
def nobody_uses_a_layer(run: Run) -> None:
    run.step(optional=False)
    assert run.net.never.weight.grad is None
    assert run.net.optional.weight.grad is None


@event
def a_group_is_added(run: Run) -> None:
    if len(run.net.extra) < 3:
        for net, optimizer, _ in run.both:
            net.extra.append(torch.nn.Parameter(torch.full((6,), 0.1 * len(net.extra), dtype=torch.float64)))
            optimizer.add_param_group({"params": [net.extra[-1]], "lr": 0.01})
        for scheduler in run.schedulers:
            scheduler.base_lrs = [*scheduler.base_lrs, 0.01]
    run.step()


@event
def an_empty_group_is_added(run: Run) -> None:
    if len(run.optimizer.param_groups) < 8:
        for _, optimizer, _ in run.both:
            optimizer.add_param_group({"params": []})
    run.step()


# Gradients.


@event
def gradients_are_dropped(run: Run) -> None:
    for net, _, _ in run.both:
        net.zero_grad(set_to_none=True)
    run.backward(*run.batch())
    run.finish()


@event
def gradients_are_zeroed_in_place(run: Run) -> None:
    for _, optimizer, _ in run.both:
        optimizer.zero_grad(set_to_none=False)
    run.backward(*run.batch())
    run.finish()


@event
def one_gradient_is_none(run: Run) -> None:
    for net, optimizer, _ in run.both:
        optimizer.zero_grad()
        net.out.bias.grad = None
    run.backward(*run.batch())
    run.finish()


@event
def gradients_are_accumulated(run: Run) -> None:
    run.optimizer.set_backward_passes_per_step(3)
    for passes in (3, 3, 2):  # the last as at the end of an epoch
        for _, optimizer, _ in run.both:
            optimizer.zero_grad()
        for _ in range(passes):
            run.backward(*run.batch())
        run.finish()
    run.optimizer.set_backward_passes_per_step(1)


@event
def gradients_are_clipped(run: Run) -> None:
    for _, optimizer, _ in run.both:
        optimizer.zero_grad()
    run.backward(*run.batch())
    run.optimizer.synchronize()
    for net, _, _ in run.both:
        torch.nn.utils.clip_grad_norm_([p for p in net.parameters() if p is not net.sparse.weight], 0.1)
    with run.optimizer.skip_synchronize():
        run.finish()


@event
def a_backward_pass_is_thrown_away(run: Run) -> None:
    run.optimizer.zero_grad()
    run.loss(run.net, *run.batch(), is_mine=True).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may warn of what was on its way
        run.optimizer.zero_grad()
    run.step()


@event
def one_backward_pass_too_many(run: Run) -> None:
    run.optimizer.zero_grad()

    def twice() -> None:
        for _ in range(2):
            run.loss(run.net, *run.batch(), is_mine=True).backward()

    error, said = message_of(twice)
    assert (error == "RuntimeError" and "backward_passes_per_step" in said) == (bps.size() > 1), said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.optimizer.zero_grad()
    run.step()


@event
def a_step_without_its_gradients(run: Run) -> None:
    run.optimizer.zero_grad()
    before = copy.deepcopy(run.net.state_dict()), copy.deepcopy(run.optimizer.state_dict())

    def skipped() -> None:
        run.loss(run.net, *run.batch(), is_mine=True).backward()
        with run.optimizer.skip_synchronize():
            run.optimizer.step()

    error, said = message_of(skipped)
    assert (error == "RuntimeError" and "skip_synchronize" in said) == (bps.size() > 1), said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.optimizer.zero_grad()
    if not error:
        run.net.load_state_dict(before[0])
        run.optimizer.load_state_dict(before[1])
    run.step()


@event
def a_closure(run: Run) -> None:
    x, y = run.batch()
    for net, optimizer, is_mine in run.both:

        def closure(net: Net = net, optimizer: Any = optimizer, is_mine: bool = is_mine) -> Any:
            optimizer.zero_grad()
            loss = run.loss(net, x, y, is_mine)
            loss.backward()
            return loss

        assert optimizer.step(closure).isfinite()
    run.compare()


@event
def gradients_of_gradients(run: Run) -> None:
    x, y = run.batch()
    for net, optimizer, is_mine in run.both:
        optimizer.zero_grad()
        bias = net.out.bias
        loss = run.loss(net, x, y, is_mine)
        (slope,) = torch.autograd.grad(loss, bias, create_graph=True)
        # The mean over ranks of a square is not the square of the mean: what is squared is averaged first.
        if is_mine:
            slope = bps.push_pull(slope, name="slope")
        (loss + slope.square().sum()).backward()
    run.finish()


@event
def evaluated_in_between(run: Run) -> None:
    x, y = run.batch()
    for net, _, _ in run.both:
        net.eval()
        with torch.no_grad():
            assert run.loss(net, x, y, False).isfinite()
        net.train()
    run.step()


@event
def compiled(run: Run) -> None:
    x, y = run.batch()
    for net, optimizer, is_mine in run.both:
        optimizer.zero_grad()
        run.loss(net, x, y, is_mine, model=torch.compile(net, backend="eager")).backward()
    run.finish()
    torch._dynamo.reset()


# State.


@event
def saved_and_loaded(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    weights = copy.deepcopy(run.net.state_dict())
    run.optimizer.zero_grad()
    run.loss(run.net, *run.batch(), is_mine=True).backward()
    run.optimizer.step()  # to no purpose
    run.optimizer.zero_grad()
    run.net.load_state_dict(weights)
    run.optimizer.load_state_dict(state)
    run.step()


@event
def others_have_lost_their_state(run: Run) -> None:
    if bps.rank() != 0:
        run.optimizer.state.clear()
        with torch.no_grad():
            for parameter in run.net.parameters():
                parameter.zero_()
    bps.broadcast_parameters(run.net.state_dict(), 0)
    bps.broadcast_optimizer_state(run.optimizer, 0)
    run.step()


@event
def options_of_all_kinds(run: Run) -> None:
    group = run.optimizer.param_groups[0]
    group["note"], group["maybe"], group["scale"] = "a" * (1 + bps.rank()), None, torch.tensor(bps.rank() + 1.0)
    bps.broadcast_optimizer_state(run.optimizer, 0)
    assert group["note"] == "a"
    assert group["maybe"] is None
    assert group["scale"] == 1
    for name in ("note", "maybe", "scale"):
        del group[name]
    run.step()


# Operations on the way.


@event
def objects_of_different_sizes(run: Run) -> None:
    for size in (3, 70_000, 0):
        assert bps.broadcast_object(b"x" * size if bps.rank() == 0 else None, 0, name="object") == b"x" * size
    run.step()


@event
def tensors_of_all_kinds(run: Run) -> None:
    size = bps.size()
    for name, tensor in {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "channels last": torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "expanded": torch.ones(3, 1).expand(3, 4),
        "0-d": torch.tensor(5.0),
        "empty": torch.ones(0, 3),
        "bfloat16": torch.ones(5, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
    }.items():
        op = bps.Sum
        summed = bps.push_pull(tensor, name=name, op=op)
        expected = tensor if tensor.dtype is torch.bool else tensor * size
        assert summed.dtype is tensor.dtype
        assert torch.equal(summed, expected), name
    wanted = torch.ones(3, requires_grad=True)
    bps.push_pull(wanted, name="wanted", op=bps.Sum).sum().backward()
    assert torch.equal(wanted.grad, torch.full((3,), float(size)))
    assert message_of(lambda: bps.push_pull(torch.ones(3, device="meta")))[0] == "UnsupportedError"
    run.step()


@event
def ranks_disagree(run: Run) -> None:
    error, _ = message_of(lambda: bps.push_pull(torch.ones(3 + bps.rank()), name="odd"))
    assert error == ("MismatchError" if bps.size() > 1 else "")
    run.step()


def train() -> dict[str, Any]:
    run = Run()
    order = random.Random(1)
    happened: dict[str, int] = {}
    run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        while run.taken < STEPS:
            # All of them once, in a random order, and then again in another.
            for chosen in order.sample(EVENTS, len(EVENTS)):
                try:
                    chosen(run)
                except BaseException as error:
                    error.add_note(f"in {chosen.__name__}, after {run.taken} steps")
                    raise
                happened[chosen.__name__] = happened.get(chosen.__name__, 0) + 1
                for _ in range(order.randrange(3)):
                    run.step()
    assert min(happened.values()) >= 2
    run.optimizer.unwrap()
    return {"steps": run.taken, "bits": b"".join(p.detach().numpy().tobytes() for p in run.net.parameters())}


WORKERS = [train]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_to_one_process_after_every_step(size: int) -> None:
    results = results_of(train, size)
    assert all(result["steps"] >= STEPS for result in results)
    assert len({result["bits"] for result in results}) == 1
