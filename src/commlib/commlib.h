/* SPDX-License-Identifier: Apache-2.0 */
/* commlib for C and C++ extensions of Python: sum a buffer over all processes of the job.
 *
 *     #include <Python.h>
 *     #include <commlib.h>                       // commlib.get_include() says where it is
 *     if (commlib_import() < 0) return NULL;     // once, when your module is imported, holding the GIL
 *     commlib_handle *handle = commlib_push_pull(in, out, count, COMMLIB_FLOAT32, COMMLIB_SUM, "gradients", 0);
 *     if (handle == NULL || commlib_wait(handle, 60.0) != 0) fprintf(stderr, "%s\n", commlib_last_error());
 *
 * Nothing is linked: commlib_import finds the functions in the installed package. The job itself is joined in Python, by
 * commlib.init(). All functions but commlib_import may be called from any thread, with or without the GIL; only
 * commlib_wait, and the first use of a name, block. Semantics are those of commlib.push_pull in Python.
 */
#ifndef COMMLIB_H
#define COMMLIB_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  COMMLIB_BOOL = 0,
  COMMLIB_UINT8 = 1,
  COMMLIB_INT8 = 2,
  COMMLIB_INT16 = 3,
  COMMLIB_INT32 = 4,
  COMMLIB_INT64 = 5,
  COMMLIB_FLOAT16 = 6,
  COMMLIB_BFLOAT16 = 7,
  COMMLIB_FLOAT32 = 8,
  COMMLIB_FLOAT64 = 9
} commlib_dtype;

typedef enum { COMMLIB_AVERAGE = 0, COMMLIB_SUM = 1, COMMLIB_MIN = 2, COMMLIB_MAX = 3, COMMLIB_PRODUCT = 4 } commlib_op;

/* Results of commlib_wait; the numbers are those of commlib.errors.Code. */
#define COMMLIB_OK 0
#define COMMLIB_TIMEOUT 6

/* An operation in flight. */
typedef struct commlib_handle commlib_handle;

/* What commlib_import finds. New functions are added at the end; `bytes` says how many there are. */
typedef struct {
  size_t bytes;
  int (*rank)(void);
  int (*size)(void);
  commlib_handle* (*push_pull)(const void* in, void* out, size_t count, int dtype, int op, const char* name,
                               int priority);
  int (*wait)(commlib_handle* handle, double timeout_s);
  int (*done)(commlib_handle* handle);
  const char* (*last_error)(void);
} commlib_functions;

static const commlib_functions* commlib_functions_ = NULL;

/* As in Python.h, which need not be included. */
void* PyCapsule_Import(const char* name, int no_block);

/* Finds the functions. Holding the GIL. 0, or −1 with a Python exception set: commlib is not installed. */
static inline int commlib_import(void) {
  commlib_functions_ = (const commlib_functions*)PyCapsule_Import("commlib._core._C_API", 0);
  return commlib_functions_ == NULL ? -1 : 0;
}

/* This worker's number in the job and the number of workers; −1 before commlib.init(). */
static inline int commlib_rank(void) { return commlib_functions_->rank(); }
static inline int commlib_size(void) { return commlib_functions_->size(); }

/* Combines `count` elements of `dtype` at `in` over all ranks into `out`, which is `in` or does not overlap it. Both must
 * stay valid, and `in` unchanged, until commlib_wait has returned. `name`: the same on all ranks, NULL for operations that
 * meet in program order. Returns at once; NULL on failure (commlib_last_error). */
static inline commlib_handle* commlib_push_pull(const void* in, void* out, size_t count, int dtype, int op,
                                                const char* name, int priority) {
  return commlib_functions_->push_pull(in, out, count, dtype, op, name, priority);
}

/* Blocks until the operation has ended, at most `timeout_s` seconds (negative: the job's own limit). COMMLIB_OK, or the code
 * of the error. Frees the handle unless it returns COMMLIB_TIMEOUT: the operation is then still in flight. Ctrl-C also ends
 * the wait with COMMLIB_TIMEOUT; Python raises KeyboardInterrupt when it runs again. */
static inline int commlib_wait(commlib_handle* handle, double timeout_s) {
  return commlib_functions_->wait(handle, timeout_s);
}

/* 1 if the operation has ended, with success or not. Never blocks on other ranks. */
static inline int commlib_done(commlib_handle* handle) { return commlib_functions_->done(handle); }

/* The last error of this thread, in words; valid until its next call. */
static inline const char* commlib_last_error(void) { return commlib_functions_->last_error(); }

#ifdef __cplusplus
}
#endif

#endif /* COMMLIB_H */
