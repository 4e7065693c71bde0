# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: backward() leaves in the gradients what one process would have of the whole batch."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

import commlib
import commlib.torch as bps
from commlib.torch import ops, reducer
from commlib.torch.parallel import DistributedDataParallel
from tests.launch import run_job
from tests.torch import message_of, outcomes, results_of
from tests.torch.test_optimizer import counted
from tests.torch.test_training import BATCH, OPTIMIZERS, STEPS, batches, network, weights

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


class Net(torch.nn.Module):
    """Has a layer that is used on demand, and one that never is; of other numbers on each rank until it is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(7, 5)
        self.optional = torch.nn.Linear(5, 5)
        self.never = torch.nn.Linear(2, 2)
        self.last = torch.nn.Linear(5, 3)
        self.double()

    def forward(self, x: Any, optional: bool = True, reentrant: bool | None = None) -> Any:
        x = self.first(x).tanh()
        if reentrant is not None:
            x = checkpoint(self._inside, x, reentrant, use_reentrant=reentrant)
        elif optional:
            x = self.optional(x).tanh()
        return self.last(x)

    def _inside(self, x: Any, reentrant: bool) -> Any:
        return checkpoint(self.optional, x, use_reentrant=reentrant).tanh()


def part_of(*tensors: Any, rank: int | None = None) -> Any:
    rank = bps.rank() if rank is None else rank
    return [tensor.tensor_split(bps.size())[rank] for tensor in tensors]


def data(count: int) -> Iterator[tuple[Any, Any]]:
    return batches(torch.float64, count)


def sgd(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def loss_of(net: Any, x: Any, y: Any, **options: Any) -> Any:
    return ((net(x, **options) - y) ** 2).mean()


def all_parts(net: Any, x: Any, y: Any, users: list[int]) -> None:
    """The backward passes of all ranks, on one. Some use the layer that is optional."""
    for rank in range(bps.size()):
        (loss_of(net, *part_of(x, y, rank=rank), optional=rank in users) / bps.size()).backward()


def assert_same_gradients(net: Any, reference: Any, limit: float = 1e-12) -> None:
    for (name, one), other in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert (one.grad - other.grad).abs().max() <= limit * (1 + other.grad.abs().max()), name


def assert_same_weights(net: Any, reference: Any, limit: float = 1e-12) -> None:
    mine, truth = weights(net), weights(reference)
    assert (mine - truth).abs().max() <= limit * truth.abs().max()
    assert torch.equal(mine, bps.broadcast(mine, 0)), "ranks differ"


@scenario
def trains_like_one_process() -> None:
    """With any optimizer, with one bucket and several; gradients accumulate under no_sync, and may be clipped."""
    usual = reducer.BUCKET_BYTES
    for number, name in enumerate(OPTIMIZERS if bps.size() > 1 else ["sgd"]):
        for dtype in (torch.float64, torch.float32)[: 1 + (name in ("sgd", "adamw") and bps.size() < 4)]:
            passes = 1 + number % 3
            reducer.BUCKET_BYTES = 100 if number % 2 else usual
            net, reference = network(dtype), network(dtype)
            wrapped = DistributedDataParallel(net)
            optimizer, plain = OPTIMIZERS[name](wrapped.parameters()), OPTIMIZERS[name](reference.parameters())
            stream = batches(dtype, STEPS * passes)
            for step in range(STEPS):
                optimizer.zero_grad(set_to_none=step % 3 > 0)
                plain.zero_grad()
                count = passes - (passes > 1 and step % 7 == 6)  # a remainder now and then
                for index in range(count):
                    x, y = next(stream)
                    if index < count - 1:
                        with wrapped.no_sync():
                            loss_of(wrapped, *part_of(x, y)).backward()
                    else:
                        loss_of(wrapped, *part_of(x, y)).backward()
                    loss_of(reference, x, y).backward()
                for each in (wrapped, reference):
                    torch.nn.utils.clip_grad_norm_(each.parameters(), 0.3)
                optimizer.step()
                plain.step()
            # RMSprop divides by what is nothing but rounding where a gradient is tiny.
            assert_same_weights(
                net, reference, 1e-12 if dtype == torch.float64 else 1e-4 if name == "rmsprop" else 1e-5
            )
    reducer.BUCKET_BYTES = usual


@scenario
def is_reduced_when_backward_returns() -> None:
    """From the first pass on, and unused parameters too: by no rank, by some, and by all in turn."""
    net, reference = Net(), Net()
    wrapped = DistributedDataParallel(net)
    for step, (x, y) in enumerate(data(9)):
        users = [rank for rank in range(bps.size()) if step == 0 or (step >> rank % 3) & 1]
        loss_of(wrapped, *part_of(x, y), optional=bps.rank() in users).backward()
        all_parts(reference, x, y, users)
        assert_same_gradients(net, reference)
        assert net.never.weight.grad is None
        assert (net.optional.weight.grad is None) == (not users)
        net.zero_grad()
        reference.zero_grad()


@scenario
def overlaps_with_backward() -> None:
    """The last layer's gradients are under way before those of the first one are computed."""
    net, usual = network(torch.float64), reducer.BUCKET_BYTES
    reducer.BUCKET_BYTES = 8
    wrapped = DistributedDataParallel(net)
    x, y = next(data(1))
    passes(wrapped, x, y)
    reducer.BUCKET_BYTES = usual
    submit, events = ops.submit, []

    def noted(tensor: Any, op: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        events.append("submitted")
        return submit(tensor, op, name, *args, **kwargs)

    hook = net[0].weight.register_hook(lambda _: events.append("first layer"))
    ops.submit = noted
    try:
        passes(wrapped, x, y)
    finally:
        ops.submit = submit
    hook.remove()
    before, after = (4, 2) if bps.size() > 1 else (0, 0)  # the last one may be that of the first layer's bias
    assert events.count("submitted") == before + after
    assert events.index("first layer") in (before, before + 1) or bps.size() == 1


@scenario
def accumulates_without_no_sync() -> None:
    """As with torch's own, each pass is reduced, and the gradients add up."""
    net, reference = Net(), Net()
    wrapped = DistributedDataParallel(net)
    for x, y in data(3):
        loss_of(wrapped, *part_of(x, y)).backward()
        loss_of(reference, x, y).backward()
    assert_same_gradients(net, reference)


@scenario
def no_sync_with_unused_parameters() -> None:
    """What was used in a pass that was not reduced, and not in that which is, is reduced too (pytorch issue 69031)."""
    for set_to_none in (True, False) if bps.size() > 1 else (True,):  # alone, zeros stay where there were some
        net, reference = Net(), Net()
        wrapped = DistributedDataParallel(net)
        optimizer, plain = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(reference.parameters())
        stream = data(16)
        for step in range(8):
            optimizer.zero_grad(set_to_none)
            plain.zero_grad()
            held, (x, y) = next(stream), next(stream)
            users = [rank for rank in range(bps.size()) if step < 2 or (step + rank) % 2]
            options = {"optional": bps.rank() in users}

            def passes(wrapped: Any = wrapped, held: Any = held, options: Any = options) -> None:
                with wrapped.no_sync():
                    loss_of(wrapped, *part_of(*held), **options).backward()

            assert counted(passes) == 0
            all_parts(reference, *held, users)
            if step % 4 < 3:
                loss_of(wrapped, *part_of(x, y), optional=step == 1).backward()
                loss_of(reference, x, y, optional=step == 1).backward()
            else:
                wrapped.synchronize()  # the remainder of an epoch
            assert_same_gradients(net, reference)
            optimizer.step()
            plain.step()
        assert_same_weights(net, reference)


@scenario
def checkpointing() -> None:
    """Nested, of both kinds; also around the whole wrapper, and around two uses of one layer."""
    for reentrant in (True, False):
        net, reference = Net(), Net()
        wrapped = DistributedDataParallel(net)
        for x, y in data(4):
            loss_of(wrapped, *part_of(x, y), reentrant=reentrant).backward()
            loss_of(reference, x, y).backward()
            assert_same_gradients(net, reference)
        # Nothing is reduced when an inner pass ends, which would take parameters out of their bucket.
        again = functools.partial(passes, wrapped, x, y, reentrant=reentrant)
        assert counted(again) == (bps.size() > 1)
        loss_of(reference, x, y).backward()
        for x, y in data(3):
            part_x, part_y = part_of(x, y)
            part_x.requires_grad_()  # reentrant checkpointing wants it
            ((checkpoint(wrapped, part_x, use_reentrant=reentrant) - part_y) ** 2).mean().backward()
            loss_of(reference, x, y).backward()
            assert_same_gradients(net, reference)

        class Twice(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(1)
                self.layer = torch.nn.Linear(7, 7).double()
                self.last = torch.nn.Linear(7, 3).double()

            def forward(self, x: Any, reentrant: bool = reentrant) -> Any:
                x = self.last(x).sum() + x  # so that what is checkpointed requires a gradient
                for _ in range(2):
                    x = checkpoint(self.layer, x, use_reentrant=reentrant).tanh()
                return self.last(x)

        net, reference = Twice(), Twice()
        wrapped = DistributedDataParallel(net)
        for x, y in data(4):
            loss_of(wrapped, *part_of(x, y)).backward()
            loss_of(reference, x, y).backward()
        limit = 1e-12
        if bps.size() == 1:
            assert_same_gradients(net, reference, limit)
        else:  # a sum within the loss: not a mean over the batch
            flat = torch.cat([param.grad.flatten() for param in net.parameters()])
            assert torch.equal(flat, bps.broadcast(flat, 0))


@scenario
def two_of_them() -> None:
    """As in a GAN: the generator learns through the discriminator, whose gradients of that are dropped, or frozen."""
    for freezes in (False, True):

        def players() -> tuple[Any, Any]:
            torch.manual_seed(3)
            generator = torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
            discriminator = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
            return generator.double(), discriminator.double()

        def play(pair: Any, optimizers: Any, z: Any, real: Any, freezes: bool = freezes) -> None:
            (generator, discriminator), (of_generator, of_discriminator) = pair, optimizers
            of_discriminator.zero_grad()
            fake = generator(z)
            # Two forward passes before a backward pass.
            (discriminator(real).square().mean() - discriminator(fake.detach()).tanh().mean()).backward()
            of_discriminator.step()
            discriminator.requires_grad_(not freezes)
            of_generator.zero_grad()
            discriminator(fake).tanh().mean().backward()
            of_generator.step()
            discriminator.requires_grad_(True)

        pair, reference = players(), players()
        wrapped = [DistributedDataParallel(net) for net in pair]
        optimizers, plains = [sgd(net) for net in pair], [sgd(net) for net in reference]
        for z, real in data(8):
            play(wrapped, optimizers, *part_of(z, real))
            play(reference, plains, z, real)
        for net, other in zip(pair, reference, strict=True):
            assert_same_weights(net, other)
        # Nothing has fallen out of its bucket, so there are few operations.
        again = functools.partial(play, wrapped, optimizers, *part_of(z, real))
        assert counted(again) == (bps.size() > 1) * (2 + (not freezes))


@scenario
def in_any_order() -> None:
    """Two modules in one backward pass, which comes to them in another order on each rank."""
    nets, references = [Net(), Net()], [Net(), Net()]
    wrapped = [DistributedDataParallel(net) for net in nets]
    for step, (x, y) in enumerate(data(4)):
        one, other = wrapped[:: 1 if (step + bps.rank()) % 2 else -1]
        optional = step == 0 or (step + bps.rank()) % 2 == 0
        (loss_of(one, *part_of(x, y), optional=False) + loss_of(other, *part_of(x, y), optional=optional)).backward()
        assert all(net.first.weight.grad is not None for net in nets)
        for net, reference in zip(nets, references, strict=True):
            for rank in range(bps.size()):
                first = net is nets[0 if (step + rank) % 2 else -1]
                uses = not first and (step == 0 or (step + rank) % 2 == 0)
                (loss_of(reference, *part_of(x, y, rank=rank), optional=uses) / bps.size()).backward()
            assert_same_gradients(net, reference)


@scenario
def zeros_are_gradients() -> None:
    """What was used while nothing was reduced has a gradient, also if that is nothing but zeros."""
    net = Net()
    wrapped = DistributedDataParallel(net)
    x, y = next(data(1))
    passes(wrapped, x, y)
    net.zero_grad(set_to_none=False)
    with wrapped.no_sync():
        (0 * loss_of(wrapped, *part_of(x, y))).backward()
    passes(wrapped, x, y, optional=False)
    assert net.optional.weight.grad is not None
    assert not net.optional.weight.grad.any()
    assert net.never.weight.grad is None


@scenario
def gradient_penalty() -> None:
    """autograd.grad() leaves nothing in the gradients, so nothing is reduced until backward() has run through it."""
    net, reference = Net(), Net()
    wrapped = DistributedDataParallel(net)
    optimizer, plain = sgd(net), sgd(reference)

    def penalty(each: Any, x: Any) -> Any:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(x).tanh().sum(), x, create_graph=True)
        return slope.square().mean()

    for x, y in data(5):
        optimizer.zero_grad()
        plain.zero_grad()
        terms: list[Any] = []
        part_x, part_y = part_of(x, y)

        def first_order(x: Any = part_x, terms: Any = terms) -> None:
            terms.append(penalty(wrapped, x))

        assert counted(first_order) == 0
        (loss_of(wrapped, part_x, part_y) + terms[0]).backward()
        (loss_of(reference, x, y) + penalty(reference, x)).backward()
        assert_same_gradients(net, reference)
        optimizer.step()
        plain.step()
    penalty(wrapped, part_of(x, y)[0]).backward()  # the outputs themselves are not in this pass
    penalty(reference, x).backward()
    assert_same_gradients(net, reference)
    assert_same_weights(net, reference)


@scenario
def a_rank_that_uses_nothing() -> None:
    """Its backward pass reaches the outputs and none of the parameters: it takes part all the same."""

    class Skipped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layer = torch.nn.Linear(3, 3).double()

        def forward(self, x: Any, skip: bool) -> Any:
            return x * 2 if skip else self.layer(x)

    encoder, skipped = Net(), Skipped()
    first, second = DistributedDataParallel(encoder), DistributedDataParallel(skipped)
    other_encoder, other = Net(), Skipped()
    for step, (x, y) in enumerate(data(6)):
        part_x, part_y = part_of(x, y)
        skips = [step > 1 and (step + rank) % 2 == 1 for rank in range(bps.size())]
        ((second(first(part_x), skips[bps.rank()]) - part_y) ** 2).mean().backward()
        for rank, skip in enumerate(skips):
            one_x, one_y = part_of(x, y, rank=rank)
            (((other(other_encoder(one_x), skip) - one_y) ** 2).mean() / bps.size()).backward()
        assert_same_gradients(encoder, other_encoder)
        assert_same_gradients(skipped, other)


@scenario
def buffers() -> None:
    """In training, running statistics are those of rank 0's part; evaluation changes and sends nothing."""

    def make() -> Any:
        torch.manual_seed(5)
        net = torch.nn.Sequential(torch.nn.Linear(7, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double()
        net.register_buffer("constant", torch.arange(3.0))
        net.register_buffer("own", torch.full((2,), float(bps.rank())), persistent=False)
        net.register_buffer("empty", None)
        return net

    net, reference = make(), make()
    wrapped = DistributedDataParallel(net)
    optimizer, plain = sgd(net), sgd(reference)
    constant = net.constant._version
    assert not net.own.any()
    for x, y in data(6):
        optimizer.zero_grad()
        plain.zero_grad()
        # Two forward passes before one backward pass.
        part_x, part_y = part_of(x, y)
        ((wrapped(part_x) + wrapped(part_x.flip(1)) - part_y) ** 2).mean().backward()
        before, after = {name: buffer.clone() for name, buffer in reference.named_buffers()}, {}
        for rank in range(bps.size()):
            for buffer, value in zip(reference.buffers(), before.values(), strict=True):
                buffer.data.copy_(value)
            one_x, one_y = part_of(x, y, rank=rank)
            first = reference(one_x)
            # Between two forward passes, all get the statistics of rank 0; they matter for nothing but themselves.
            (((first + reference(one_x.flip(1)) - one_y) ** 2).mean() / bps.size()).backward()
            after[rank] = {name: buffer.clone() for name, buffer in reference.named_buffers()}
        for name, buffer in reference.named_buffers():
            buffer.data.copy_(after[0][name])
        assert_same_gradients(net, reference)
        optimizer.step()
        plain.step()
    wrapped(part_of(x, y)[0])
    if bps.size() > 1:  # what it was before this last forward pass has been replaced by rank 0's
        assert not net.own.any()
        assert net.constant._version == constant
        mean = bps.broadcast(net[1].running_mean, 0)
        assert torch.equal(mean, net[1].running_mean) == (bps.rank() == 0)
        wrapped(part_of(x, y)[0].zero_())
        assert torch.allclose(net[1].running_mean, 0.9 * mean + 0.1 * net[0].bias.detach())
    wrapped.eval()
    if bps.rank() == 0:  # alone
        with torch.no_grad():
            wrapped(x)
    alone = DistributedDataParallel(make(), broadcast_buffers=False)
    alone(part_of(x, y)[0] + bps.rank())
    mean = alone.module[1].running_mean
    assert torch.equal(mean, bps.broadcast(mean, 0)) == (bps.rank() == 0)


@scenario
def starts_from_rank_0() -> None:
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.add_(bps.rank())
    DistributedDataParallel(net)
    assert torch.equal(weights(net), weights(Net()))


@scenario
def different_modules() -> None:
    """All ranks are told which parameter it is, also those that agree with rank 0; then they can go on."""

    def stack(*sizes: tuple[int, int], dtype: Any = torch.float64) -> Any:
        return torch.nn.Sequential(*(torch.nn.Linear(*size, dtype=dtype) for size in sizes))

    is_last = bps.rank() == bps.size() - 1 > 0
    for other, words in (
        (stack((3, 4), (5 if is_last else 4, 2)), "1.weight"),
        (stack((3, 4), (4, 2), *[(2, 2)] * is_last), "2.weight"),
        (stack((3, 4), *[(4, 2)] * (not is_last)), "1.weight"),
        (stack((3, 4), dtype=torch.float32 if is_last else torch.float64), "0.weight"),
    ):
        error, said = message_of(functools.partial(DistributedDataParallel, other))
        assert (error == "MismatchError" and words in said) == (bps.size() > 1), said
    accumulates_without_no_sync()


@scenario
def frozen_and_thawed() -> None:
    net, reference = Net(), Net()
    for each in (net, reference):
        each.first.requires_grad_(False)
    wrapped = DistributedDataParallel(net)
    optimizer, plain = sgd(net), sgd(reference)
    for step, (x, y) in enumerate(data(8)):
        for each in (net, reference):
            each.first.requires_grad_(step >= 2)
            each.last.requires_grad_(step != 4)
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(wrapped, *part_of(x, y)).backward()
        loss_of(reference, x, y).backward()
        assert_same_gradients(net, reference)
        optimizer.step()
        plain.step()
    assert_same_weights(net, reference)
    assert not torch.equal(net.first.weight, Net().first.weight)


@scenario
def outputs_of_any_shape() -> None:
    """Among them an input, a parameter, a number and nothing at all."""

    class Many(Net):
        def forward(self, x: Any, *_: Any) -> Any:
            return {"y": super().forward(x), "x": [x, None, 3], "parameter": (self.last.bias,)}

    net, reference = Many(), Many()
    wrapped = DistributedDataParallel(net)
    for x, y in data(3):
        for each, part_x, part_y in ((wrapped, *part_of(x, y)), (reference, x, y)):
            out = each(part_x)
            ((out["y"] - part_y) ** 2).mean().add(out["parameter"][0].sum()).backward()
        assert_same_gradients(net, reference)
    assert not net.last.bias._backward_hooks


@scenario
def forward_without_backward() -> None:
    net, reference = Net(), Net()
    wrapped = DistributedDataParallel(net)
    for x, y in data(4):
        with torch.no_grad():
            wrapped(part_of(x, y)[0])
        with torch.inference_mode():
            wrapped(part_of(x, y)[0])
        wrapped(part_of(x, y)[0])  # dropped
        loss_of(wrapped, *part_of(x, y)).backward()
        loss_of(reference, x, y).backward()
        assert_same_gradients(net, reference)


def passes(net: Any, x: Any, y: Any, **options: Any) -> None:
    """A forward and a backward pass on this rank's part."""
    loss_of(net, *part_of(x, y), **options).backward()


@scenario
def what_fails_can_be_repeated() -> None:
    """An exception in forward, or in the middle of backward on all ranks or on one, and the next step is right."""

    class Failing(Net):
        fails_in: str | None = None

        def forward(self, x: Any, *_: Any) -> Any:
            if self.fails_in == "forward":
                raise OSError("forward")
            hidden = self.first(x).tanh()
            if self.fails_in == "backward":
                hidden.register_hook(fail)
            return self.last(self.optional(hidden))

    def fail(_: Any) -> None:
        raise OSError("backward")

    net, reference = Failing(), Failing()
    usual, reducer.BUCKET_BYTES = reducer.BUCKET_BYTES, 100  # some are in flight when it fails
    wrapped = DistributedDataParallel(net)
    for step, (x, y) in enumerate(data(12)):
        net.zero_grad()
        reference.zero_grad()
        net.fails_in = (None, "forward", "backward", "backward")[step % 4]
        if step % 4 == 3 and bps.rank() == 0:
            net.fails_in = None
        error, words = message_of(functools.partial(passes, wrapped, x, y))
        assert words == (net.fails_in or ""), (error, words)
        loss_of(reference, x, y).backward()
        if step % 4 == 0:
            assert_same_gradients(net, reference)
    net.fails_in = "backward"
    loss = loss_of(wrapped, *part_of(x, y))
    assert message_of(lambda: loss.backward(retain_graph=True))[0] == "OSError"
    error, words = message_of(loss.backward)
    assert (error, "synchronize()" in words) == (("RuntimeError", True) if bps.size() > 1 else ("OSError", False))
    wrapped.synchronize()
    reducer.BUCKET_BYTES = usual


@scenario
def looks_like_torchs_own() -> None:
    net = Net()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True, static_graph=False)
    assert wrapped.module is net
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    (x, y) = next(data(1))
    loss_of(wrapped, *part_of(x, y)).backward()
    saved = io.BytesIO()
    torch.save(wrapped, saved)
    saved.seek(0)
    for copied in (
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        torch.load(saved, weights_only=False),
    ):
        assert counted(functools.partial(passes, copied, x, y)) == 0
        with copied.no_sync():
            copied.synchronize()
        assert torch.equal(copied(x), net(x))


@scenario
def compressed() -> None:
    net, reference = Net(), Net()
    wrapped = DistributedDataParallel(net, compression=bps.Compression.bf16)
    for x, y in data(3):
        net.zero_grad()
        reference.zero_grad()
        loss_of(wrapped, *part_of(x, y)).backward()
        loss_of(reference, x, y).backward()
        assert_same_gradients(net, reference, 0.02)
    if bps.size() > 1:
        assert message_of(lambda: assert_same_gradients(net, reference))[0] == "AssertionError"


@scenario
def sparse_gradients() -> None:
    def make() -> Any:
        torch.manual_seed(5)
        return torch.nn.Embedding(11, 3, sparse=True).double()

    net, reference = make(), make()
    wrapped, index = DistributedDataParallel(net, sparse_as_dense=True), torch.arange(BATCH) % 5
    for _ in range(3):
        net.zero_grad()
        reference.zero_grad()
        with wrapped.no_sync():
            wrapped(*part_of(index)).square().mean().backward()
        wrapped(*part_of(index)).square().mean().backward()
        torch.nn.functional.embedding(index, reference.weight).square().mean().mul(2).backward()
        if bps.size() > 1:
            assert_same_gradients(net, reference)
    refusing = DistributedDataParallel(make())
    error, words = message_of(refusing(index).sum().backward)
    assert (error == "UnsupportedError" and "sparse_as_dense=True" in words) == (bps.size() > 1)


@scenario
def bad_arguments() -> None:
    net = Net()
    assert message_of(lambda: DistributedDataParallel(net, device_ids=[0]))[0] == "ValueError"
    assert message_of(lambda: DistributedDataParallel(sgd(net)))[0] == "TypeError"
    wrapped = DistributedDataParallel(net)
    for other in (lambda: DistributedDataParallel(net), lambda: bps.DistributedOptimizer(sgd(net))):
        error, words = message_of(other)
        assert error == "ValueError"
        assert "unwrap" in words
    assert wrapped.unwrap() is net
    wrapped(next(data(1))[0])
    bps.DistributedOptimizer(sgd(net)).unwrap()


@scenario
def nothing_is_leaked() -> None:
    net = Net()
    x, y = part_of(*next(data(1)))
    gc.collect()
    counts = []
    for turn in range(100 if bps.size() < 4 else 20):
        wrapped = DistributedDataParallel(net)
        loss_of(wrapped, x, y).backward()
        gone = weakref.ref(wrapped._reducer)
        if turn % 2:
            wrapped.unwrap()
        del wrapped
        assert gone() is None
        if turn in (21, 99):  # where this is done on few ranks
            gc.collect()
            counts.append(collections.Counter(type(thing).__name__ for thing in gc.get_objects()))
    grown: dict[str, int] = counts[-1] - counts[0] if counts else {}
    # The job remembers the names of its operations.
    grown = {kind: more for kind, more in grown.items() if more > 30 and kind not in ("Key", "list", "tuple")}
    assert not grown, grown
    assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


def run_scenarios() -> dict[str, str]:
    return outcomes(SCENARIOS)


WORKERS = [run_scenarios]


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, size: int) -> None:
    for results in results_of(run_scenarios, size):
        assert results[name] == "passed", results[name]


def early_end() -> list[tuple[str, str]]:
    """Rank 1 has fewer batches. Rank 0 is told in time, and goes on where it was when rank 1 has come."""
    net = Net()
    wrapped = DistributedDataParallel(net)
    said: list[tuple[str, str]] = []
    for step, (x, y) in enumerate(data(4)):
        if step == 3 and bps.rank() == 1:
            commlib.barrier(timeout=60)
        net.zero_grad()
        said.append(message_of(functools.partial(passes, wrapped, x, y)))
        if step == 3 and bps.rank() == 0:
            said.append(message_of(functools.partial(passes, wrapped, x, y)))
            commlib.barrier(timeout=60)
            for _ in range(50):  # the limit holds for both ranks, and this machine may be busy
                if message_of(wrapped.synchronize)[0] == "":
                    break
    reference = Net()
    loss_of(reference, x, y).backward()
    assert_same_gradients(net, reference)
    return said


def test_a_rank_that_stops_early() -> None:
    script = """
        from tests.launch import give
        from tests.torch.test_parallel import early_end
        import commlib
        commlib.init()
        give(early_end())
        commlib.shutdown()
    """
    waiting, missing = run_job(script, hosts=[2], env={"COMMLIB_OPERATION_TIMEOUT_S": "2"}, timeout=100)
    assert [error for error, _ in waiting] == ["", "", "", "OperationTimeout", "RuntimeError"]
    assert "synchronize()" in waiting[-1][1]
    assert [error for error, _ in missing] == [""] * 4
