# SPDX-License-Identifier: Apache-2.0
"""Builds the one extension module, `commlib._core`; everything else is in pyproject.toml.

Nothing is probed and nothing is downloaded: one compiler, one set of flags, the stable ABI of Python 3.11, so that one
wheel serves every later Python. Objects are kept in `build/`, in a folder named after the flags, and are compiled again
only when their source or one of its headers (as the compiler listed them) has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

COMPILE_JOBS = 2
COMPILE_ARGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Werror=return-type"]
CYTHON_DIRECTIVES = {"language_level": "3", "autotestdict": False}
EXPORTS = "src/exports.map"
LINK_ARGS = ["-pthread", f"-Wl,--version-script={EXPORTS}"]
C_HEADER = "src/commlib/commlib.h"

# A free-threaded Python has no stable ABI yet; there the module is built for that one version.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
LIMITED_API_MACROS: list[tuple[str, str | None]] = [("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else []


def found(*patterns: str) -> list[str]:
    """Files below this folder that match, relative and sorted, so that a build is reproducible."""
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


CORE = Extension(
    "commlib._core",
    sources=["commlib/_core.pyx", *found("src/**/*.cpp")],
    depends=[EXPORTS, *found("src/**/*.hpp", "src/**/*.h", "commlib/*.pxd")],
    include_dirs=["src"],
    define_macros=LIMITED_API_MACROS,
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
    language="c++",
    py_limited_api=LIMITED_API,
)


def is_current(object_file: Path) -> bool:
    """True if the object is newer than all that the compiler read for it, which `-MMD` wrote down beside it."""
    dependencies = object_file.with_suffix(".d")
    if not object_file.exists() or not dependencies.exists():
        return False
    _, _, inputs = dependencies.read_text().replace("\\\n", " ").partition(": ")
    built = object_file.stat().st_mtime_ns
    # A name that cannot be found (a header that is gone, or one with a space in it) counts as changed.
    return all(os.path.exists(name) and os.stat(name).st_mtime_ns < built for name in inputs.split())


class BuildCore(build_ext):
    """Compiles several sources at once, and only those that need it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.cython_c_in_temp = True
        self.cython_directives = CYTHON_DIRECTIVES
        surroundings = [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS")]
        flags = repr([COMPILE_ARGS, CYTHON_DIRECTIVES, LIMITED_API_MACROS, sys.version, sys.base_prefix, surroundings])
        self.build_temp = os.path.join("build", "objects-" + hashlib.sha256(flags.encode()).hexdigest()[:12])

    def build_extension(self, ext: Extension) -> None:
        """One build at a time works in a folder of objects; another one waits, and then finds them made."""
        os.makedirs(self.build_temp, exist_ok=True)
        with open(os.path.join(self.build_temp, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            compile_all = self.compiler.compile
            self.compiler.compile = self.compile_changed(compile_all)
            try:
                super().build_extension(ext)
            finally:
                self.compiler.compile = compile_all

    def compile_changed(self, compile_all: Any) -> Any:
        """`compile_all`, the compiler's own method, one source at a time in a few threads."""

        def compile_one(source: str, extra_postargs: list[str], options: dict[str, Any]) -> str:
            name = self.compiler.object_filenames([source], output_dir=options.get("output_dir") or "")[0]
            if self.force or not is_current(Path(name)):
                compile_all([source], extra_postargs=[*extra_postargs, "-MMD"], **options)
            return str(name)

        def compile_in_threads(sources: list[str], **options: Any) -> list[str]:
            extra_postargs = list(options.pop("extra_postargs", None) or [])
            options.pop("depends", None)
            with ThreadPoolExecutor(COMPILE_JOBS) as threads:
                return list(threads.map(lambda source: compile_one(source, extra_postargs, options), sources))

        return compile_in_threads


class BuildPackage(build_py):
    """Adds the C header, which lives with the sources of the core, as commlib/include/commlib.h."""

    def run(self) -> None:
        super().run()
        folder = Path("" if self.editable_mode else self.build_lib, "commlib", "include")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(C_HEADER, folder / "commlib.h")


setup(
    ext_modules=[CORE],
    cmdclass={"build_ext": BuildCore, "build_py": BuildPackage},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
