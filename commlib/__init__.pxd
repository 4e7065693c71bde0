# SPDX-License-Identifier: Apache-2.0
# `cimport commlib`: the functions of commlib.h, which says what they do. Compile with commlib.get_include().

cdef extern from "commlib.h" nogil:
    cdef enum commlib_dtype:
        COMMLIB_BOOL
        COMMLIB_UINT8
        COMMLIB_INT8
        COMMLIB_INT16
        COMMLIB_INT32
        COMMLIB_INT64
        COMMLIB_FLOAT16
        COMMLIB_BFLOAT16
        COMMLIB_FLOAT32
        COMMLIB_FLOAT64

    cdef enum commlib_op:
        COMMLIB_AVERAGE
        COMMLIB_SUM
        COMMLIB_MIN
        COMMLIB_MAX
        COMMLIB_PRODUCT

    int COMMLIB_OK
    int COMMLIB_TIMEOUT

    ctypedef struct commlib_handle:
        pass

    int commlib_import() except -1 with gil
    int commlib_rank() noexcept
    int commlib_size() noexcept
    commlib_handle* commlib_push_pull(const void* input, void* out, size_t count, int dtype, int op, const char* name,
                                      int priority) noexcept
    int commlib_wait(commlib_handle* handle, double timeout_s) noexcept
    int commlib_done(commlib_handle* handle) noexcept
    const char* commlib_last_error() noexcept
