# SPDX-License-Identifier: Apache-2.0
"""CrossBarrier trains bit by bit as DistributedOptimizer does, while gradients are in flight that it does not need."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

import commlib.torch as bps
from commlib.torch import ops, reducer
from commlib.torch.cross_barrier import _SEPARABLE, CrossBarrier
from commlib.torch.parallel import DistributedDataParallel
from tests.torch import message_of, outcomes, results_of
from tests.torch.test_optimizer import counted
from tests.torch.test_parallel import Net, assert_same_gradients, assert_same_weights, data, loss_of, part_of
from tests.torch.test_training import OPTIMIZERS, STEPS, Lion, batches, network, weights

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


@contextmanager
def small_buckets() -> Iterator[None]:
    """Every parameter gets a bucket of its own."""
    usual, reducer.BUCKET_BYTES = reducer.BUCKET_BYTES, 8
    try:
        yield
    finally:
        reducer.BUCKET_BYTES = usual


def sgd(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def in_flight(optimizer: Any) -> bool:
    return bool(optimizer._reducer.updates)


def train_one(net: Any, optimizer: Any, x: Any, y: Any, **options: Any) -> None:
    """One step on this rank's part."""
    optimizer.zero_grad()
    loss_of(net, *part_of(x, y), **options).backward()
    optimizer.step()


def assert_equal(net: Any, other: Any) -> None:
    assert torch.equal(weights(net), weights(other))
    assert torch.equal(weights(net), bps.broadcast(weights(net), 0)), "ranks differ"


@scenario
def trains_like_one_process() -> None:
    """And, bit by bit, as DistributedOptimizer does."""
    for number, name in enumerate(OPTIMIZERS if bps.size() > 1 else ["adamw"]):
        for dtype in (torch.float64, torch.float32)[: 1 + (name in ("sgd", "adamw") and bps.size() < 4)]:
            passes = 1 + (number + 1) % 3
            usual = reducer.BUCKET_BYTES
            reducer.BUCKET_BYTES = 100 if number % 2 else usual
            nets = [network(dtype) for _ in range(3)]
            inners = [OPTIMIZERS[name](net.parameters()) for net in nets]
            barrier = CrossBarrier(nets[0], inners[0], backward_passes_per_step=passes, separable=name == "lion")
            wrapped = bps.DistributedOptimizer(inners[1], nets[1].named_parameters(), backward_passes_per_step=passes)
            stream = batches(dtype, STEPS * passes)
            for step in range(STEPS):
                for optimizer in (barrier, wrapped, inners[2]):
                    optimizer.zero_grad()
                for _ in range(passes - (passes > 1 and step % 7 == 6)):  # a remainder now and then
                    x, y = next(stream)
                    for net in nets[:2]:
                        torch.nn.functional.mse_loss(net(part_of(x)[0]), part_of(y)[0]).backward()
                    torch.nn.functional.mse_loss(nets[2](x), y).backward()
                for optimizer in (barrier, wrapped, inners[2]):
                    optimizer.step()
            assert in_flight(barrier) == (bps.size() > 1)
            barrier.synchronize()
            reducer.BUCKET_BYTES = usual
            assert_equal(nets[0], nets[1])
            # RMSprop divides by what is nothing but rounding where a gradient is tiny.
            limit = 1e-12 if dtype == torch.float64 else 1e-4 if name == "rmsprop" else 1e-5
            assert_same_weights(nets[0], nets[2], limit)


@scenario
def all_of_torch() -> None:
    """Whose step does as well on some parameters as on all; with several groups, and with the implementations."""
    for kind in _SEPARABLE if bps.size() == 2 else ():
        for options in ({}, {"foreach": True}) if kind in (torch.optim.SGD, torch.optim.AdamW) else ({},):

            def make(net: Any, kind: Any = kind, options: Any = options) -> Any:
                params = list(net.parameters())
                if kind is getattr(torch.optim, "Muon", None):  # matrices only
                    params = [param for param in params if param.dim() == 2]
                    net.requires_grad_(False)
                    for param in params:
                        param.requires_grad_(True)
                return kind([{"params": params[::2], "lr": 0.02}, {"params": params[1::2]}], lr=0.01, **options)

            with small_buckets():
                nets = [Net(), Net()]
                if kind is getattr(torch.optim, "Muon", None):
                    nets = [net.float() for net in nets]
                optimizers = [make(net) for net in nets]
                barrier = CrossBarrier(nets[0], optimizers[0])
                wrapped = bps.DistributedOptimizer(optimizers[1], nets[1].named_parameters())
                for x, y in data(4):
                    x, y = x.to(nets[0].first.weight.dtype), y.to(nets[0].first.weight.dtype)
                    train_one(nets[0], barrier, x, y)
                    train_one(nets[1], wrapped, x, y)
                barrier.synchronize()
            assert_equal(*nets)
            assert not torch.equal(weights(nets[0]), weights(Net())), kind


@scenario
def forward_begins_before_gradients_have_arrived() -> None:
    """Rank 0 is through the first layer while the gradients of the last one have not even been sent by rank 1."""
    if bps.size() == 1:
        return
    net = network(torch.float64)
    submit = ops.submit

    class Later:
        """Is submitted when it is waited for."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.begin = functools.partial(submit, *args, **kwargs)

        def wait(self) -> Any:
            events.append("last layer sent")
            return self.begin().wait()

    def withheld(tensor: Any, op: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        begin = Later if name in of_last_layer else submit
        return begin(tensor, op, name, *args, **kwargs)

    with small_buckets():
        barrier = CrossBarrier(net, sgd(net))
        reference, stream = network(torch.float64), data(4)
        wrapped = bps.DistributedOptimizer(sgd(reference), reference.named_parameters())
        for _ in range(2):
            x, y = next(stream)
            train_one(net, barrier, x, y)
            train_one(reference, wrapped, x, y)
        last = {id(param) for param in net[-1].parameters()}
        of_last_layer = {
            bucket.name for bucket in barrier._reducer.buckets for slot in bucket.slots if id(slot.param) in last
        }
        events: list[str] = []
        x, y = next(stream)
        if bps.rank() == bps.size() - 1:
            ops.submit = withheld
        try:
            train_one(net, barrier, x, y)
        finally:
            ops.submit = submit

        def proof(*_: Any) -> None:
            # Comes to an end when all ranks are here.
            bps.push_pull(torch.ones(1), name="proof")
            events.append("first layer done")

        hook = net[0].register_forward_hook(proof)
        barrier.zero_grad()
        loss = loss_of(net, *part_of(*next(data(1))))
        hook.remove()
        assert events == ["first layer done"] + ["last layer sent"] * 2 * (bps.rank() == bps.size() - 1)
        assert not in_flight(barrier)
        loss.backward()
        barrier.step()
        barrier.synchronize()
        train_one(reference, wrapped, x, y)
        train_one(reference, wrapped, *next(data(1)))
        assert_equal(net, reference)


@scenario
def only_what_a_module_needs() -> None:
    """A module waits for its own parameters alone, and they are changed then."""
    if bps.size() == 1:
        return
    with small_buckets():
        net = Net()
        barrier = CrossBarrier(net, sgd(net))
        for x, y in data(3):
            train_one(net, barrier, x, y)
        before = {name: param.detach().clone() for name, param in net.named_parameters()}
        net.first(part_of(x)[0])
        changed = {name for name, param in net.named_parameters() if not torch.equal(param, before[name])}
        assert changed == {"first.weight", "first.bias"}
        assert all(param.grad is None for param in net.parameters())
        net(part_of(x)[0])
        assert not in_flight(barrier)


@scenario
def unused_parameters() -> None:
    """By no rank, by some, and by all in turn: what is never used again is changed in the next step at the latest."""
    for small in (False, True):
        nets = [Net(), Net()]
        with small_buckets() if small else warnings.catch_warnings():
            make = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
            barrier = CrossBarrier(nets[0], make(nets[0].parameters()))
            wrapped = bps.DistributedOptimizer(make(nets[1].parameters()), nets[1].named_parameters())
            for step, (x, y) in enumerate(data(12)):
                users = [rank for rank in range(bps.size()) if step < 3 or (step >> rank % 3) & 1]
                train_one(nets[0], barrier, x, y, optional=bps.rank() in users)
                train_one(nets[1], wrapped, x, y, optional=bps.rank() in users)
            barrier.synchronize()
        assert_equal(*nets)


@scenario
def accumulates_over_other_layers() -> None:
    """A step of two backward passes through other layers, in another order on each rank."""
    nets = [torch.nn.ModuleList([Net(), Net()]) for _ in range(2)]
    barrier = CrossBarrier(nets[0], sgd(nets[0]))
    wrapped = bps.DistributedOptimizer(sgd(nets[1]), nets[1].named_parameters())
    for step, (x, y) in enumerate(data(9)):
        order = (0, 1) if step < 3 or (step + bps.rank()) % 2 else (1, 0)
        for net, optimizer in zip(nets, (barrier, wrapped), strict=True):
            optimizer.zero_grad()
            for which in order:
                loss_of(net[which], *part_of(x, y)).backward()
            optimizer.step()
    barrier.synchronize()
    assert (weights(nets[0]) - weights(nets[1])).abs().max() < 1e-12
    assert torch.equal(weights(nets[0]), bps.broadcast(weights(nets[0]), 0))


@scenario
def schedulers() -> None:
    """The learning rate counts that there was at step(), also one that is a tensor."""
    for rate in (0.05, torch.tensor(0.05)):
        nets = [Net(), Net()]
        inners = [torch.optim.Adam(net.parameters(), lr=copy.deepcopy(rate), foreach=False) for net in nets]
        early = torch.optim.lr_scheduler.ExponentialLR(inners[0], 0.7)  # made before wrapping
        barrier = CrossBarrier(nets[0], inners[0])
        wrapped = bps.DistributedOptimizer(inners[1], nets[1].named_parameters())
        late = torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.7)
        assert isinstance(barrier, torch.optim.Adam)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for x, y in data(6):
                train_one(nets[0], barrier, x, y)
                early.step()
                train_one(nets[1], wrapped, x, y)
                late.step()
        barrier.synchronize()
        assert_equal(*nets)


@scenario
def clipping() -> None:
    """After synchronize() gradients are reduced, and step() is taken at once."""
    nets = [Net(), Net()]
    barrier = CrossBarrier(nets[0], sgd(nets[0]))
    wrapped = bps.DistributedOptimizer(sgd(nets[1]), nets[1].named_parameters())
    for step, (x, y) in enumerate(data(8)):
        for net, optimizer in zip(nets, (barrier, wrapped), strict=True):
            optimizer.zero_grad()
            loss_of(net, *part_of(x, y)).backward()
            if step % 4 < 3:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if step % 4 == 2:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        assert in_flight(barrier) == (step % 4 == 3 and bps.size() > 1)
    barrier.synchronize()
    assert_equal(*nets)

    def skipped() -> None:
        loss_of(nets[0], *part_of(x, y)).backward()
        with barrier.skip_synchronize():
            barrier.step()

    assert ("synchronize()" in message_of(skipped)[1]) == (bps.size() > 1)


@scenario
def states() -> None:
    """Who saves or loads the model or the optimizer, copies or unwraps it, has waited for everything."""
    nets = [Net(), Net()]
    inner = torch.optim.AdamW(nets[0].parameters())
    barrier = CrossBarrier(nets[0], inner)
    wrapped = bps.DistributedOptimizer(torch.optim.AdamW(nets[1].parameters()), nets[1].named_parameters())
    for step, (x, y) in enumerate(data(12)):
        train_one(nets[0], barrier, x, y)
        train_one(nets[1], wrapped, x, y)
        assert in_flight(barrier) == (step > 0 and bps.size() > 1)
        if step % 6 == 0:
            saved, expected = nets[0].state_dict(), nets[1].state_dict()
            assert all(torch.equal(saved[name], expected[name]) for name in expected)
        elif step % 6 == 1:
            assert str(barrier.state_dict()) == str(wrapped.state_dict())
        elif step % 6 == 2:
            barrier.load_state_dict(copy.deepcopy(wrapped.state_dict()))
        elif step % 6 == 3:
            nets[0].load_state_dict(nets[1].state_dict())
        elif step % 6 == 4:
            for copied in (pickle.loads(pickle.dumps(barrier)), copy.deepcopy(barrier)):
                assert type(copied) is torch.optim.AdamW
                assert str(copied.state_dict()) == str(wrapped.state_dict())
        else:
            barrier.synchronize()
        assert not in_flight(barrier)
        assert_equal(*nets)
    train_one(nets[0], barrier, x, y)
    train_one(nets[1], wrapped, x, y)
    buffer = io.BytesIO()
    torch.save(nets[0], buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(nets[0]), torch.load(buffer, weights_only=False)):
        copied(part_of(x)[0])  # does nothing but compute
    assert in_flight(barrier) == (bps.size() > 1)
    assert barrier.unwrap() is inner
    assert_equal(*nets)
    assert not any(module._forward_pre_hooks for module in nets[0].modules())
    assert not any(module._state_dict_pre_hooks for module in nets[0].modules())
    assert counted(functools.partial(train_one, nets[0], inner, x, y)) == 0


class Renewing(torch.optim.SGD):
    """Makes its state anew in each step, changes it in the next, and multiplies matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].get("average", torch.zeros_like(param)).mul_(0.9)
                    self.state[param]["average"] = average = average + param.grad
                    rows = average.reshape(len(average), -1)
                    param.sub_((torch.eye(len(rows)) @ rows).view_as(param), alpha=group["lr"])


@scenario
def forward_in_other_modes() -> None:
    """The step is the same whatever the forward pass that carries it out is inside of."""
    nets = [Net().float(), Net().float()]
    barrier = CrossBarrier(nets[0], Renewing(nets[0].parameters(), lr=0.1), separable=True)
    wrapped = bps.DistributedOptimizer(Renewing(nets[1].parameters(), lr=0.1), nets[1].named_parameters())
    for step, (x, y) in enumerate(batches(torch.float32, 8)):
        train_one(nets[0], barrier, x, y)
        train_one(nets[1], wrapped, x, y)
        if step % 4 == 1:
            with torch.inference_mode():
                nets[0](part_of(x)[0])
        elif step % 4 == 2:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                nets[0].eval()(part_of(x)[0])
                nets[0].train()
        elif step % 4 == 3:
            for reentrant in (True, False):
                checkpoint(nets[0], part_of(x)[0].requires_grad_(), use_reentrant=reentrant)
    barrier.synchronize()
    assert_equal(*nets)


class Reaching(torch.nn.Module):
    """Modules that use what is not theirs, or belongs to modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.listed = torch.nn.ParameterList([torch.randn(8, 8), torch.randn(8)])
        self.named = torch.nn.ParameterDict({"scale": torch.randn(8)})
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8))
        self.recurrent = torch.nn.GRU(8, 8, batch_first=True)
        self.embedding = torch.nn.Embedding(12, 8)
        self.head = torch.nn.Linear(8, 12)
        self.head.weight = self.embedding.weight
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older form, a hook of the module
            self.older = torch.nn.utils.weight_norm(torch.nn.Linear(8, 8))
        self.double()

    def forward(self, x: Any) -> Any:
        x = self.embedding(x)
        x = self.encoder(self.attention(x, x, x, need_weights=False)[0])
        x = x @ self.listed[0] + self.listed[1] * self.named["scale"]
        return self.head(self.recurrent(self.older(self.normed(x)))[0])


@scenario
def modules_that_use_others_parameters() -> None:
    with small_buckets():
        nets = [Reaching(), Reaching()]
        barrier = CrossBarrier(nets[0], sgd(nets[0]))
        wrapped = bps.DistributedOptimizer(sgd(nets[1]), nets[1].named_parameters())
        generator = torch.Generator().manual_seed(1)
        for step in range(5):
            tokens = part_of(torch.randint(12, (12, 5), generator=generator))[0]
            for net, optimizer in zip(nets, (barrier, wrapped), strict=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
            if step == 3:  # the fast path of inference
                with torch.no_grad():
                    assert torch.equal(nets[0].eval()(tokens), nets[1].eval()(tokens))
                    for net in nets:
                        net.train()
        barrier.synchronize()
        assert_equal(*nets)


@scenario
def used_too_early() -> None:
    """What would be silently wrong is an error: a parameter that was read before it was changed."""
    net = Net()
    barrier = CrossBarrier(net, sgd(net))
    for x, y in data(3):
        train_one(net, barrier, x, y)

    def penalty() -> None:
        net.last.weight.square().sum().backward()

    error, words = message_of(penalty)
    assert (error == "RuntimeError" and "last.weight" in words) == (bps.size() > 1), words
    barrier.synchronize()
    barrier.zero_grad()
    net.last.weight.square().sum().backward()
    barrier.unwrap()
    barrier = CrossBarrier(net, sgd(net))
    for _ in range(2):
        train_one(net, barrier, x, y)
    barrier.synchronize()
    net.to(torch.float32)
    loss = loss_of(net, *(part.float() for part in part_of(x, y)))
    error, words = message_of(loss.backward)
    assert (error == "RuntimeError" and "unwrap" in words) == (bps.size() > 1), words


@scenario
def thrown_away() -> None:
    """zero_grad() without a step(), and a step() without gradients."""
    nets = [Net(), Net()]
    barrier = CrossBarrier(nets[0], sgd(nets[0]))
    wrapped = bps.DistributedOptimizer(sgd(nets[1]), nets[1].named_parameters())
    for step, (x, y) in enumerate(data(9)):
        for net, optimizer in zip(nets, (barrier, wrapped), strict=True):
            if step % 3 == 1:
                loss_of(net, *part_of(x, y)).backward()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    optimizer.zero_grad()
                said = ["before step()" in str(warning.message) for warning in caught]
                # A step without gradients, as the next one is, lets parameters out of their buckets.
                assert said == [True] * (bps.size() > 1 and step == 1)
                optimizer.step()
            elif step % 3 == 2:
                net.zero_grad()
                loss_of(net, *part_of(x, y)).backward()
                optimizer.step()
            else:
                train_one(net, optimizer, x, y)
                assert all(param.grad is None for param in nets[0].parameters())
    barrier.synchronize()
    assert_equal(*nets)


@scenario
def takes_over_a_distributed_optimizer() -> None:
    """As in a BytePS script."""
    nets = [Net(), Net()]
    options: dict[str, Any] = {"backward_passes_per_step": 2, "compression": bps.Compression.bf16, "op": bps.Sum}
    inner = sgd(nets[0])
    barrier = CrossBarrier(nets[0], bps.DistributedOptimizer(inner, nets[0].named_parameters(), **options))
    wrapped = bps.DistributedOptimizer(sgd(nets[1]), nets[1].named_parameters(), **options)
    stream = data(8)
    for _ in range(4):
        first, second = next(stream), next(stream)
        for net, optimizer in zip(nets, (barrier, wrapped), strict=True):
            loss_of(net, *part_of(*first)).backward()
            train = functools.partial(loss_of, net, *part_of(*second))
            train().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert barrier.unwrap() is inner
    assert_equal(*nets)


@scenario
def added_groups_and_frozen_parameters() -> None:
    nets = [Net(), Net()]
    for net in nets:
        net.optional.requires_grad_(False)
    barrier = CrossBarrier(nets[0], torch.optim.SGD(nets[0].first.parameters(), lr=0.05))
    wrapped = bps.DistributedOptimizer(torch.optim.SGD(nets[1].first.parameters(), lr=0.05))
    for step, (x, y) in enumerate(data(9)):
        for net, optimizer in zip(nets, (barrier, wrapped), strict=True):
            if step == 3:
                optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 0.01})
                optimizer.add_param_group({"params": list(net.optional.parameters()), "lr": 0.02})
            net.optional.requires_grad_(step > 5)
            train_one(net, optimizer, x, y)
    barrier.synchronize()
    assert_equal(*nets)
    assert not torch.equal(nets[0].optional.weight, Net().optional.weight)


@scenario
def step_hooks_run_once() -> None:
    net = Net()
    inner = sgd(net)
    seen: list[str] = []
    inner.register_step_pre_hook(lambda *_: seen.append("before"))
    inner.register_step_post_hook(lambda *_: seen.append("after"))
    with small_buckets():
        barrier = CrossBarrier(net, inner)
        for x, y in data(3):
            train_one(net, barrier, x, y)
        barrier.synchronize()
    assert seen == ["before", "after"] * 3


@scenario
def compiled() -> None:
    """Models compiled by torch.compile before and after wrapping; DistributedDataParallel of one, and around one."""
    if bps.size() != 2:  # it takes long
        return
    compile_ = functools.partial(torch.compile, backend="aot_eager")
    for early in (False, True):
        nets = [Net(), Net()]
        fast = compile_(nets[0])
        barrier = CrossBarrier(fast if early else nets[0], sgd(nets[0]))
        wrapped = bps.DistributedOptimizer(sgd(nets[1]), nets[1].named_parameters())
        for x, y in data(4):
            train_one(fast, barrier, x, y)
            train_one(nets[1], wrapped, x, y)
        barrier.synchronize()
        assert_equal(*nets)
        torch._dynamo.reset()
        net, reference = Net(), Net()
        parallel = DistributedDataParallel(compile_(net)) if early else compile_(DistributedDataParallel(net))
        for x, y in data(3):
            loss_of(parallel, *part_of(x, y)).backward()
            loss_of(reference, x, y).backward()
        assert_same_gradients(net, reference)
        torch._dynamo.reset()


@scenario
def bad_arguments() -> None:
    net = Net()
    lion = Lion(net.parameters())

    class Derived(torch.optim.SGD):
        pass

    for expected, call in (
        ("separable=True", functools.partial(CrossBarrier, net, lion)),
        ("separable=True", functools.partial(CrossBarrier, net, Derived(net.parameters(), lr=0.1))),
        ("L-BFGS", functools.partial(CrossBarrier, net, torch.optim.LBFGS(net.parameters()), separable=True)),
        ("SparseAdam", functools.partial(CrossBarrier, net, torch.optim.SparseAdam(list(net.parameters())))),
        ("of the model", functools.partial(CrossBarrier, net.first, sgd(net), net.named_parameters())),
        ("missing", functools.partial(CrossBarrier, net.first, sgd(net))),
        ("Average or Sum", functools.partial(CrossBarrier, net, sgd(net), op=bps.Max)),
        ("at least 1", functools.partial(CrossBarrier, net, sgd(net), backward_passes_per_step=0)),
    ):
        error, words = message_of(call)
        assert error == "ValueError", words
        assert expected in words, words
    assert message_of(functools.partial(CrossBarrier, sgd(net), sgd(net)))[0] == "TypeError"
    barrier = CrossBarrier(net, sgd(net))
    assert "already" in message_of(functools.partial(CrossBarrier, net, barrier))[1]
    assert "unwrap" in message_of(functools.partial(bps.DistributedOptimizer, sgd(net)))[1]
    assert message_of(functools.partial(barrier.step, lambda: 0.0))[0] == "UnsupportedError"
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    sparse = CrossBarrier(embedding, sgd(embedding))
    error, _ = message_of(embedding(torch.tensor([1])).sum().backward)
    assert error == ("UnsupportedError" if bps.size() > 1 else "")
    sparse.unwrap()


@scenario
def different_models() -> None:
    """Where gradients differ in shape, all ranks are told where they wait, and can go on."""
    net = torch.nn.Linear(3, 2)
    barrier = CrossBarrier(net, sgd(net))
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
        barrier.step()
    if bps.size() > 1:
        (bucket,) = barrier._reducer.buckets
        barrier.synchronize()
        bucket.flat = torch.zeros(len(bucket.flat) + bps.rank(), dtype=bucket.flat.dtype)
        net(torch.ones(1, 3)).sum().backward()
        barrier.step()
        assert message_of(functools.partial(net, torch.ones(1, 3)))[0] == "MismatchError"
        assert not in_flight(barrier)
    barrier.unwrap()


@scenario
def the_last_step_is_not_lost() -> None:
    """Without the optimizer, the model still gets what is in flight, and then lets go of it."""
    nets = [Net(), Net()]
    barrier = CrossBarrier(nets[0], sgd(nets[0]))
    wrapped = bps.DistributedOptimizer(sgd(nets[1]), nets[1].named_parameters())
    for x, y in data(3):
        train_one(nets[0], barrier, x, y)
        train_one(nets[1], wrapped, x, y)
    gone = weakref.ref(barrier)
    del barrier
    assert (gone() is not None) == (bps.size() > 1)
    assert torch.equal(nets[0](x), nets[1](x))
    assert gone() is None
    assert not any(module._forward_pre_hooks for module in nets[0].modules())


@scenario
def nothing_is_leaked() -> None:
    net = Net()
    x, y = next(data(1))
    for turn in range(100 if bps.size() < 4 else 20):
        barrier = CrossBarrier(net, sgd(net))
        train_one(net, barrier, x, y)
        gone = weakref.ref(barrier), weakref.ref(barrier._reducer)
        if turn % 2:
            barrier.unwrap()
        else:
            barrier.synchronize()
        del barrier
        gc.collect(0)
        assert gone[0]() is None
        assert gone[1]() is None
    for module in net.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks
    assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


def run_scenarios() -> dict[str, str]:
    return outcomes(SCENARIOS)


WORKERS = [run_scenarios]


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, size: int) -> None:
    for results in results_of(run_scenarios, size):
        assert results[name] == "passed", results[name]
