# SPDX-License-Identifier: Apache-2.0
"""The floors of docs/architecture.md hold, and the check that says so finds each kind of fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import floors

REPOSITORY = Path(__file__).resolve().parent.parent


def head(name: str) -> str:
    """The first line of a source file."""
    return ("// " if Path(name).suffix in floors.CXX_SUFFIXES else "# ") + "SPDX-License-Identifier: Apache-2.0\n"


def test_the_repository_keeps_its_floors() -> None:
    assert floors.complaints(REPOSITORY) == []


def test_the_table_is_understood() -> None:
    read = floors.Floors.read(REPOSITORY)
    assert read.of_room["base"] == 0
    assert read.of_room["commlib"] == max(read.of_room.values()) == 5
    assert read.of_room["reduce"] == read.of_room["transport"] == 2
    assert {path.name for path in (REPOSITORY / "src").iterdir() if path.is_dir()} <= set(read.of_room)
    assert read.below[read.of_room["sched"]] == {0, 1}
    assert read.below[5] == {0, 1, 2, 3, 4}


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """A small project without a fault."""
    files = {
        "src/base/errc.hpp": "#include <cstdint>\n",
        "src/memory/arena.hpp": '#include "base/errc.hpp"\n#include "memory/other.hpp"\n',
        "src/memory/other.hpp": "#include <memory>\n",
        "src/reduce/reduce.hpp": '#include "memory/arena.hpp"\n',
        "src/transport/tcp.cpp": '#include "base/errc.hpp"\n#include <sys/epoll.h>\n',
        "src/sched/task.hpp": '#include "memory/arena.hpp"\n',
        "src/server/engine.hpp": '#include "reduce/reduce.hpp"\n',
        "src/commlib/commlib.hpp": '#include "server/engine.hpp"\n',
        "commlib/errors.py": "class Error(RuntimeError): ...\n",
        "commlib/__init__.py": "from commlib import _core, errors\nfrom commlib.errors import Error\n",
        "commlib/_core.pyx": (
            "from commlib._native cimport *\nfrom commlib import errors\n"
            'cdef extern from "Python.h":\n    int PyObject_CheckBuffer(object obj)\n'
            'cdef extern from "commlib/commlib.h":\n    int (*rank)() noexcept\n'
            "cdef int c_rank() noexcept with gil:\n    from commlib import api\n    return api.rank()\n"
        ),
        "commlib/cli/__init__.py": "import commlib\nfrom .run import main\n",
        "commlib/cli/run.py": "def main(): ...\n",
        "commlib/torch/__init__.py": "import torch, commlib\nfrom torch import nn\nfrom commlib.torch import ops\n",
        "commlib/tensorflow/__init__.py": "import keras, tensorflow as tf\nfrom ..errors import Error\n",
        "commlib/_native.pxd": (
            "cdef inline int translate() except -1:\n    return 0\n"
            'cdef extern from "commlib/commlib.hpp" namespace "commlib" nogil:\n'
            '    cdef cppclass CppWorker "commlib::Worker":\n'
            "        CppWorker(int rank) except +translate\n"
            "        int rank() noexcept\n"
            "    int sum(const float* a,\n            size_t n) noexcept\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head(name) + text)
    (tmp_path / "docs").mkdir()
    shutil.copy(REPOSITORY / "docs/architecture.md", tmp_path / "docs")
    return tmp_path


def test_a_clean_project_has_no_complaints(clean: Path) -> None:
    assert floors.complaints(clean) == []


FAULTS = [
    # C++: who includes whom
    ("src/base/errc.hpp", '#include "memory/arena.hpp"', "src/base (floor 0) may not include memory/arena.hpp"),
    ("src/transport/tcp.cpp", '#include "reduce/reduce.hpp"', "src/transport (floor 2) may not include"),
    ("src/sched/task.hpp", '#include "reduce/reduce.hpp"', "src/sched (floor 3) may not include"),
    ("src/loops/loop.hpp", '#include "server/engine.hpp"', "src/loops (floor 4) may not include"),
    ("src/memory/arena.hpp", '#include "other.hpp"', "is not a path from src/"),
    ("src/memory/arena.hpp", "#  include <base/errc.hpp>", "is ours"),
    ("src/attic/thing.hpp", "int x;", "src/attic is not in the table"),
    # C++: what binds
    ("src/base/errc.hpp", "#include <sys/epoll.h>", "epoll headers are on several floors"),
    ("src/base/errc.hpp", "#include <Python.h>", "does not know Python"),
    # C++: what is banned
    ("src/base/log.cpp", 'const char* v = std::getenv("X");', "getenv"),
    ("src/base/log.cpp", "volatile int x;", "volatile"),
    ("src/base/log.cpp", "void f() { std::abort(); }", "ends the process"),
    ("src/base/log.cpp", "void f() {\n  if (x) exit(1);\n}", "ends the process"),
    ("src/base/log.cpp", "void f() {\n  ::_exit(1);\n}", "ends the process"),
    ("src/base/log.cpp", "std::thread([] {}).detach();", "detached thread"),
    ("src/base/log.hpp", "using namespace std;", "using namespace in a header"),
    ("src/base/log.cpp", "int f() { return x.load(); }", "without a memory order"),
    ("src/base/log.cpp", "void f() { p->fetch_add(g(1)); }", "without a memory order"),
    # Cython
    ("commlib/_native.pxd", 'cdef extern from "sched/task.hpp":\n    int f() noexcept', "extern from"),
    ("commlib/_native.pxd", 'cdef extern from "commlib/commlib.hpp":\n    int f() except +', "a bare `except +`"),
    (
        "commlib/_native.pxd",
        'cdef extern from "commlib/commlib.hpp":\n    int f(int a,\n      int b)',
        "neither noexcept",
    ),
    ("commlib/_core.pyx", 'cdef extern from "commlib/commlib.hpp":\n    int f() noexcept', "belong into a .pxd"),
    ("commlib/_core.pyx", 'cdef extern from "commlib/commlib.h":\n    int f()', "neither noexcept"),
    ("commlib/_core.pyx", "from commlib import api", "the core imports commlib.api"),
    ("commlib/_core.pyx", "def f():\n    from commlib import session", "the core imports commlib.session"),
    ("commlib/_core.pyx", "from commlib.control import Member", "the core imports commlib.control"),
    # Python
    ("commlib/errors.py", "def f():\n    import torch.nn", "imports torch"),
    ("commlib/control/__init__.py", "from tensorflow import keras", "imports tensorflow"),
    ("commlib/torch/__init__.py", "import keras", "imports keras"),
    ("commlib/tensorflow/__init__.py", "from commlib import torch", "imports commlib.torch: adapters"),
    ("commlib/errors.py", "from .torch import ops", "imports commlib.torch: adapters"),
    ("commlib/errors.py", "from commlib.cli import main", "nothing stands on the command line"),
]


@pytest.mark.parametrize(("name", "text", "complaint"), FAULTS, ids=[f"{name}: {text}" for name, text, _ in FAULTS])
def test_each_fault_is_found(clean: Path, name: str, text: str, complaint: str) -> None:
    path = clean / name
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else head(name)
    path.write_text(f"{before}{text}\n")
    found = floors.complaints(clean)
    assert len(found) == 1, found
    assert complaint in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "// exit(1), volatile and getenv are words here",
        "/* using namespace std;\n   abort(); */",
        'const char* text = "exit(1); getenv";',
        "table_.abort(1);",
        "bool Table::abort(int who) noexcept {",
        "on_exit(1);",
        'asm volatile("pause");',
        "x.load(std::memory_order_acquire);",
        "x.compare_exchange_weak(\n    seen, next,\n    std::memory_order_acq_rel, std::memory_order_relaxed);",
        "int million = 1'000'000;",
    ],
)
def test_what_only_looks_like_a_fault_is_not(clean: Path, text: str) -> None:
    (clean / "src/base/log.hpp").write_text(f"{head('log.hpp')}{text}\n")
    assert floors.complaints(clean) == []


@pytest.mark.parametrize("name", ["src/base/new.cpp", "commlib/new.py", "tests/new.py", "commlib/_core.pyi"])
def test_a_file_without_a_licence_is_found(clean: Path, name: str) -> None:
    path = clean / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n")
    assert floors.complaints(clean) == [f"{name}:1: no line 'SPDX-License-Identifier: Apache-2.0'"]
