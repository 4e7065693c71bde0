# SPDX-License-Identifier: Apache-2.0
"""`commlib.run`: a function in several processes. What the function does here needs no communication."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from commlib.errors import CommlibError, ConfigError
from commlib.launch.function import run_function
from tests.launch import REPOSITORY, leftovers


def place(*args: Any) -> tuple[Any, ...]:
    return (*(os.environ[f"COMMLIB_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), *args)


def variable(name: str) -> str | None:
    return os.environ.get(name)


class RefusedError(ValueError):
    """Cannot be made from its message alone, as the errors of many libraries."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")


def fail_on(rank: int, how: str) -> int:
    mine = int(os.environ["COMMLIB_RANK"])
    if mine == rank:
        if how == "raise":
            raise ZeroDivisionError("as asked")
        if how == "refuse":
            raise RefusedError(mine, "as asked")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
        if how == "vanish":
            os._exit(0)
    return mine


def fail_in_turn(first: int, folder: str) -> None:
    """Rank `first` fails, then the other one, which ends; then the first one ends."""
    failed, ended = f"{folder}/failed", f"{folder}/ended"
    if os.environ["COMMLIB_RANK"] == str(first):

        def wait_for_the_other() -> None:
            os.close(os.open(failed, os.O_WRONLY))
            os.read(os.open(ended, os.O_RDONLY), 1)

        atexit.register(wait_for_the_other)
        raise KeyError("first")
    os.read(os.open(failed, os.O_RDONLY), 1)
    os.open(ended, os.O_WRONLY)  # closed by the end of the process
    raise ValueError("because of the first")


def unpicklable() -> Any:
    return threading.Lock()


def hang() -> None:
    subprocess.Popen(["sleep", "1000"])
    os.write(1, b"ready\n")  # in one piece: the processes share it
    threading.Event().wait()


def test_results_come_by_rank() -> None:
    assert run_function(place, ("x", [1]), np=3) == [(str(r), "3", str(r), "3", "x", [1]) for r in range(3)]


def test_environment_can_be_added() -> None:
    assert run_function(variable, ("GREETING",), np=2, env={"GREETING": "hello"}) == ["hello"] * 2


def test_local_functions_work() -> None:
    factor = 7
    assert run_function(lambda x: int(os.environ["COMMLIB_RANK"]) * factor + x, (1,), np=3) == [1, 8, 15]


def test_an_error_is_raised_here_and_names_its_rank() -> None:
    with pytest.raises(ZeroDivisionError, match="as asked") as raised:
        run_function(fail_on, (1, "raise"), np=2)
    (note,) = raised.value.__notes__
    assert note.startswith("raised on rank 1 of 2:\nTraceback")
    assert "in fail_on" in note


def test_an_error_that_cannot_be_made_again_is_told() -> None:
    with pytest.raises(CommlibError, match="RefusedError: rank 0: as asked") as raised:
        run_function(fail_on, (0, "refuse"), np=2)
    assert "raised on rank 0" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("die", "rank 1 was ended by SIGKILL and left no result"),
        ("exit", "rank 1 ended with status 3 and left no result"),
        ("vanish", "rank 1 ended with status 0 and left no result"),
    ],
)
def test_a_rank_that_ends_without_a_result(how: str, words: str) -> None:
    with pytest.raises(CommlibError, match=words):
        run_function(fail_on, (1, how), np=2)


def test_the_first_error_counts_even_if_its_rank_ends_last(tmp_path: Path) -> None:
    for name in ("failed", "ended"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(KeyError, match="first"):
        run_function(fail_in_turn, (1, str(tmp_path)), np=2)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(CommlibError, match="pickle"):
        run_function(unpicklable, np=1)


@pytest.mark.parametrize(("np", "servers"), [(0, 0), (-1, 0), (1, -1)])
def test_counts_are_checked(np: int, servers: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 or more"):
        run_function(place, np=np, servers=servers)


def test_it_can_be_called_from_any_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run_function(variable, ("COMMLIB_RANK",), np=2)))
    thread.start()
    thread.join(60)
    assert results == [["0", "1"]]


def program(tmp_path: Path, text: str, **env: str) -> subprocess.Popen[str]:
    """A program of its own, in a session of its own."""
    (tmp_path / "program.py").write_text(textwrap.dedent(text))
    path = os.pathsep.join(filter(None, [env.pop("first", ""), str(REPOSITORY)]))
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PYTHONPATH": path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


MAIN = """
    import json, os
    from commlib.launch.function import run_function
    def mine(x):
        return [x, int(os.environ["COMMLIB_RANK"])]
    if __name__ == "__main__":
        print(json.dumps(run_function(mine, ("x",), np=2)))
"""


@pytest.mark.parametrize("cloudpickle", [True, False])
def test_functions_of_the_main_module_work(tmp_path: Path, cloudpickle: bool) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "cloudpickle.py").write_text("raise ImportError('not installed')")
    process = program(tmp_path, MAIN, first="" if cloudpickle else str(hidden))
    stdout, stderr = process.communicate(timeout=60)
    assert json.loads(stdout) == [["x", 0], ["x", 1]], stderr


def test_a_forgotten_guard_is_explained(tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('not installed')")
    process = program(tmp_path, MAIN.replace('if __name__ == "__main__":', "if True:"))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert 'expected it to be called under if __name__ == "__main__"' in stderr


HANG = """
    from tests.test_run_function import hang
    from commlib.launch.function import run_function
    run_function(hang, np=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_program_that_called(tmp_path: Path, number: signal.Signals) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    process = program(tmp_path, HANG, RUN_TEST=str(tmp_path), TMPDIR=str(folders))
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(number)
        process.communicate(timeout=20)
        assert leftovers("RUN_TEST", str(tmp_path), 6) == []
        assert list(folders.iterdir()) == []
    finally:
        process.kill()
        process.communicate()
