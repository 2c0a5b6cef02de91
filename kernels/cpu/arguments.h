// What the files that make up the Python module share: numbers and matrices out of Python's arguments.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "linear.h"
#include "mla.h"

namespace ktopt {

// Arguments as whole numbers; false with an exception set where one isn't.
bool numbers(const char* name, PyObject* const* given, Py_ssize_t count, Py_ssize_t wanted, long long* out);

// A matrix from (kind, address, rows, columns, nbytes); false with an exception set where they don't fit together.
bool matrix(const long long* n, Matrix& out);

// One matrix a head from (kind, address, rows, columns, nbytes, head_bytes, transposed), where nbytes reach from the first head's matrix to the
// last one's end; false with an exception set where they don't fit.
bool head_matrices(const long long* n, long long heads, HeadMatrices& out);

template <class T>
T* address(long long n) {
    return reinterpret_cast<T*>(uintptr_t(n));
}

// layer(description) and run_layer(...): see kernels/cpu/layer.py.
PyObject* make_layer(PyObject*, PyObject* description);
PyObject* run_layer(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* run_before_attention(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* run_after_attention(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* run_latent_layer(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* run_mlp(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* run_paged(PyObject*, PyObject* const* given, Py_ssize_t count);

// See kernels/cpu/latent.py.
PyObject* latent_attention(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* absorbed_attention(PyObject*, PyObject* const* given, Py_ssize_t count);

// See kernels/cpu/attention.py.
PyObject* prefill_attention(PyObject*, PyObject* const* given, Py_ssize_t count);

// See kernels/cpu/token_blocks.py.
PyObject* pack_blocks(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* unpack_blocks(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* segment_attention(PyObject*, PyObject* const* given, Py_ssize_t count);

// See kernels/cpu/block_io.py.
PyObject* read_parts(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* checksum(PyObject*, PyObject* const* given, Py_ssize_t count);

// experts(activation, shared, *numbers of matrices) and run_experts(...): see kernels/cpu/experts.py.
PyObject* make_experts(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* call_experts(PyObject*, PyObject* const* given, Py_ssize_t count);

// The Experts in an object that make_experts made; null with an exception set for another object.
struct Experts;
const Experts* experts_in(PyObject* object);

// See kernels/cpu/anchors.py.
PyObject* make_anchors(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* call_add_anchors(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* call_anchor_scores(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* call_choose_blocks(PyObject*, PyObject* const* given, Py_ssize_t count);

}  // namespace ktopt
