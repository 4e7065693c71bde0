# SPDX-License-Identifier: Apache-2.0
"""Every piece of Python in docs/torch.md runs on two ranks as it stands, and leaves them with the same weights."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commlib.torch as bps
from tests.launch import REPOSITORY, run_job, unused_port

SNIPPETS = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs/torch.md").read_text(), re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.soak  # each piece of the documentation, in jobs of its own


def build_model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def seen_by(snippet: str) -> dict[str, Any]:
    """What a snippet takes for given: each rank has data of its own, and all have the same weights."""
    torch.manual_seed(5)
    model, generator, discriminator = build_model(), torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    makes_its_own = ("DistributedOptimizer(", "DistributedDataParallel(", "CrossBarrier(", "init_process_group(")
    if not any(call in snippet for call in makes_its_own):
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    torch.manual_seed(bps.rank())
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    batches = list(zip(x.split(8), y.split(8), strict=True))
    loss_function = torch.nn.functional.cross_entropy
    return {
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "batches": batches,
        "bps": bps,
        "build_model": build_model,
        "config": {"rank": bps.rank()},
        "dataset": TensorDataset(x, y),
        "discriminator": discriminator,
        "generator": generator,
        "large_batches": [batches[:4], batches[4:]],
        "loss": loss_function(model(x), y),
        "loss_function": loss_function,
        "model": model,
        "optimizer": optimizer,
        "pairs_of_batches": [batches[:2], batches[2:4]],
        "real_batches": [torch.randn(8, 4) for _ in range(4)],
        "tensor": torch.randn(5),
        "torch": torch,
        "x": batches[0][0],
        "y": batches[0][1],
    }


def same_on_both(values: dict[str, Any]) -> bool:
    optimizer = values["optimizer"]
    if type(optimizer).__module__ == "commlib.torch.cross_barrier":
        optimizer.synchronize()
    weights = [param for name in ("model", "generator", "discriminator") for param in values[name].parameters()]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    return torch.equal(flat, bps.broadcast(flat, 0))


def run_all() -> list[str]:
    """Run every snippet in names of its own; what went wrong, or nothing, for each."""
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend="eager")  # the same but for the time it takes
    said = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, snippet in enumerate(SNIPPETS):
            bps.init()
            values = seen_by(snippet)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    exec(compile(snippet, f"snippet {number}", "exec"), values)
                said.append("" if same_on_both(values) else "weights differ")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            bps.shutdown()
    return said


SCRIPT = """
    from tests.launch import give
    from tests.torch.test_docs import run_all
    give(run_all())
"""


@pytest.fixture(scope="module")
def outcomes() -> list[list[str]]:
    port = str(unused_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    results: list[list[str]] = run_job(
        SCRIPT, hosts=[2], timeout=90, rank_env={rank: {**place, "RANK": str(rank)} for rank in range(2)}
    )
    return results


@pytest.mark.parametrize("number", range(len(SNIPPETS)), ids=lambda number: SNIPPETS[number].splitlines()[0][:40])
def test_snippet(number: int, outcomes: list[list[str]]) -> None:
    assert [said[number] for said in outcomes] == ["", ""], f"\n{SNIPPETS[number]}"
