# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say, and the number of processes does not change what they learn."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import REPOSITORY, Job
from tests.launchers import COMMLIB, TORCHRUN, Programs

pytest.importorskip("sklearn")


def last_lines(example: str, size: int, *args: str) -> dict[str, str]:
    """Run an example on `size` ranks; what rank 0 says in its last four lines, by what it is about."""
    with Job(REPOSITORY / "examples" / example, hosts=[size], args=args) as job:
        outcomes = job.wait(timeout=60)
    assert [outcome.status for outcome in outcomes] == [0] * size, "\n".join(map(str, outcomes))
    assert not any(outcome.stdout for outcome in outcomes[1:])
    lines = outcomes[0].stdout.splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    assert len(lines) == len(epochs) + 4
    said = dict(line.split(": ", 1) for line in lines[-4:])
    assert list(said) == ["loss", "test accuracy", "samples per second", "weights identical on all ranks"]
    assert said["weights identical on all ranks"] == "yes"
    first, last = map(float, re.findall(r"\d+\.\d+", said["loss"]))
    assert float(epochs[0].rpartition(" ")[2]) == first
    assert float(epochs[-1].rpartition(" ")[2]) == last
    assert float(said["samples per second"]) > 0
    return said


def assert_close(weights: dict[str, Any], reference: dict[str, Any]) -> None:
    assert weights.keys() == reference.keys()
    for key, value in weights.items():
        assert np.linalg.norm(value - reference[key]) <= 1e-5 * np.linalg.norm(reference[key]), key


@pytest.mark.parametrize("example", ["numpy_digits.py", "torch_digits.py", "torch_accumulation.py"])
def test_learns(example: str) -> None:
    if "torch" in example:
        pytest.importorskip("torch")
    said = last_lines(example, 2)
    first, last = map(float, re.findall(r"\d+\.\d+", said["loss"]))
    assert last < first / 10
    assert float(said["test accuracy"]) >= 0.95


def test_numpy_learns_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    # A batch of 50 cannot be dealt evenly to 4 ranks, and the last one of an epoch is smaller.
    for size in (1, 2, 4):
        last_lines("numpy_digits.py", size, "--epochs", "4", "--batch", "50", "--save", str(tmp_path / f"{size}.npz"))
    reference = dict(np.load(tmp_path / "1.npz"))
    for size in (2, 4):
        assert_close(dict(np.load(tmp_path / f"{size}.npz")), reference)


def test_torch_learns_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for size in (1, 3):
        last_lines("torch_digits.py", size, "--steps", "20", "--batch", "50", "--save", str(tmp_path / f"{size}.pt"))
    reference, weights = (
        {key: tensor.numpy() for key, tensor in torch.load(tmp_path / f"{size}.pt").items()} for size in (1, 3)
    )
    assert_close(weights, reference)


def test_steps_end_the_training() -> None:
    said = last_lines("numpy_digits.py", 1, "--steps", "30")
    assert float(said["test accuracy"]) < 1


@pytest.mark.soak
def test_accumulation_learns_the_same_in_any_number_of_passes_on_any_number_of_ranks(tmp_path: Path) -> None:
    # Batches of 100 in passes of 34, 34 and 32; the last of an epoch has 40 samples, in two passes instead of three.
    torch = pytest.importorskip("torch")
    for size, passes in ((1, 1), (3, 3)):
        options = ["--epochs", "2", "--batch", "100", "--passes", str(passes), "--save", str(tmp_path / f"{size}.pt")]
        last_lines("torch_accumulation.py", size, *options)
    reference, weights = (
        {key: tensor.numpy() for key, tensor in torch.load(tmp_path / f"{size}.pt").items()} for size in (1, 3)
    )
    assert_close(weights, reference)


def test_gradients_are_clipped() -> None:
    pytest.importorskip("torch")
    options = ["--epochs", "2", "--batch", "180", "--clip", "1e-9"]
    with Job(REPOSITORY / "examples/torch_accumulation.py", args=options) as job:
        (outcome,) = job.wait(timeout=60)
    assert outcome.status == 0, outcome
    assert re.findall(r"clipped +(\d+),", outcome.stdout) == ["8", "8"]
    first, last = map(float, re.findall(r"loss (\d\.\d+)$", outcome.stdout, re.MULTILINE))
    assert first == pytest.approx(last, abs=1e-3)  # gradients of almost nothing teach nothing


def launched(launcher: list[str], example: str, *args: str) -> str:
    """What an example writes when a launcher starts two processes of it."""
    with Programs() as programs:
        programs.start([*launcher, str(REPOSITORY / "examples" / example), *args])
        programs.wait()
        return programs.output()


LAUNCHERS = {
    "commlib run": [*COMMLIB, "run", "-n", "2", "--no-prefix", "--", sys.executable],
    "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize("launcher", ["commlib run", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_images_per_second(launcher: str) -> None:
    pytest.importorskip("torch")
    output = launched(LAUNCHERS[launcher], "torch_images_per_second.py", "--quick", "--compression", "bf16")
    speeds = re.findall(r"^(.*): ([\d.]+) images per second \(([\d.]+) to ([\d.]+)\)$", output, re.MULTILINE)
    assert [what for what, *_ in speeds] == ["one process", "2 processes"], output
    assert all(0 < float(least) <= float(middle) <= float(most) for _, middle, least, most in speeds)
    (ratio,) = re.findall(r"^speed-up: ([\d.]+) with 2 processes$", output, re.MULTILINE)
    assert float(ratio) == pytest.approx(float(speeds[1][1]) / float(speeds[0][1]), abs=0.01)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_accumulation_is_started_by(launcher: str) -> None:
    pytest.importorskip("torch")
    output = launched(LAUNCHERS[launcher], "torch_accumulation.py", "--epochs", "2")
    assert output.count("epoch ") == 2
    assert "weights identical on all ranks: yes" in output
