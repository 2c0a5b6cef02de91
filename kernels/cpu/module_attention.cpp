// Attention for the Python module: kernels/cpu/attention.py is its caller. Sizes are checked here once more.
#include "arguments.h"
#include "attention.h"

namespace ktopt {
namespace {

// Whether `count` heads of `capacity` tokens may stand `head_bytes` apart.
bool apart(long long head_bytes, long long count, long long capacity, long long dim, int kind) {
    return count == 1 || head_bytes >= capacity * dim * layout_of(kind).bytes;
}

}  // namespace

PyObject* prefill_attention(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[21];
    if (!numbers("prefill_attention", given, count - 1, 21, n)) return nullptr;
    const double scale = PyFloat_AsDouble(given[21]);
    if (scale == -1 && PyErr_Occurred()) return nullptr;
    const AttentionShape shape = {n[6], n[7], n[8], n[9], float(scale), n[10], n[19]};
    const long long capacity = n[5], q_stride = n[12], tokens = n[13], first = n[14], start = n[15], out_stride = n[17];
    const char* reason = refuses(shape, n[0], tokens, first, start);
    if (reason == nullptr && (n[1] == 0 || n[2] == 0 || n[11] == 0 || n[16] == 0)) reason = "a tensor has no address";
    if (reason == nullptr && (capacity < (shape.end == CAUSAL ? first + tokens : shape.end) || capacity > 1ll << 32))
        reason = "the cache doesn't hold the queries' keys";
    if (reason == nullptr && !(apart(n[3], n[7], capacity, n[8], int(n[0])) && apart(n[4], n[7], capacity, n[9], int(n[0]))))
        reason = "heads of the cache overlap";
    if (reason == nullptr && (q_stride < shape.heads * shape.key_dim || out_stride < shape.heads * shape.value_dim) && tokens > 1)
        reason = "queries or results overlap";
    if (reason != nullptr) {
        PyErr_Format(PyExc_ValueError, "prefill_attention: %s", reason);
        return nullptr;
    }
    const KeyValues cache = {int(n[0]), address<const uint8_t>(n[1]), address<const uint8_t>(n[2]), n[3], n[4]};
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = ktopt::prefill_attention(shape, cache, address<const float>(n[11]), q_stride, tokens, first, start,
                                    address<float>(n[16]), out_stride, int(n[18]), address<float>(n[20]));
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

}  // namespace ktopt
