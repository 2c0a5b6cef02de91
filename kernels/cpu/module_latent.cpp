// Latent attention for Python; kernels/cpu/latent.py is its caller.
#include <vector>

#include "arguments.h"
#include "mla.h"

namespace ktopt {
namespace {

// heads, nope, rope, latent, value; the cache's kind, address, pages, tokens of a page and bytes; the page table's address (int32),
// rows and columns; the address of (table row, start, end) in int64 for each query row, and their count.
constexpr int ATTENTION_ARGUMENTS = 15;

// A call's shape, cache and rows, checked; false with an exception set where they don't fit together.
bool attention(const long long* n, LatentShape& shape, LatentCache& cache, std::vector<LatentRow>& rows) {
    shape = {n[0], n[1], n[2], n[3], n[4]};
    cache = {int(n[5]), address<const uint8_t>(n[6]), n[7], n[8]};
    const auto* table = address<const int32_t>(n[10]);
    const auto* given = address<const int64_t>(n[13]);
    const long long sequences = n[11], columns = n[12], count = n[14];
    const char* reason = nullptr;
    if (n[5] < 0 || n[5] >= KINDS || layout_of(int(n[5])).bytes == 0) reason = "there is no kernel for the cache's type";
    else if (table == nullptr || given == nullptr || count < 1 || sequences < 1 || columns < 1) reason = "there are no rows";
    else if (n[7] < 1 || n[8] < 1 || n[7] > INT32_MAX || n[8] > INT32_MAX) reason = "there are no pages";
    for (long long r = 0; reason == nullptr && r < count; r++) {
        const int64_t* row = given + 3 * r;
        if (row[0] < 0 || row[0] >= sequences || row[2] > columns * cache.page_tokens) reason = "a row reaches beyond the page table";
        else rows.push_back({table + row[0] * columns, row[1], row[2]});
    }
    if (reason == nullptr) reason = refuses(shape, cache, rows.data(), count);
    if (reason == nullptr &&
        n[9] / n[7] / n[8] != shape.width() / layout_of(cache.kind).elements * layout_of(cache.kind).bytes)
        reason = "the cache's size isn't that of its pages";
    if (reason == nullptr) return true;
    PyErr_Format(PyExc_ValueError, "%s (%lld heads, latent %lld + %lld, %lld pages of %lld tokens, %lld rows)", reason, n[0], n[3],
                 n[2], n[7], n[8], count);
    return false;
}

}  // namespace

bool head_matrices(const long long* n, long long heads, HeadMatrices& out) {
    Matrix one;
    const long long head_bytes = n[5], last = n[4] - (heads - 1) * head_bytes;
    const long long each[5] = {n[0], n[1], n[2], n[3], last};
    if (head_bytes < 0 || head_bytes > (1ll << 40)) {
        PyErr_SetString(PyExc_ValueError, "the matrices of the heads lie apart by no sensible number of bytes");
        return false;
    }
    if (!matrix(each, one)) return false;
    out = {one.kind, one.data, one.rows, one.columns, head_bytes, n[6] != 0};
    return true;
}

PyObject* latent_attention(PyObject*, PyObject* const* given, Py_ssize_t count) {
    constexpr int MORE = 4;
    long long n[ATTENTION_ARGUMENTS + MORE];
    LatentShape shape;
    LatentCache cache;
    std::vector<LatentRow> rows;
    if (count < 1 || !numbers("latent_attention", given, count - 1, ATTENTION_ARGUMENTS + MORE, n)) return nullptr;
    const double scale = PyFloat_AsDouble(given[count - 1]);
    if (PyErr_Occurred() || !attention(n, shape, cache, rows)) return nullptr;
    const long long* rest = n + ATTENTION_ARGUMENTS;  // query, out, log_sum, threads
    if (rest[0] == 0 || rest[1] == 0) {
        PyErr_SetString(PyExc_ValueError, "latent_attention: the query or the result has no address");
        return nullptr;
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = attend_latents(shape, cache, rows.data(), int64_t(rows.size()), address<float>(rest[0]), float(scale),
                                   address<float>(rest[1]), address<float>(rest[2]), int(rest[3]));
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject* absorbed_attention(PyObject*, PyObject* const* given, Py_ssize_t count) {
    constexpr int MORE = 17;
    long long n[ATTENTION_ARGUMENTS + MORE];
    LatentShape shape;
    LatentCache cache;
    std::vector<LatentRow> rows;
    HeadMatrices keys, values;
    if (count < 1 || !numbers("absorbed_attention", given, count - 1, ATTENTION_ARGUMENTS + MORE, n)) return nullptr;
    const double scale = PyFloat_AsDouble(given[count - 1]);
    if (PyErr_Occurred() || !attention(n, shape, cache, rows)) return nullptr;
    const long long* rest = n + ATTENTION_ARGUMENTS;  // keys (7), values (7), query, out, threads
    if (!head_matrices(rest, shape.heads, keys) || !head_matrices(rest + 7, shape.heads, values)) return nullptr;
    const bool fit = keys.transposed ? keys.rows == shape.nope && keys.columns == shape.latent
                                     : keys.rows == shape.latent && keys.columns == shape.nope;
    if (!fit || values.rows != shape.value || values.columns != shape.latent || values.transposed || rest[14] == 0 || rest[15] == 0) {
        PyErr_SetString(PyExc_ValueError, "absorbed_attention: matrices, query or result don't fit the heads");
        return nullptr;
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = attend_absorbed(shape, cache, rows.data(), int64_t(rows.size()), address<float>(rest[14]), keys, values,
                                     float(scale), address<float>(rest[15]), int(rest[16]));
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

}  // namespace ktopt
