/* SPDX-License-Identifier: Apache-2.0 */
/* The Euclidean norm of a vector that is spread over all ranks: a module in plain C. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <commlib.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static PyObject* norm(PyObject* module, PyObject* argument) {
  (void)module;
  Py_buffer view;
  if (PyObject_GetBuffer(argument, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) return NULL;
  if (view.format == NULL || strcmp(view.format, "d") != 0) {
    PyBuffer_Release(&view);
    PyErr_SetString(PyExc_TypeError, "norm: expected an array of float64");
    return NULL;
  }

  double* sum = malloc(sizeof *sum);
  if (sum == NULL) {
    PyBuffer_Release(&view);
    return PyErr_NoMemory();
  }
  int status = -1;
  Py_BEGIN_ALLOW_THREADS;
  const double* values = view.buf;
  *sum = 0;
  for (Py_ssize_t i = 0; i < view.len / view.itemsize; ++i) *sum += values[i] * values[i];
  commlib_handle* handle = commlib_push_pull(sum, sum, 1, COMMLIB_FLOAT64, COMMLIB_SUM, "norm", 0);
  if (handle != NULL) status = commlib_wait(handle, 60);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&view);
  if (status == COMMLIB_TIMEOUT) {
    /* The operation goes on, and with it `sum` stays in use. */
    PyErr_SetString(PyExc_TimeoutError, commlib_last_error());
    return NULL;
  }
  const double squared = *sum;
  free(sum);
  if (status != COMMLIB_OK) {
    PyErr_SetString(PyExc_RuntimeError, commlib_last_error());
    return NULL;
  }
  return PyFloat_FromDouble(sqrt(squared));
}

static PyMethodDef methods[] = {
    {"norm", norm, METH_O,
     "norm(part) -> the norm of the vector whose parts are the ranks' arrays of float64; blocks."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "norm", "Calls commlib from C.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_norm(void) {
  /* Finds the functions of commlib.h; they must not be called before. */
  if (commlib_import() < 0) return NULL;
  return PyModule_Create(&module);
}
