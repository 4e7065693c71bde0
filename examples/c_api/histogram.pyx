# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""A histogram over the values of all ranks, counted and summed in memory that Python never sees."""

cimport commlib
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

# Finds the functions of commlib.h; they must not be called before.
commlib.commlib_import()


def histogram(const double[:] values, double low, double high, int bins):
    """Return how many `values` of all ranks lie in each of `bins` equal parts of [low, high); blocks.

    Every rank must call this with the same number of bins.
    """
    if bins < 1 or not low < high:
        raise ValueError("there must be at least one bin, and low must be less than high")
    cdef int64_t* counts = <int64_t*>calloc(bins, sizeof(int64_t))
    if counts == NULL:
        raise MemoryError()
    cdef commlib.commlib_handle* handle
    cdef int status = -1
    cdef Py_ssize_t i
    with nogil:
        for i in range(values.shape[0]):
            if low <= values[i] < high:
                counts[<int>((values[i] - low) / (high - low) * bins)] += 1
        handle = commlib.commlib_push_pull(
            counts, counts, bins, commlib.COMMLIB_INT64, commlib.COMMLIB_SUM, "histogram", 0
        )
        if handle != NULL:
            status = commlib.commlib_wait(handle, 60)
    if status == commlib.COMMLIB_TIMEOUT:
        # The operation goes on, and with it `counts` stays in use.
        raise TimeoutError(commlib.commlib_last_error().decode())
    try:
        if status != commlib.COMMLIB_OK:
            raise RuntimeError(commlib.commlib_last_error().decode())
        return [counts[i] for i in range(bins)]
    finally:
        free(counts)
