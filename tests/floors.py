# SPDX-License-Identifier: Apache-2.0
"""Who may include or import whom, and what must not be written at all, as functions from a folder to complaints.

The floors of the C++ rooms are read from the table in docs/architecture.md, so that text and check cannot differ.
`tests/test_floors.py` applies this to the repository, and to small folders with one fault each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CXX_SUFFIXES = {".hpp", ".cpp", ".h"}
CYTHON_SUFFIXES = {".pyx", ".pxd"}
SOURCE_SUFFIXES = CXX_SUFFIXES | CYTHON_SUFFIXES | {".c", ".py", ".pyi"}
# What Cython may declare, and how a function of it may report an error: C++ by exceptions, which are translated; our C
# header by a number; Python's own functions as Python's documentation says.
EXTERN_HEADERS = {
    "commlib/commlib.hpp": re.compile(r"\bnoexcept\b|\bexcept \+translate\b"),
    "commlib/commlib.h": re.compile(r"\bnoexcept\b|\bexcept -1\b"),
    "commlib.h": re.compile(r"\bnoexcept\b|\bexcept -1\b"),
    "Python.h": re.compile(r""),
}

# Headers that bind code to one kind of thing; each stays on one floor.
BINDING_HEADERS = {
    "Python.h": re.compile(r"Python\.h$"),
    "epoll": re.compile(r"sys/epoll\.h$"),
    "CUDA": re.compile(r"(^|/)cuda\w*\.h$"),
    "NCCL": re.compile(r"(^|/)nccl\w*\.h$"),
}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "mxnet"}
# What adapters may import of frameworks; everything else in the package may import none.
ADAPTERS = {"torch": {"torch"}, "tensorflow": {"tensorflow", "keras"}}
# The extension module reaches up for the classes it raises; its C interface, when called, for what it stands for.
CORE_MAY_IMPORT = {"commlib.errors"}
CORE_MAY_IMPORT_LATE = {"commlib.errors", "commlib.api"}

# A call that ends the process, where a statement or an operand may begin; `table.abort(…)` is somebody's method.
_BEFORE_STATEMENT = r"(?:^|[;{}(),&|?=!]|(?<!:):(?!:)|\breturn\b|\belse\b)\s*"
_ENDS_PROCESS = _BEFORE_STATEMENT + r"(?:(?:std)?::)?(?:abort|exit|_exit|_Exit|quick_exit|terminate)\s*\("
BANNED = {
    "getenv": re.compile(r"\bgetenv\b|\bsecure_getenv\b"),
    "volatile": re.compile(r"(?<!asm )(?<!__asm__ )\bvolatile\b"),
    "ends the process": re.compile(_ENDS_PROCESS, re.MULTILINE),
    "detached thread": re.compile(r"\.\s*detach\s*\(\s*\)"),
}
_USING_NAMESPACE = re.compile(r"\busing\s+namespace\b")
_ATOMIC_CALL = re.compile(r"(?:\.|->)(?:load|store|exchange|fetch_\w+|compare_exchange_\w+)\s*\(")
_SPDX = "SPDX-License-Identifier: Apache-2.0"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)
_TABLE_ROW = re.compile(r"^\| (\d) \| (.+?) \| (.+?) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Floors:
    """Floor of each C++ room, and the floors that each floor may include."""

    of_room: dict[str, int]
    below: dict[int, set[int]]

    @classmethod
    def read(cls, root: Path) -> Floors:
        """From the table of docs/architecture.md; rows of Python are left to `imports`."""
        of_room: dict[str, int] = {}
        below: dict[int, set[int]] = {}
        for number, rooms, may in _TABLE_ROW.findall((root / "docs/architecture.md").read_text()):
            for room in re.findall(r"`src/(\w+)`", rooms):
                of_room[room] = int(number)
                first, _, last = re.sub(r",.*", "", may).partition("–")
                below[int(number)] = set(range(int(first), int(last or first) + 1)) if first.isdigit() else set()
        return cls(of_room, below)


def complaints(root: Path) -> list[str]:
    """All that is wrong below `root`, as "file:line: what"."""
    checks: list[Callable[[Path], Iterator[str]]] = [includes, binding_headers, banned, atomics, externs, imports, spdx]
    return [complaint for check in checks for complaint in check(root)]


def includes(root: Path) -> Iterator[str]:
    """Rooms include only what lies on lower floors, and one way to write it."""
    floors = Floors.read(root)
    for path in _files(root / "src", CXX_SUFFIXES):
        room = path.relative_to(root / "src").parts[0]
        if room not in floors.of_room:
            yield _at(root, path, 1, f"src/{room} is not in the table of docs/architecture.md")
            continue
        floor = floors.of_room[room]
        for line, quote, name in _includes(path):
            other = name.partition("/")[0]
            if quote == "<":
                if other in floors.of_room and (root / "src" / name).is_file():
                    yield _at(root, path, line, f"<{name}> is ours: include it with quotes")
            elif not (root / "src" / name).is_file():
                yield _at(root, path, line, f'"{name}" is not a path from src/')
            elif other != room and floors.of_room.get(other, 99) not in floors.below[floor]:
                yield _at(root, path, line, f"src/{room} (floor {floor}) may not include {name}")


def binding_headers(root: Path) -> Iterator[str]:
    """Each kind of system stays on one floor."""
    of_room = Floors.read(root).of_room
    for kind, pattern in BINDING_HEADERS.items():
        places: dict[int, str] = {}
        for path in _files(root / "src", CXX_SUFFIXES):
            floor = of_room.get(path.relative_to(root / "src").parts[0], -1)
            for line, _, name in _includes(path):
                if pattern.search(name):
                    places.setdefault(floor, _at(root, path, line, ""))
        if len(places) > 1:
            yield f"{kind} headers are on several floors: {', '.join(place.rstrip(': ') for place in places.values())}"
        if kind == "Python.h" and places:
            yield f"{next(iter(places.values()))}the C++ core does not know Python"


def banned(root: Path) -> Iterator[str]:
    """What the core never does."""
    for path in _files(root / "src", CXX_SUFFIXES):
        text = _code(path)
        for what, pattern in BANNED.items():
            for found in pattern.finditer(text):
                yield _at(root, path, _line(text, found.end() - 1), f"{what}: {found.group().strip()}")
        if path.suffix != ".cpp":
            for found in _USING_NAMESPACE.finditer(text):
                yield _at(root, path, _line(text, found.start()), "using namespace in a header")


def atomics(root: Path) -> Iterator[str]:
    """Atomics name their memory order."""
    for path in _files(root / "src", CXX_SUFFIXES):
        text = _code(path)
        for found in _ATOMIC_CALL.finditer(text):
            if "memory_order" not in _parenthesised(text, found.end() - 1):
                yield _at(root, path, _line(text, found.start()), f"{found.group()}…) without a memory order")


def externs(root: Path) -> Iterator[str]:
    """Cython sees the façade alone, and no exception passes untranslated."""
    for path in _files(root / "commlib", CYTHON_SUFFIXES):
        depth: int | None = None  # indentation of the extern block we are in
        allowed = re.compile("")  # for functions of that block
        for line, text in _logical_lines(path):
            indent = len(text) - len(text.lstrip())
            if depth is not None and indent <= depth:
                depth = None
            if (extern := re.match(r"\s*cdef extern from (\S+)", text)) is not None:
                depth, header = indent, extern.group(1).strip("\"':")
                allowed = EXTERN_HEADERS.get(header, re.compile(""))
                if header not in EXTERN_HEADERS:
                    yield _at(root, path, line, f"extern from {header}; only {', '.join(EXTERN_HEADERS)} may be")
                if header.endswith(".hpp") and path.suffix != ".pxd":
                    yield _at(root, path, line, "declarations of C++ belong into a .pxd")
            elif re.search(r"\bexcept\s*\+(?!translate\b)", text):
                yield _at(root, path, line, "a bare `except +`: write `except +translate`")
            elif depth is not None and _declares_function(text) and not allowed.search(text):
                yield _at(root, path, line, "neither noexcept nor an error that is handled")


def imports(root: Path) -> Iterator[str]:
    """Frameworks are known to their adapters alone, and adapters to nobody."""
    package = root / "commlib"
    for path in _files(package, {".py", ".pyi", *CYTHON_SUFFIXES}):
        parts = path.relative_to(package).parts
        own = parts[0] if len(parts) > 1 and parts[0] in ADAPTERS else None
        for line, name, is_late in _imported(path, package.parent):
            top, _, rest = name.partition(".")
            second = rest.partition(".")[0]
            if top in FRAMEWORKS and top not in ADAPTERS.get(own or "", set()):
                yield _at(root, path, line, f"imports {top}")
            if top == "commlib" and second in ADAPTERS and second != own:
                yield _at(root, path, line, f"imports {name}: adapters are the top floor")
            if top == "commlib" and second == "cli" and parts[0] != "cli":
                yield _at(root, path, line, f"imports {name}: nothing stands on the command line")
            may = {"commlib._native"} | (CORE_MAY_IMPORT_LATE if is_late else CORE_MAY_IMPORT)
            if path.suffix in CYTHON_SUFFIXES and top == "commlib" and name not in may:
                yield _at(root, path, line, f"the core imports {name}")


def spdx(root: Path) -> Iterator[str]:
    """Every source file names its licence at its head."""
    for folder in ("src", "commlib", "tests", "examples", "benchmarks", "docs", "tools"):
        for path in _files(root / folder, SOURCE_SUFFIXES):
            with open(path) as file:
                head = [file.readline() for _ in range(3)]
            if not any(_SPDX in line for line in head):
                yield _at(root, path, 1, f"no line {_SPDX!r}")


# Reading.


def _files(folder: Path, suffixes: set[str]) -> list[Path]:
    made = {"include", "__pycache__", "build"}  # by a build, not by a person
    return sorted(
        path for path in folder.rglob("*") if path.suffix in suffixes and not made & set(path.relative_to(folder).parts)
    )


def _at(root: Path, path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(root)}:{line}: {what}"


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _code(path: Path) -> str:
    """C++ without comments and what is in quotes; lines stay where they are."""

    def blank(found: re.Match[str]) -> str:
        return '""' if found.group().startswith(('"', "'")) else "\n" * found.group().count("\n") or " "

    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'"
    return re.sub(pattern, blank, path.read_text(), flags=re.DOTALL)


def _includes(path: Path) -> Iterator[tuple[int, str, str]]:
    text = path.read_text()
    for found in _INCLUDE.finditer(text):
        yield _line(text, found.start(1)), found.group(1), found.group(2)


def _parenthesised(text: str, start: int) -> str:
    depth = 0
    for offset in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[offset], 0)
        if depth == 0:
            return text[start:offset]
    return text[start:]


def _logical_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of Cython without comments, joined while a parenthesis is open."""
    held, began = "", 0
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        text = raw.partition("#")[0].rstrip()
        if not held:
            began = number
        held += text
        if held.count("(") > held.count(")"):
            continue
        if held.strip():
            yield began, held
        held = ""


def _declares_function(text: str) -> bool:
    return "(" in text and not re.match(r"\s*(cdef |cppclass |ctypedef (class|struct|enum)|enum |struct )", text)


def _imported(path: Path, top: Path) -> Iterator[tuple[int, str, bool]]:
    """Full names of the modules that a file imports or cimports, and whether it does so late: not when it is loaded."""
    package = ".".join(path.relative_to(top).parent.parts)
    if path.suffix in CYTHON_SUFFIXES:
        for line, text in _logical_lines(path):
            is_late = text.startswith(" ")
            for found in re.finditer(r"\bfrom\s+([\w.]+)\s+c?import\s+\(?\s*([\w, *]+)|^\s*c?import\s+([\w.]+)", text):
                if found.group(3):
                    yield line, found.group(3), is_late
                else:
                    names = _names(found.group(2))
                    yield from ((line, _joined(found.group(1), name, package), is_late) for name in names)
        return
    tree = ast.parse(path.read_text())
    at_load = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, node not in at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [alias.name for alias in node.names]
            yield from ((node.lineno, _joined(module, name, package), node not in at_load) for name in names)


def _names(listed: str) -> list[str]:
    return [name.split(" as ")[0].strip() for name in listed.split(",") if name.strip()]


def _joined(module: str, name: str, package: str) -> str:
    """Full name of what `from module import name` in `package` brings: a module of the package, or something in one."""
    level = len(module) - len(module.lstrip("."))
    if level:
        base = package.split(".")[: len(package.split(".")) - level + 1]
        module = ".".join([*base, *filter(None, [module.lstrip(".")])])
    # `from commlib import errors` names a module, `from commlib.errors import X` something in it.
    return f"{module}.{name}" if "." not in module else module
