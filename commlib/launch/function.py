# SPDX-License-Identifier: Apache-2.0
"""`commlib.run`: a function in several new processes, from inside a program.

The call is written to a folder, where the workers (commlib/launch/call.py) read it and leave what came of it. They are
kept together by a process of their own, as with `commlib run`: the program that calls need not be told about signals,
children and orphans, may call from any thread, and may be killed without leaving anything behind.
"""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from commlib.errors import CommlibError, ConfigError
from commlib.launch.supervisor import described

__all__ = ["Result", "answer", "run_function"]

T = TypeVar("T")

_STOP_TIMEOUT_S = 10.0  # longer than a supervisor takes to end all

_importing_main = False  # in a worker


@dataclass(frozen=True)
class Result:
    """What came of the call on one rank: a value, or an error, its traceback, and when it was caught."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    when_ns: int = 0  # CLOCK_MONOTONIC, which all processes of a machine share


def run_function(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    np: int,
    servers: int = 0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """See `commlib.run`."""
    if _importing_main:
        raise CommlibError(
            "commlib.run is called while a new process imports the main module; expected it to be called under "
            'if __name__ == "__main__":, or cloudpickle to be installed'
        )
    if np < 1 or servers < 0:
        raise ConfigError(f"np is {np} and servers is {servers}; expected 1 or more, and 0 or more")
    with tempfile.TemporaryDirectory(prefix="commlib-run-") as name:
        folder = Path(name)
        order = {"parent": os.getpid(), "workers": np, "servers": servers}
        (folder / "order").write_text(json.dumps({**order, "sys_path": [os.path.abspath(entry) for entry in sys.path]}))
        (folder / "main").write_bytes(pickle.dumps(_main_module()))
        (folder / "call").write_bytes(_pickled((fn, tuple(args))))
        _supervise(folder, {**os.environ, **(env or {})})
        return _values(folder, np)


def answer(folder: Path, rank: int) -> int:
    """In a worker: make the call that lies in `folder`, leave its result there, and return the exit status."""
    try:
        _import_main(pickle.loads((folder / "main").read_bytes()))
        fn, args = pickle.loads((folder / "call").read_bytes())
        result = Result(value=fn(*args))
        data = _pickled(result)
    except Exception as error:
        result = Result(error=error, traceback=traceback.format_exc(), when_ns=time.monotonic_ns())
        data = _pickled_error(result)
    partial = folder / f"{rank}.partial"
    partial.write_bytes(data)
    partial.rename(folder / f"{rank}.result")
    return 0 if result.error is None else 1


def _supervise(folder: Path, environ: Mapping[str, str]) -> None:
    call = str(Path(__file__).with_name("call.py"))
    # In a session of its own: on Ctrl-C this process decides, and passes it on once.
    supervisor = subprocess.Popen(
        [sys.executable, "-P", call, "supervise", str(folder)],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = supervisor.wait()
    except BaseException:
        supervisor.send_signal(signal.SIGINT)
        try:
            supervisor.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        raise
    if not (folder / "endings").exists():
        raise CommlibError(f"what keeps the processes together {described(status)}")


def _values(folder: Path, np: int) -> list[Any]:
    """The results by rank; raises what went wrong first."""
    results: dict[int, Result] = {}
    for rank in range(np):
        path = folder / f"{rank}.result"
        if path.exists():
            results[rank] = pickle.loads(path.read_bytes())
    endings: list[tuple[str, int]] = json.loads((folder / "endings").read_text())
    failed = [(name, returncode) for name, returncode in endings if returncode != 0]
    if failed:
        name, returncode = failed[0]
        rank = int(name.removeprefix("rank ")) if name.startswith("rank ") else -1
        if rank not in results:
            raise CommlibError(f"{name} {described(returncode)} and left no result")
    # Whoever notices that another rank has failed may end before it does: the first error is the cause.
    errors = sorted((result.when_ns, rank) for rank, result in results.items() if result.error is not None)
    if errors:
        rank = errors[0][1]
        error = results[rank].error
        assert error is not None
        error.add_note(f"raised on rank {rank} of {np}:\n{results[rank].traceback}")
        raise error
    missing = [str(rank) for rank in range(np) if rank not in results]
    if missing:
        raise CommlibError(f"rank {', '.join(missing)} ended with status 0 and left no result")
    return [results[rank].value for rank in range(np)]


def _main_module() -> dict[str, Any] | None:
    """How to find the functions of the program's main module again; None if cloudpickle takes them along."""
    if _cloudpickle() is not None:
        return None
    data = multiprocessing.spawn.get_preparation_data("MainProcess")
    wanted = ("sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")
    return {name: data[name] for name in wanted if name in data}


def _import_main(data: dict[str, Any] | None) -> None:
    """As multiprocessing does it where processes are started afresh: the program is run once more, but not as main."""
    global _importing_main
    if data is not None:
        _importing_main = True
        multiprocessing.spawn.prepare(data)
        _importing_main = False


def _cloudpickle() -> ModuleType | None:
    try:
        import cloudpickle
    except ImportError:
        return None
    module: ModuleType = cloudpickle
    return module


def _pickled(value: Any) -> bytes:
    """By cloudpickle where it is installed, which takes functions of the main module and lambdas along as they are."""
    try:
        data: bytes = (_cloudpickle() or pickle).dumps(value)
        return data
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CommlibError(
            f"{error}; expected a function of a module, and arguments and results that can be pickled. "
            "With cloudpickle installed, lambdas and local functions work too"
        ) from error


def _pickled_error(result: Result) -> bytes:
    """An error that cannot be pickled, or cannot be made again on the other side, is told in words."""
    try:
        data = _pickled(result)
        pickle.loads(data)
    except Exception:
        words = CommlibError(f"{type(result.error).__name__}: {result.error}")
        return _pickled(Result(error=words, traceback=result.traceback, when_ns=result.when_ns))
    return data
