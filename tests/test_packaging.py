# SPDX-License-Identifier: Apache-2.0
"""What `make wheel` makes can be installed and used by somebody who has nothing else of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

USE = """
import pathlib, sys
import numpy as np, commlib
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
assert "site-packages" in commlib.__file__, commlib.__file__
assert (pathlib.Path(commlib.get_include()) / "commlib.h").is_file()
commlib.init()
assert (commlib.push_pull(np.full(9, commlib.rank() + 1.0), op=commlib.Sum) == 3).all()
"""


def execute(*argv: object, **options: object) -> str:
    done = subprocess.run(
        [str(part) for part in argv], text=True, capture_output=True, timeout=1200, check=False, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, made from this tree, and a wheel, made from the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    execute(sys.executable, "-m", "build", "--outdir", out, REPOSITORY)
    return out


def test_source_distribution_has_what_a_build_and_its_tests_need(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = execute(
        "git", "-C", REPOSITORY, "ls-files", "src", "commlib", "tests", "docs", "examples", "benchmarks"
    ).split()
    assert [name for name in tracked if name not in names] == []
    assert {"LICENSE", "Makefile", "constraints.txt", "pyproject.toml", "setup.py", "tools/system_packages"} <= names
    assert not [name for name in names if name.endswith((".so", ".o"))]


def test_wheel_is_one_for_all_pythons(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert "-cp311-abi3-linux_" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"commlib/_core.abi3.so", "commlib/_core.pyi", "commlib/py.typed", "commlib/include/commlib.h"} <= names
    assert not [name for name in names if name.startswith(("tests", "src", "examples"))]


def test_wheel_works_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    execute(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    execute(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    commlib = tmp_path / "venv/bin/commlib"
    execute(commlib, "run", "-n", "2", "--", python, "-c", USE, cwd=tmp_path, env=env)
    execute(commlib, "doctor", cwd=tmp_path, env=env)
