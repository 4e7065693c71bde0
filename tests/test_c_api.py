# SPDX-License-Identifier: Apache-2.0
"""The C API, through the example that is compiled against it as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commlib
from tests.launch import REPOSITORY, run_job

EXAMPLE = REPOSITORY / "examples" / "c_api"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules of the example, built there."""
    folder = tmp_path_factory.mktemp("c_api") / "c_api"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("build", "*.so", "histogram.c"))
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CFLAGS": "-std=c99 -Wall -Werror"},
        check=True,
        timeout=100,
    )
    return folder


def run(built: Path, body: str, size: int) -> list[Any]:
    script = f"""
import sys
sys.path.insert(0, {str(built)!r})
import commlib, numpy as np
from histogram import histogram
from norm import norm
from tests.launch import give
{body}
"""
    return run_job(script, hosts=[size], timeout=60)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_both_modules_see_all_ranks(built: Path, size: int) -> None:
    body = """
commlib.init()
values = np.random.default_rng(commlib.rank()).normal(size=1001 + commlib.rank())
give(([histogram(values, -3.0, 3.0, bins) for bins in (1, 7, 100)], norm(values)))
commlib.shutdown()
"""
    values = np.concatenate([np.random.default_rng(rank).normal(size=1001 + rank) for rank in range(size)])
    values_in_range = values[(values >= -3) & (values < 3)]
    for histograms, norm in run(built, body, size):
        for counts in histograms:
            # The parts' edges are rounded in another way than NumPy's, so the values next to one may be counted there.
            expected = np.histogram(values, len(counts), (-3, 3))[0]
            assert sum(counts) == len(values_in_range)
            assert np.abs(np.cumsum(counts) - np.cumsum(expected)).max() <= 1
        assert norm == pytest.approx(np.linalg.norm(values), rel=1e-14)


def test_errors_arrive_in_words(built: Path) -> None:
    body = """
def said(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
values = np.ones(3)
before = said(lambda: norm(values))
commlib.init()
mismatch = said(lambda: histogram(values, 0.0, 1.0, 2 + commlib.rank()))
after = histogram(values, 0.0, 2.0, 2)
commlib.shutdown()
give((before, mismatch, after, said(lambda: norm(values))))
"""
    for before, mismatch, after, shut_down in run(built, body, 2):
        assert "init" in before
        assert "histogram" in mismatch
        assert after == [0, 6]
        assert shut_down


def test_the_demo_runs(built: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(built)
        run_job(built / "demo.py", hosts=[2], timeout=60)


@pytest.mark.parametrize(
    "compiler", [["gcc", "-xc", "-std=c99"], ["gcc", "-xc", "-std=c17"], ["g++", "-xc++", "-std=c++11"]]
)
def test_the_header_is_clean(compiler: list[str], tmp_path: Path) -> None:
    source = tmp_path / "header"
    source.write_text("#include <Python.h>\n#include <commlib.h>\nint use(void) { return commlib_import(); }\n")
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    includes = ["-isystem", sysconfig.get_paths()["include"], "-I", commlib.get_include()]
    subprocess.run([*compiler, "-fsyntax-only", *warnings, *includes, str(source)], check=True, timeout=60)
