// Python's functions around anchors.h.
#include <new>

#include "anchors.h"
#include "arguments.h"

namespace ktopt {
namespace {

constexpr char NAME[] = "ktopt.anchors";

void release(PyObject* object) { delete static_cast<AnchorIndex*>(PyCapsule_GetPointer(object, NAME)); }

const AnchorIndex* index_in(PyObject* object) { return static_cast<const AnchorIndex*>(PyCapsule_GetPointer(object, NAME)); }

// The index and what is asked of it from (index, blocks, q, heads, count, shared, allowed, rest, out, threads, scale).
const AnchorIndex* choice(const char* name, PyObject* const* given, Py_ssize_t count, long long* n, Choice& out) {
    if (count != 11) {
        PyErr_Format(PyExc_TypeError, "%s takes 11 arguments, not %zd", name, count);
        return nullptr;
    }
    const AnchorIndex* index = index_in(given[0]);
    if (index == nullptr || !numbers(name, given + 1, 9, 9, n)) return nullptr;
    const double scale = PyFloat_AsDouble(given[10]);
    if (scale == -1 && PyErr_Occurred()) return nullptr;
    out = {n[0], address<const float>(n[1]), n[2], float(scale), n[3], n[4], address<const uint8_t>(n[5]), address<const float>(n[6]),
           int(n[8])};
    if (n[0] < 1 || n[0] > index->max_blocks || n[1] == 0 || n[2] < 1 || n[2] > 1 << 16 || n[7] == 0 || n[4] < 0 ||
        (n[4] > 0 && index->rows % n[4] != 0)) {
        PyErr_Format(PyExc_ValueError, "%s: %lld blocks, %lld heads or groups of %lld rows don't fit the anchors", name, n[0], n[2], n[4]);
        return nullptr;
    }
    return index;
}

}  // namespace

PyObject* make_anchors(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[12];
    if (!numbers("anchors", given, count, 12, n)) return nullptr;
    const AnchorIndex index{int(n[0]),
                            n[1],
                            n[2],
                            n[3],
                            n[4],
                            n[5],
                            address<uint16_t>(n[6]),
                            address<uint16_t>(n[7]),
                            address<uint8_t>(n[8]),
                            address<uint16_t>(n[9]),
                            address<uint8_t>(n[10]),
                            address<uint16_t>(n[11])};
    if (const char* reason = refuses(index)) return PyErr_Format(PyExc_ValueError, "%s", reason);
    auto* made = new (std::nothrow) AnchorIndex(index);
    if (made == nullptr) return PyErr_NoMemory();
    PyObject* object = PyCapsule_New(made, NAME, release);
    if (object == nullptr) delete made;
    return object;
}

PyObject* call_add_anchors(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 10) return PyErr_Format(PyExc_TypeError, "add_anchors takes 10 arguments, not %zd", count);
    long long n[8], bad;
    const AnchorIndex* index = index_in(given[0]);
    if (index == nullptr || !numbers("add_anchors", given + 1, 8, 8, n)) return nullptr;
    const double limit = PyFloat_AsDouble(given[9]);
    if (limit == -1 && PyErr_Occurred()) return nullptr;
    const NewKeys keys{int(n[0]), address<const uint8_t>(n[1]), n[2], n[3], n[4], n[5], n[6], float(limit)};
    if (!(n[0] == F32 || n[0] == F16 || n[0] == BF16) || n[1] == 0 || n[5] < 0 || n[6] < 1 || n[6] > index->max_blocks - n[5] ||
        index->type == FIXED || index->type == DYNAMIC) {
        PyErr_SetString(PyExc_ValueError, "add_anchors: the keys don't fit the anchors");
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS
    bad = add_anchors(*index, keys, int(n[7]));
    Py_END_ALLOW_THREADS
    if (bad == -2) return PyErr_NoMemory();
    return PyLong_FromLongLong(bad);
}

PyObject* call_anchor_scores(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[9];
    Choice asked;
    const AnchorIndex* index = choice("anchor_scores", given, count, n, asked);
    if (index == nullptr) return nullptr;
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = score_blocks(*index, asked, address<float>(n[7]));
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject* call_choose_blocks(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[9], chosen;
    Choice asked;
    const AnchorIndex* index = choice("choose_blocks", given, count, n, asked);
    if (index == nullptr) return nullptr;
    if (asked.count < 0) return PyErr_Format(PyExc_ValueError, "%lld blocks can't be chosen", n[3]);
    Py_BEGIN_ALLOW_THREADS
    chosen = choose_blocks(*index, asked, address<int32_t>(n[7]));
    Py_END_ALLOW_THREADS
    if (chosen < 0) return PyErr_NoMemory();
    return PyLong_FromLongLong(chosen);
}

}  // namespace ktopt
