// The Python module ktopt.kernels.cpu._cpu: numbers and addresses in, no tensors. kernels/cpu/__init__.py is its caller, and sees
// to it that addresses are those of buffers large enough; sizes of weights are checked here once more.
#include "arguments.h"
#include "gemm.h"

namespace ktopt {

// Arguments as whole numbers; false with an exception set where one isn't.
bool numbers(const char* name, PyObject* const* given, Py_ssize_t count, Py_ssize_t wanted, long long* out) {
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, count);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(given[i]);
        if (out[i] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

// A matrix from (kind, address, rows, columns, nbytes); false with an exception set where they don't fit together.
bool matrix(const long long* n, Matrix& out) {
    const char* reason = n[1] == 0 ? "the matrix has no address" : ktopt::refuses(n[0], n[2], n[3], n[4]);
    if (reason != nullptr) {
        PyErr_Format(PyExc_ValueError, "%s (type %lld, %lld rows of %lld, %lld bytes)", reason, n[0], n[2], n[3], n[4]);
        return false;
    }
    out = {int(n[0]), reinterpret_cast<const uint8_t*>(uintptr_t(n[1])), n[2], n[3]};
    return true;
}

}  // namespace ktopt

namespace {

using namespace ktopt;

PyObject* linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[11];
    Matrix weight;
    if (!numbers("linear", given, count, 11, n) || !matrix(n, weight)) return nullptr;
    const long long x = n[5], bfloat16 = n[6], tokens = n[7], out = n[8], out_stride = n[9], threads = n[10];
    if (x == 0 || out == 0 || tokens < 1 || tokens > INT64_MAX / 8 / weight.columns || out_stride < weight.rows) {
        PyErr_SetString(PyExc_ValueError, "linear: the activations or the result don't fit the matrix");
        return nullptr;
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = ktopt::linear(weight, address<void>(x), bfloat16 != 0, tokens, address<float>(out), out_stride, int(threads));
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject* dequantize(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[8];
    Matrix weight;
    if (!numbers("dequantize", given, count, 8, n) || !matrix(n, weight)) return nullptr;
    if (n[5] == 0) {
        PyErr_SetString(PyExc_ValueError, "dequantize: the result has no address");
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS
    ktopt::dequantize(weight, address<void>(n[5]), n[6] != 0, int(n[7]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject* rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[10], wrong;
    Matrix weight;
    if (!numbers("rows", given, count, 10, n) || !matrix(n, weight)) return nullptr;
    const auto* ids = address<const int64_t>(n[5]);
    if (n[6] < 1 || n[6] > INT64_MAX / 4 / weight.columns || ids == nullptr || n[7] == 0) {
        PyErr_SetString(PyExc_ValueError, "rows: there are no ids, or the result has no address");
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS
    wrong = ktopt::rows(weight, ids, n[6], address<void>(n[7]), n[8] != 0, int(n[9]));
    Py_END_ALLOW_THREADS
    if (wrong < 0) Py_RETURN_NONE;
    return PyErr_Format(PyExc_IndexError, "id %lld (at place %lld) is none of the %lld rows", (long long)ids[wrong], wrong,
                        (long long)weight.rows);
}

PyObject* first_bad_row(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[6], row;
    Matrix weight;
    if (!numbers("first_bad_row", given, count, 6, n) || !matrix(n, weight)) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    row = ktopt::first_bad_row(weight, int(n[5]));
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(row);
}

PyObject* has_product(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long kind;
    if (!numbers("has_product", given, count, 1, &kind)) return nullptr;
    return PyBool_FromLong(kind >= 0 && kind < KINDS && ktopt::has_product(int(kind)));
}

PyObject* isa(PyObject*, PyObject*) { return PyUnicode_FromString(ktopt::kernels().name); }

PyObject* set_isa(PyObject*, PyObject* name) {
    if (name == Py_None) return PyBool_FromLong(ktopt::set_isa(nullptr));
    PyObject* bytes = PyUnicode_AsUTF8String(name);
    if (bytes == nullptr) return nullptr;
    const char* text = PyBytes_AsString(bytes);
    PyObject* done = text == nullptr ? nullptr : PyBool_FromLong(ktopt::set_isa(text));
    Py_DECREF(bytes);
    return done;
}

template <class Function>
PyCFunction fast(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"linear", fast(linear), METH_FASTCALL,
     "linear(kind, address, rows, columns, nbytes, x, bfloat16, tokens, out, out_stride, threads)"},
    {"dequantize", fast(dequantize), METH_FASTCALL,
     "dequantize(kind, address, rows, columns, nbytes, out, bfloat16, threads)"},
    {"rows", fast(rows), METH_FASTCALL,
     "rows(kind, address, rows, columns, nbytes, ids, count, out, bfloat16, threads)"},
    {"first_bad_row", fast(first_bad_row), METH_FASTCALL,
     "first_bad_row(kind, address, rows, columns, nbytes, threads)"},
    {"layer", make_layer, METH_O, "layer(description), to be run by run_layer"},
    {"run_layer", fast(run_layer), METH_FASTCALL,
     "run_layer(layer, x, batch, tokens, cos, sin, one_rotation, kind, keys, values, capacity, past, starts, threads)"},
    {"run_before_attention", fast(run_before_attention), METH_FASTCALL,
     "run_before_attention(layer, x, batch, tokens, cos, sin, one_rotation, kind, keys, values, capacity, past, queries, threads)"},
    {"run_after_attention", fast(run_after_attention), METH_FASTCALL,
     "run_after_attention(layer, x, tokens, attended, threads)"},
    {"latent_attention", fast(latent_attention), METH_FASTCALL,
     "latent_attention(*shape, *cache, *rows, query, out, log_sum, threads, scale)"},
    {"absorbed_attention", fast(absorbed_attention), METH_FASTCALL,
     "absorbed_attention(*shape, *cache, *rows, *keys, *values, query, out, threads, scale)"},
    {"prefill_attention", fast(prefill_attention), METH_FASTCALL,
     "prefill_attention(kind, keys, values, key_head_bytes, value_head_bytes, capacity, heads, kv_heads, key_dim, value_dim, "
     "window, q, q_stride, tokens, first, start, out, out_stride, threads, end, log_sum, scale)"},
    {"pack_blocks", fast(pack_blocks), METH_FASTCALL,
     "pack_blocks(*shape, rows, kind, keys, row_stride, token_stride, kind, values, row_stride, token_stride, out, out_stride, "
     "threads) -> whether the numbers fit; shape: kind, tokens, key_dim, value_dim, value_offset, nbytes, shared"},
    {"unpack_blocks", fast(unpack_blocks), METH_FASTCALL,
     "unpack_blocks(*shape, rows, count, addresses, address_stride, kind, keys, row_stride, values, row_stride, threads)"},
    {"segment_attention", fast(segment_attention), METH_FASTCALL,
     "segment_attention(rows, heads, key_dim, value_dim, q, out, log_sum, threads, scale, then kind, tokens, count, addresses, "
     "address_stride, keys, values, key_stride, value_stride, hidden of each group)"},
    {"read_parts", fast(ktopt::read_parts), METH_FASTCALL,
     "read_parts(count, nbytes, layer, seed, files, blocks, rows, offsets, to, expected, buffer, depth, piece_bytes) -> the first part "
     "that couldn't be read or -1, and an errno, -1 for other bytes than expected, or -2 for none"},
    {"crc32", fast(ktopt::checksum), METH_FASTCALL, "crc32(begun, address, nbytes)"},
    {"experts", fast(make_experts), METH_FASTCALL,
     "experts(activation, shared, then kind, address, rows, columns, nbytes of gate, up and down of each expert) -> object"},
    {"run_experts", fast(call_experts), METH_FASTCALL,
     "run_experts(object, x, bfloat16, tokens, choices, wide, weights, each, shared_weights, out, out_stride, add, threads)"},
    {"has_product", fast(has_product), METH_FASTCALL, "has_product(kind): whether many tokens have a kernel of their own now"},
    {"run_latent_layer", fast(run_latent_layer), METH_FASTCALL,
     "run_latent_layer(layer, x, batch, tokens, cos, sin, one_rotation, kind, latents, pages, page_tokens, table, columns, past, "
     "starts, threads)"},
    {"run_mlp", fast(run_mlp), METH_FASTCALL, "run_mlp(layer, x, tokens, threads)"},
    {"run_paged", fast(run_paged), METH_FASTCALL,
     "run_paged(layer, x, rows, cos, sin, kind, keys, values, pages, page_tokens, sequences, firsts, pasts, tables, threads, "
     "steady)"},
    {"anchors", fast(make_anchors), METH_FASTCALL,
     "anchors(type, each, rows, max_blocks, tokens, dim, anchors, mean, codes, steps, signs, magnitude) -> object"},
    {"add_anchors", fast(call_add_anchors), METH_FASTCALL,
     "add_anchors(object, kind, keys, row_stride, block_stride, token_stride, first, count, threads, limit) -> first bad block, -1"},
    {"anchor_scores", fast(call_anchor_scores), METH_FASTCALL,
     "anchor_scores(object, blocks, q, heads, count, shared, allowed, rest, out, threads, scale)"},
    {"choose_blocks", fast(call_choose_blocks), METH_FASTCALL,
     "choose_blocks(object, blocks, q, heads, count, shared, allowed, rest, out, threads, scale) -> blocks of each row"},
    {"isa", isa, METH_NOARGS, "the instruction set that runs"},
    {"set_isa", set_isa, METH_O, "run this one, None for the best; False where this CPU lacks it"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", "ktopt's CPU kernels", 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&definition); }
