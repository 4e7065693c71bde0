# SPDX-License-Identifier: Apache-2.0
"""torch's own parallel training on the backend "commlib": the weights of one process on the whole batch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch.test_distributed import results_of

STEPS = 10
BATCH = 16  # dealt to 2 and 4 ranks, and there in two pieces
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Net(torch.nn.Module):
    """Two layers, one that may be left out, and one that nobody uses."""

    def __init__(self, dtype: Any = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(7, 31, dtype=dtype)
        self.optional = torch.nn.Linear(31, 31, dtype=dtype)
        self.never = torch.nn.Linear(2, 2, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(31, dtype=dtype, momentum=None, track_running_stats=True).eval()
        self.last = torch.nn.Linear(31, 3, dtype=dtype)

    def forward(self, x: Any, with_optional: bool = True) -> Any:
        x = self.first(x).tanh()
        if with_optional:
            x = self.optional(x).tanh()
        return self.last(self.norm(x))


class Plain(torch.nn.Module):
    """Every parameter is used."""

    def __init__(self, dtype: Any = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(7, 64, dtype=dtype),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 33, dtype=dtype),
            torch.nn.Tanh(),
            torch.nn.Linear(33, 3, dtype=dtype),
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Words(torch.nn.Module):
    """With a table of which few rows are used in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = torch.nn.Embedding(50, 5, sparse=True, dtype=torch.float64)
        self.last = torch.nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.last(self.table((x[:, 0].abs() * 20).long().clamp(max=49)))


def batch(step: int, dtype: Any = torch.float64) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(BATCH, 7, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(BATCH, 3, generator=generator, dtype=torch.float64).to(dtype),
    )


def optimizers() -> list[str]:
    """Where there are more ranks than cores, not all."""
    return list(OPTIMIZERS)[: 2 if dist.get_world_size() == 2 else 1]


def mine(*tensors: Any) -> Any:
    return [tensor.tensor_split(dist.get_world_size())[dist.get_rank()] for tensor in tensors]


def loss_of(model: Any, x: Any, y: Any, **options: Any) -> Any:
    return ((model(x, **options) - y) ** 2).mean()


def alone(make: Callable[[], Any], optimizer: str, dtype: Any = torch.float64, **options: Any) -> Any:
    """What one process learns."""
    model = make()
    steps = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        steps.zero_grad()
        loss_of(model, *batch(step, dtype), **options).backward()
        steps.step()
    return model


def worst(weights: dict[str, Any], reference: Any) -> float:
    """The largest difference of a tensor, relative to the largest weight in it."""
    expected = reference.state_dict()
    assert weights.keys() == expected.keys()
    return max(
        ((weights[name] - value).abs().max() / value.abs().max().clamp(min=1e-30)).item()
        for name, value in expected.items()
        if value.is_floating_point()
    )


def assert_same_everywhere(weights: dict[str, Any]) -> None:
    flat = torch.cat([value.detach().flatten().double() for value in weights.values()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first)


def train(
    model: Any,
    optimizer: str,
    dtype: Any = torch.float64,
    micro: int = 1,
    chosen: Callable[[Any], Any] = lambda m: m.parameters(),
    **options: Any,
) -> None:
    steps = OPTIMIZERS[optimizer](chosen(model))
    for step in range(STEPS):
        steps.zero_grad()
        x, y = mine(*batch(step, dtype))
        pieces = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        for number, (piece_x, piece_y) in enumerate(pieces):
            last = number == len(pieces) - 1
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                (loss_of(model, piece_x, piece_y, **options) / micro).backward()
        steps.step()


# What the ranks do.


def data_parallel() -> dict[str, float]:
    """DistributedDataParallel in all its modes: the largest difference from one process."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    warnings.simplefilter("ignore")
    modes: dict[str, dict[str, Any]] = {
        "plain": {},
        "small buckets": {"bucket_cap_mb": 0.001},
        "views": {"gradient_as_bucket_view": True},
        "static graph": {"static_graph": True},
        "no buffers": {"broadcast_buffers": False},
    }
    found = {}
    for optimizer in optimizers():
        reference = alone(Plain, optimizer)
        for mode, settings in modes.items():
            for micro in (1,) if mode == "static graph" else (1, 2):  # torch itself fails at that with no_sync
                model = DistributedDataParallel(Plain(), **settings)
                train(model, optimizer, micro=micro)
                assert_same_everywhere(model.module.state_dict())
                found[f"{mode} {optimizer} {micro}"] = worst(model.module.state_dict(), reference)
    for with_optional in (True, False):
        model = DistributedDataParallel(Net(), find_unused_parameters=True)
        train(model, "sgd", with_optional=with_optional)
        reference = alone(Net, "sgd", with_optional=with_optional)
        found[f"unused {with_optional}"] = worst(model.module.state_dict(), reference)
    model = DistributedDataParallel(Words())
    train(model, "sgd")
    found["sparse"] = worst(model.module.state_dict(), alone(Words, "sgd"))

    single = DistributedDataParallel(Plain(torch.float32))
    train(single, "sgd", torch.float32)
    found["float32"] = worst(single.module.state_dict(), alone(lambda: Plain(torch.float32), "sgd", torch.float32))
    hooked = DistributedDataParallel(Plain(torch.float32))
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(hooked, "sgd", torch.float32)
    assert_same_everywhere(hooked.module.state_dict())
    found["fp16 hook"] = worst(hooked.module.state_dict(), alone(lambda: Plain(torch.float32), "sgd", torch.float32))
    explicit = DistributedDataParallel(Plain())
    explicit.register_comm_hook(None, default_hooks.allreduce_hook)
    train(explicit, "sgd")
    found["allreduce hook"] = worst(explicit.module.state_dict(), alone(Plain, "sgd"))
    power = DistributedDataParallel(Plain(torch.float32))
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    power.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(power, "sgd", torch.float32)
    assert_same_everywhere(power.module.state_dict())
    return found


def uneven_inputs() -> None:
    """Ranks with different numbers of batches, by torch's join."""
    model = DistributedDataParallel(Plain())
    steps = OPTIMIZERS["sgd"](model.parameters())
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            steps.zero_grad()
            loss_of(model, *mine(*batch(step))).backward()
            steps.step()
    assert_same_everywhere(model.module.state_dict())


def fully_sharded() -> dict[str, float]:
    """FSDP2 with and without resharding, and on a two-dimensional mesh."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    warnings.simplefilter("ignore")
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    meshes = {"flat": flat}
    if size % 2 == 0:
        meshes["hybrid"] = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for optimizer in optimizers():
        reference = alone(Plain, optimizer)
        for mesh_name, mesh in meshes.items():
            for reshard in (True, False):
                model = Plain()
                for layer in model.layers:
                    if isinstance(layer, torch.nn.Linear):
                        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
                fully_shard(model, mesh=mesh)
                train(model, optimizer)
                whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
                if dist.get_rank() == 0:
                    found[f"{mesh_name} {optimizer} {reshard}"] = worst(whole, reference)
    mixed = Plain(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(mixed, mesh=flat, mp_policy=policy)
    train(mixed, "sgd", torch.float32)
    whole = get_model_state_dict(mixed, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        found["mixed"] = worst(whole, alone(lambda: Plain(torch.float32), "sgd", torch.float32))
    return found


def distributed_tensors() -> None:
    """DTensor moves and multiplies as plain tensors do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        left, right = distribute_tensor(a, mesh, placements), distribute_tensor(b, mesh, [Shard(1)])
        assert torch.equal(left.full_tensor(), a)
        assert torch.allclose((left @ right.t()).full_tensor(), a @ b.t(), rtol=1e-13, atol=1e-13)
        assert torch.equal(left.redistribute(mesh, [Shard(1)]).full_tensor(), a)


WORKERS = [data_parallel, uneven_inputs, fully_sharded, distributed_tensors]

HOSTS = [(2,), (2, 2)]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_data_parallel_equals_one_process(hosts: tuple[int, ...]) -> None:
    for found in results_of(data_parallel, hosts):
        assert found.pop("float32") < 1e-5
        assert found.pop("fp16 hook") < 1e-2
        assert {mode: difference for mode, difference in found.items() if not difference < 1e-12} == {}
        assert len(found) == (22 if hosts == (2,) else 13)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_fully_sharded_equals_one_process(hosts: tuple[int, ...]) -> None:
    found = results_of(fully_sharded, hosts)[0]
    assert found.pop("mixed") < 0.05
    assert {mode: difference for mode, difference in found.items() if not difference < 1e-12} == {}
    assert len(found) == (8 if hosts == (2,) else 4)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("worker", [uneven_inputs, distributed_tensors])
def test_runs(worker: Callable[[], None], hosts: tuple[int, ...]) -> None:
    results_of(worker, hosts)
