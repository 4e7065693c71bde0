# SPDX-License-Identifier: Apache-2.0
"""Builds the two modules of this example against an installed commlib.

    pip install cython setuptools
    python setup.py build_ext --inplace
    commlib run -n 2 -- python demo.py

Nothing is linked: commlib.h finds the functions when the module is imported.
"""

from Cython.Build import cythonize
from setuptools import Extension, setup

import commlib

include = [commlib.get_include()]
setup(
    name="commlib-c-api-example",
    ext_modules=[
        *cythonize(Extension("histogram", ["histogram.pyx"], include_dirs=include)),
        Extension("norm", ["norm.c"], include_dirs=include, libraries=["m"]),
    ],
)
