# SPDX-License-Identifier: Apache-2.0
"""All ranks start from what the root has: parameters, optimizers of every kind, objects; or all hear why not."""

from __future__ import annotations

import copy
import inspect
from collections import namedtuple
from functools import partial
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

import commlib.torch as bps
from commlib.torch import ops
from tests.torch import message_of, results_of

SIZES = [1, 3]
BEFORE, AFTER = 3, 3  # steps

OPTIMIZERS: dict[str, Any] = {
    name: value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
}
# Beside the defaults, which are all tried.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "lr": torch.tensor(0.01)}),
    ("Adam", {"amsgrad": True, "foreach": True}),
    ("Adam", {"fused": True, "lr": torch.tensor(0.01)}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("LBFGS", {"line_search_fn": "strong_wolfe", "history_size": 2}),
    ("NAdam", {"decoupled_weight_decay": True, "foreach": False}),
]


def root() -> int:
    return bps.size() - 1


def bits(value: Any) -> Any:
    """Something that is equal exactly when all tensors in it have the same dtypes, shapes and bits."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().resolve_conj().resolve_neg().contiguous()
        return str(value.dtype), tuple(value.shape), dense.view(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(entry) for entry in value]
    return value


def layers(seed: int, kind: str, dtype: Any) -> Any:
    """Matrices alone, which is what Muon takes; with sparse gradients where the optimizer wants them."""
    torch.manual_seed(seed)
    if kind == "SparseAdam":
        return torch.nn.ModuleList([torch.nn.Embedding(7, 3, sparse=True), torch.nn.Embedding(7, 3, sparse=True)])
    return torch.nn.ModuleList([torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3, bias=False)]).to(dtype)


def optimizer_of(net: Any, kind: str, options: dict[str, Any]) -> Any:
    options = copy.deepcopy(options)
    if kind in ("LBFGS", "SparseAdam"):  # take one group alone
        return OPTIMIZERS[kind](list(net.parameters()), **options)
    first, second = net.parameters()
    return OPTIMIZERS[kind]([{"params": [first]}, {"params": [second], "weight_decay": 0.125}], **options)


def loss_of(net: Any, generator: Any) -> Any:
    if isinstance(net[0], torch.nn.Embedding):
        index = torch.randint(0, 7, (4,), generator=generator)
        return (net[0](index) * net[1](index)).square().sum()
    x = torch.randn(6, 5, generator=generator).to(net[0].weight.dtype)
    return net[1](net[0](x).tanh()).square().mean()


def train(net: Any, optimizer: Any, steps: range) -> None:
    for step in steps:

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, torch.Generator().manual_seed(step))
            loss.backward()
            return loss

        optimizer.step(closure)


def go_on(kind: str, options: dict[str, Any], dtype: Any) -> None:
    """Some steps on the root alone; from there on, all ranks do what one process does that has taken all steps."""
    rank = bps.rank()
    net = layers(rank, kind, dtype)
    optimizer = optimizer_of(net, kind, options)
    if rank == root():
        train(net, optimizer, range(BEFORE))
        optimizer.param_groups[-1]["extra"] = {"who": ["the root", None, (1, 2.5)]}
    elif rank % 2:
        # Others have state as well, and options that the root has not.
        train(net, optimizer, range(100, 101))
        optimizer.param_groups[0]["lr"] = 123.0
        optimizer.param_groups[0]["mine"] = "alone"
    bps.broadcast_parameters(net.state_dict(), root())
    bps.broadcast_optimizer_state(optimizer, root())

    reference = layers(root(), kind, dtype)
    plain = optimizer_of(reference, kind, options)
    train(reference, plain, range(BEFORE))
    plain.param_groups[-1]["extra"] = {"who": ["the root", None, (1, 2.5)]}
    assert bits(optimizer.state_dict()) == bits(plain.state_dict())
    strides = [
        [t.stride() for t in entry.values() if isinstance(t, torch.Tensor)]
        for o in (optimizer, plain)
        for entry in o.state.values()
    ]
    assert strides[: len(strides) // 2] == strides[len(strides) // 2 :]
    train(net, optimizer, range(BEFORE, BEFORE + AFTER))
    train(reference, plain, range(BEFORE, BEFORE + AFTER))
    assert bits(list(net.parameters())) == bits(list(reference.parameters()))
    assert bits(optimizer.state_dict()) == bits(plain.state_dict())


def optimizers() -> int:
    cases: list[tuple[str, dict[str, Any], Any]]
    cases = [(kind, {}, dtype) for kind in OPTIMIZERS for dtype in (torch.float32, torch.bfloat16)]
    cases += [(kind, options, torch.float64) for kind, options in VARIANTS]
    for kind, options, dtype in cases:
        if kind == "SparseAdam" and dtype is torch.bfloat16:
            continue
        try:
            go_on(kind, options, dtype)
        except Exception as error:
            raise AssertionError(f"{kind} with {options} in {dtype}") from error
    return len(cases)


def option_objects() -> dict[str, bool]:
    """Tensors among the options are the same objects afterwards, with the root's values."""
    rank = bps.rank()
    a, b = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3))
    rate, other, beta = torch.tensor(0.1 + rank), torch.tensor(5.0 + rank), torch.tensor(0.5 + rank / 100)
    group = {"params": [b], "lr": torch.tensor(0.25 + rank)}
    if rank == root():
        groups = [{"params": [a], "lr": rate, "betas": (beta, 0.75)}, {**group, "again": rate}]
    else:
        # Here one tensor stands for two of the root's, and one is where the root has none.
        groups = [{"params": [a], "lr": rate, "betas": (beta, 0.75)}, {**group, "lr": rate, "again": other}]
    optimizer = torch.optim.Adam(groups, foreach=False)
    optimizer.param_groups[0]["amsgrad"] = rank == root()
    optimizer.param_groups[1]["wide"] = torch.arange(3) + rank if rank == root() else None
    optimizer.param_groups[0]["widening"] = torch.tensor(1.0, dtype=torch.float64 if rank == root() else torch.float32)
    bps.broadcast_optimizer_state(optimizer, root())
    first, second = optimizer.param_groups
    return {
        "same": first["lr"] is rate and first["betas"][0] is beta,
        "value": rate.item() == torch.tensor(0.1 + root()).item(),
        "in a tuple": beta.item() == torch.tensor(0.5 + root() / 100).item() and first["betas"][1] == 0.75,
        "apart": second["lr"] is not rate and second["lr"].item() == 0.25 + root(),
        "together": second["again"] is rate,
        "plain": first["amsgrad"] is True,
        "new": second["wide"].tolist() == [root(), 1 + root(), 2 + root()],
        "not cast": first["widening"].dtype is torch.float64,
    }


Pair = namedtuple("Pair", "left right")


class Unusual(torch.optim.Optimizer):
    """Keeps all sorts of things, under all sorts of keys."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "schedule": [1, 2]})

    def fill(self) -> None:
        a, b = (group["params"][0] for group in self.param_groups)
        shared = torch.arange(4.0)
        self.state[a] = {
            "nested": [None, {"deep": (shared, "text")}, Pair(shared, 3)],
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "expanded": torch.ones(1).expand(3),
            "imaginary": torch.tensor([1 + 2j]).conj(),
            "byte": torch.tensor([1, 0], dtype=torch.bool),
            "float8": torch.ones(3).to(torch.float8_e5m2),
            "nothing": torch.zeros(0, 3),
            "large": torch.arange(400_000.0),
            "partner": b,
            "leaf": torch.ones(2, requires_grad=True),
            "derived": torch.ones(2, requires_grad=True) * 2,
        }
        self.state["global"] = {"count": 7, "nan": torch.tensor([float("nan"), -0.0])}
        self.state[torch.nn.Parameter(torch.ones(1))] = {"of nobody": 1}


def unusual_state() -> dict[str, bool]:
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer, plain = (Unusual([{"params": [a]}, {"params": [b]}]) for _ in range(2))
    plain.fill()
    if bps.rank() == root():
        optimizer.fill()
    else:
        optimizer.state[b] = {"only here": torch.ones(3)}
    table = optimizer.state
    bps.broadcast_optimizer_state(optimizer, root())
    mine, wanted = optimizer.state[a], plain.state[a]
    keys = set(optimizer.state)
    return {
        "keys": {a, "global"} <= keys and b not in keys and len(keys) == (3 if bps.rank() == root() else 2),
        "bits": bits(mine) == bits(wanted) and bits(table["global"]) == bits(plain.state["global"]),
        "same table": optimizer.state is table,
        "classes": type(mine["nested"][2]) is Pair,
        "shared": mine["nested"][1]["deep"][0] is mine["nested"][2].left,
        "own parameter": mine["partner"] is b,
        "order": mine["transposed"].stride() == (1, 3),
        "gradients": mine["leaf"].requires_grad and mine["leaf"].is_leaf,
    }


def wrapped() -> dict[str, bool]:
    """The wrapper on some ranks, what it wraps on others; training then goes on through the wrapper."""
    torch.manual_seed(bps.rank())
    net = torch.nn.Linear(3, 2)
    plain = torch.optim.Adam(net.parameters(), lr=0.1 * (1 + bps.rank()))
    if bps.rank() == root():
        net(torch.ones(1, 3)).sum().backward()
        plain.step()
        plain.zero_grad()
    optimizer = bps.DistributedOptimizer(plain, net.named_parameters())
    bps.broadcast_parameters(net.named_parameters(), root())
    bps.broadcast_optimizer_state(optimizer if bps.rank() != 1 else plain, root())
    x = torch.arange(3.0) + bps.rank()
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    everything = [*net.parameters(), *(t for entry in plain.state.values() for t in entry.values())]
    same = all(bits(bps.broadcast(tensor.detach(), root())) == bits(tensor) for tensor in everything)
    return {
        "same": same,
        "steps": all(entry["step"].item() == 3 for entry in plain.state.values()),
        "rate": plain.param_groups[0]["lr"] == 0.1 * (1 + root()),
    }


def parameters() -> dict[str, Any]:
    rank = bps.rank()

    def state(rank: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(rank)

        def random(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator)

        layout = torch.channels_last if rank % 2 else torch.contiguous_format
        tied = torch.nn.Parameter(random(5))
        tensors = {
            "conv": torch.nn.Parameter(random(4, 3, 2, 2).to(memory_format=layout)),
            "large": torch.nn.Parameter(random(600, 900)),
            "large and strided": random(800, 700).t() if rank % 2 else random(700, 800),
            "tied": tied,
            "also tied": tied.detach(),
            "none": None,
            "scalar": torch.tensor(rank),
            "nothing": torch.zeros(0, 3),
            "flags": random(7) > 0,
            "half": random(3, 3).bfloat16(),
            "float8": random(9).to(torch.float8_e4m3fn),
            "complex": torch.complex(random(3), random(3)).conj(),
            "part": random(6, 6)[1:4, ::2],
            "odd bits": torch.tensor([0x7FC00000 + rank, -(2**31)], dtype=torch.int32).view(torch.float32),
        }
        if rank % 2:
            tensors = dict(reversed(tensors.items()))  # the order of a mapping does not matter
        return tensors

    mine, theirs = state(rank), state(root())
    kept = dict(mine)
    strides = {name: tensor.stride() for name, tensor in mine.items() if tensor is not None}
    saved = mine["half"].float().requires_grad_()
    stale = saved.exp()
    mine["stale"], theirs["stale"] = stale.detach(), state(root())["half"].float().exp()
    started: list[Any] = []
    start = ops.start_broadcast

    def count(*args: Any) -> Any:
        started.append(args)
        return start(*args)

    with mock.patch.object(ops, "start_broadcast", count):
        bps.broadcast_parameters(mine, root())
    listed = [torch.full((3,), float(rank)), torch.nn.Parameter(torch.full((2,), rank, dtype=torch.float16))]
    bps.broadcast_parameters(listed, root_rank=root(), prefix="listed.")
    twice = torch.full((4,), rank)
    bps.broadcast_parameters((pair for pair in [("a", twice), ("b", twice)]), root())
    bps.broadcast_parameters({}, root())
    return {
        "bits": bits(mine) == bits(theirs),
        "same objects": all(mine[name] is tensor for name, tensor in kept.items()),
        "layouts": all(mine[name].stride() == stride for name, stride in strides.items()),
        "tie": mine["tied"].data_ptr() == mine["also tied"].data_ptr(),
        "leaf": mine["conv"].is_leaf and mine["conv"].requires_grad,
        "stale": message_of(stale.sum().backward),
        "operations": len(started) == (3 if bps.size() > 1 else 0),
        "listed": listed[0].tolist() == [root()] * 3 and listed[1].tolist() == [root()] * 2,
        "pairs": twice.tolist() == [root()] * 4,
        "module": same_module(),
    }


def same_module() -> bool:
    def net(seed: int) -> Any:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(3, 2).bfloat16())
        net[1].running_mean.fill_(seed)
        net[1].num_batches_tracked.fill_(seed)
        return net

    mine = net(bps.rank())
    bps.broadcast_parameters(mine.state_dict(), root())
    return bits(mine.state_dict()) == bits(net(root()).state_dict())


def refuse() -> dict[str, Any]:
    """One rank differs from the others; all hear of it, nothing is changed, and the next call works."""
    differs = bps.rank() == 1
    ones = torch.full((3,), float(bps.rank()))
    shared = torch.zeros(1).expand(3)

    def params(**others: Any) -> None:
        bps.broadcast_parameters({"a": ones, "b": torch.zeros(2)} | (others if differs else {}), 0)

    def named(*pairs: Any) -> None:
        bps.broadcast_parameters(list(pairs) if differs else [("a", ones), ("b", torch.zeros(2))], 0)

    def state(make: Any, other: Any) -> None:
        bps.broadcast_optimizer_state((other if differs else make)(), 0)

    def sgd(*shapes: tuple[int, ...], dtype: Any = None) -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes], lr=1.0)

    def two_groups() -> Any:
        return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(3))]} for _ in range(2)], lr=1.0)

    def unpicklable() -> Any:
        optimizer = sgd((3,))
        optimizer.state["global"] = {"function": lambda: 1}
        return optimizer

    def unsendable() -> Any:
        optimizer = sgd((3,))
        optimizer.state["global"] = {"tensor": torch.ones(3, device="meta")}
        return optimizer

    usual = partial(sgd, (3,), (2, 2))
    cases: dict[str, Any] = {
        "shape": lambda: params(b=torch.zeros(3)),
        "dtype": lambda: params(b=torch.zeros(2, dtype=torch.float64)),
        "more": lambda: params(c=torch.zeros(2)),
        "less": lambda: params(b=None),
        "name": lambda: named(("a", ones), ("x", torch.zeros(2))),
        "order": lambda: named(("b", torch.zeros(2)), ("a", ones)),
        "tie": lambda: named(("a", ones), ("a2", ones)),
        "root": lambda: bps.broadcast_parameters([ones], 1 if differs else 0),
        "object": lambda: params(b={"not": "a tensor"}),
        "twice": lambda: named(("a", ones), ("a", ones)),
        "meta": lambda: params(b=torch.zeros(2, device="meta")),
        "shared": lambda: params(b=shared),
        "no root": lambda: bps.broadcast_parameters([ones], bps.size()),
        "no optimizer": lambda: state(usual, object),
        "number": lambda: state(usual, partial(sgd, (3,))),
        "shape of a parameter": lambda: state(usual, partial(sgd, (3,), (4,))),
        "dtype of a parameter": lambda: state(usual, partial(sgd, (3,), (2, 2), dtype=torch.float64)),
        "groups": lambda: state(partial(sgd, (3,), (3,)), two_groups),
        "class": lambda: state(usual, lambda: torch.optim.Adam(usual().param_groups)),
        "unpicklable": lambda: bps.broadcast_optimizer_state(unpicklable(), 1),
        "unsendable": lambda: bps.broadcast_optimizer_state(unsendable(), 1),
        "object that cannot be sent": lambda: bps.broadcast_object((lambda: 1) if differs else None, 1, "object"),
    }
    results: dict[str, Any] = {}
    for case, call in cases.items():
        results[case] = message_of(call)
        if (
            ones.tolist() != [bps.rank()] * 3
            or bps.push_pull(torch.ones(3), average=False).tolist() != [bps.size()] * 3
        ):
            results[case] = ("changed", "")
    fine = [ones.clone()]
    bps.broadcast_parameters(fine, 0)
    results["in the end"] = fine[0].tolist() == [0] * 3
    return results


def objects() -> dict[str, bool]:
    rank = bps.rank()

    def values(rank: int) -> list[Any]:
        return [
            {"rank": rank},
            "x" * (1 + 100_000 * rank),
            None,
            list(range(10 * rank)),
            b"",
            Pair(1, torch.ones(rank)),
        ]

    received = [bps.broadcast_object(value, root(), name="object") for value in values(rank)]
    received += [bps.broadcast_object(value, root()) for value in values(rank)]
    mine = ["the root keeps its own"]
    return {
        "values": bits(received) == bits(values(root()) * 2),
        "default root": bps.broadcast_object(rank) == 0,
        "own": (bps.broadcast_object(mine, root()) is mine) == (rank == root()),
    }


WORKERS = [optimizers, option_objects, unusual_state, wrapped, parameters, refuse, objects]


@pytest.mark.parametrize("size", SIZES)
def test_every_optimizer_goes_on_as_the_one_of_the_root(size: int) -> None:
    assert {"LBFGS", "Adam", "SGD"} <= set(OPTIMIZERS)
    assert len(set(results_of(optimizers, size))) == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("worker", [option_objects, unusual_state, wrapped, objects])
def test_on_all_ranks(worker: Any, size: int) -> None:
    for results in results_of(worker, size):
        assert all(results.values()), results


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_the_same_bits(size: int) -> None:
    for results in results_of(parameters, size):
        stale = results.pop("stale")
        assert "modified by an inplace operation" in stale[1]
        assert all(results.values()), results


def test_all_ranks_hear_why_not() -> None:
    ranks = results_of(refuse, 3)
    words = {
        "shape": "b: float32 of shape (3,)",
        "dtype": "float64",
        "more": "c: float32",
        "less": "missing",
        "name": "x: ",
        "order": "b: ",
        "tie": "the same as a",
        "root": "root_rank: 1",
        "object": "'b' is a dict",
        "twice": "'a' occurs twice",
        "meta": "meta",
        "shared": "expanded",
        "no optimizer": "expected a torch.optim.Optimizer",
        "number": "1 parameters",
        "shape of a parameter": "parameter 1 of group 0: float32 of shape (4,)",
        "dtype of a parameter": "float64",
        "groups": "1 parameters",
        "class": "Adam",
        "unpicklable": "lambda",
        "unsendable": "meta",
    }
    own = {
        "object": "UnsupportedError",
        "twice": "ValueError",
        "meta": "UnsupportedError",
        "shared": "UnsupportedError",
    }
    own |= {"no optimizer": "TypeError", "unsendable": "UnsupportedError"}
    for rank, results in enumerate(ranks):
        assert results["in the end"], rank
        assert results["no root"][0] == "ValueError", results["no root"]
        assert results["object that cannot be sent"][0] not in ("", "changed")
        for case, word in words.items():
            error, text = results[case]
            assert word in text, (rank, case, error, text)
            if case == "unpicklable":
                assert error not in ("", "changed"), (rank, error)
            elif case == "unsendable":
                assert error == ("UnsupportedError" if rank == 1 else "CommlibError"), (rank, error)
            else:
                assert error == (own.get(case, "MismatchError") if rank == 1 else "MismatchError"), (rank, case, error)
                assert "rank 1" in text or rank == 1, (rank, case, text)
