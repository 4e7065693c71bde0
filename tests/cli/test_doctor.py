# SPDX-License-Identifier: Apache-2.0
"""`commlib doctor` says what is so, and what is not."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from commlib.cli import doctor, probes
from tests.cli.command import COMMLIB, environment, run


def findings(**changes: str) -> dict[str, list[tuple[str, str]]]:
    """Verdict and words by name."""
    done = run("doctor", "--json", env=environment(**changes))
    assert done.returncode in (0, 1), done.stderr
    by_name: dict[str, list[tuple[str, str]]] = {}
    for finding in json.loads(done.stdout):
        by_name.setdefault(finding["name"], []).append((finding["verdict"], finding["words"]))
    assert done.returncode == (1 if "missing" in {v for found in by_name.values() for v, _ in found} else 0)
    return by_name


def test_what_a_person_sees() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stderr == b""
    assert done.stdout.decode().rstrip().endswith("commlib works here.")


def test_versions_and_absent_frameworks() -> None:
    found = findings()
    assert found["NumPy"] == [("good", importlib.metadata.version("numpy"))]
    assert found["commlib"][0][1].startswith(importlib.metadata.version("commlib"))
    for name, distribution in {"PyTorch": "torch", "Keras": "keras"}.items():
        try:
            expected = ("good", importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            expected = ("absent", "not installed")
        assert found[name] == [expected]


def test_no_framework_is_imported() -> None:
    script = "import sys; from commlib.cli.doctor import examine; examine(); print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, timeout=60, check=True
    )
    assert not {"torch", "tensorflow", "keras"} & set(done.stdout.decode().split())


def test_every_probe_agrees_with_the_kernel_here() -> None:
    assert [getattr(probes, name)() for name in ("memfd", "abstract_sockets", "shared_futex", "pidfd")] == [None] * 4


def test_memory_of_others_cannot_be_read_where_it_is_forbidden() -> None:
    """Without CAP_SYS_PTRACE, a process that is not dumpable is closed even to its own user."""
    script = """
import ctypes
from commlib.cli import probes
ctypes.CDLL(None).prctl(24, 19)  # PR_CAPBSET_DROP, CAP_SYS_PTRACE: gone at the next exec
probes._OWNER = "import ctypes; ctypes.CDLL(None).prctl(4, 0)" + probes._OWNER  # PR_SET_DUMPABLE
print(probes.other_memory())
"""
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, env=environment(), capture_output=True, timeout=60, check=False)
    assert done.stdout.decode() == "Operation not permitted (EPERM)\n", done.stderr


def test_an_essential_thing_that_is_missing_shows_in_the_status() -> None:
    script = """
import errno, os
def refuse(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
os.memfd_create = refuse
from commlib.cli import main
main(["doctor"])
"""
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, env=environment(COLUMNS="200"), capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "does not work: Function not implemented (ENOSYS)" in done.stdout.decode()
    assert "commlib cannot work here: memfd" in done.stdout.decode()


def test_a_limit_of_the_address_space_is_told() -> None:
    argv = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", *COMMLIB, "doctor", "--json"]
    done = subprocess.run(argv, env=environment(), capture_output=True, timeout=60, check=False)
    limits = [f for f in json.loads(done.stdout) if f["name"] == "limits"]
    assert limits[0]["verdict"] == "limited"
    assert "address space limited to 4096000000" in limits[0]["words"]


def test_the_secret(tmp_path: Path) -> None:
    assert "will be made" in findings(HOME=str(tmp_path))["job secret"][0][1]
    secret = tmp_path / ".commlib/secret"
    secret.parent.mkdir()
    secret.write_text("s")
    secret.chmod(0o644)
    verdict, words = findings(HOME=str(tmp_path))["job secret"][0]
    assert verdict == "missing"
    assert "mode 644" in words
    secret.chmod(0o600)
    assert findings(HOME=str(tmp_path))["job secret"][0][0] == "good"
    assert findings(HOME=str(tmp_path), COMMLIB_SECRET="x")["job secret"][0] == ("good", "taken from COMMLIB_SECRET")


def test_the_port_of_the_scheduler() -> None:
    place = {"COMMLIB_RANK": "0", "COMMLIB_SIZE": "2", "COMMLIB_LOCAL_RANK": "0", "COMMLIB_LOCAL_SIZE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        verdict, words = findings(COMMLIB_SCHEDULER=address, **place)["scheduler"][0]
        assert verdict == "limited"
        assert f"{address} is taken" in words
    assert findings(COMMLIB_SCHEDULER=address, **place)["scheduler"][0] == ("good", f"{address} is free")
    assert "another host" in findings(COMMLIB_SCHEDULER="192.0.2.1:5555", **place)["scheduler"][0][1]
    incomplete = findings(COMMLIB_RANK="0", COMMLIB_SIZE="2")["scheduler"][0]
    assert incomplete[0] == "limited"
    assert "COMMLIB_LOCAL_RANK" in incomplete[1]


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def faint() -> NoReturn:
        raise ValueError("no such file")

    checks: dict[str, Callable[[], doctor._Results]] = {"thing": faint}
    monkeypatch.setattr(doctor, "_AREAS", {"area": checks})
    words = "could not be looked at: ValueError: no such file"
    assert doctor.examine() == [doctor.Finding("area", "thing", "limited", words)]
