# SPDX-License-Identifier: Apache-2.0
"""The examples of the torch.distributed backend, under every launcher, and the ways to form a group."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from tests.launch import REPOSITORY, environment, run_job, unused_port

RUN = [sys.executable, "-m", "commlib.cli", "run", "-n", "2", "--", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]

pytestmark = pytest.mark.soak


def output_of(command: list[str]) -> str:
    env = environment({"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COMMLIB_SECRET": "of this test"})
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+: loss (\d+\.\d+)", text)]


@pytest.mark.parametrize(
    ("launcher", "example", "options"),
    [("commlib run", "torch_fsdp2.py", []), ("torchrun", "torch_ddp_backend.py", ["--fp16"])],
)
def test_examples_learn(launcher: str, example: str, options: list[str]) -> None:
    started = RUN if launcher == "commlib run" else [*TORCHRUN, "--master-port", str(unused_port())]
    text = output_of([*started, str(REPOSITORY / "examples" / example), *options])
    found = losses(text)
    assert len(found) == 5, text
    assert found[-1] < found[0] / 5, text
    assert float(re.findall(r"test accuracy: (\d\.\d+)", text)[0]) > 0.85, text


def test_other_ways_to_meet(tmp_path: Path) -> None:
    # Without a launcher of torch: by commlib's own variables on two hosts; then by a file, ranks the other way round.
    script = f"""
        import torch
        import torch.distributed as dist
        import commlib.torch.distributed
        from tests.launch import give
        import commlib

        dist.init_process_group("commlib")
        assert dist.get_rank() == commlib.rank()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        found = [tensor[0].item()]
        dist.destroy_process_group()
        dist.init_process_group(
            "commlib", init_method="file://{tmp_path}/store", rank=2 - commlib.rank(), world_size=3
        )
        tensor = torch.full((3,), float(dist.get_rank()))
        dist.broadcast(tensor, 2)
        objects = [None] * 3
        dist.all_gather_object(objects, commlib.rank())
        found += [tensor[0].item(), objects]
        dist.destroy_process_group()
        assert commlib.push_pull(torch.ones(1), op=commlib.Sum).item() == 3
        give(found)
    """
    assert run_job(script, hosts=[1, 2], timeout=40) == [[3.0, 2.0, [2, 1, 0]]] * 3
