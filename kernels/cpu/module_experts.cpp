// Python's functions around experts.h.
#include <new>

#include "arguments.h"
#include "experts.h"

namespace ktopt {
namespace {

constexpr char NAME[] = "ktopt.experts";
constexpr Py_ssize_t MATRIX = 5, EXPERT = 3 * MATRIX;  // numbers of one

void release(PyObject* object) { delete static_cast<Experts*>(PyCapsule_GetPointer(object, NAME)); }

bool expert(PyObject* const* given, Expert& out) {
    long long n[EXPERT];
    return numbers("experts", given, EXPERT, EXPERT, n) && matrix(n, out.gate) && matrix(n + MATRIX, out.up) &&
           matrix(n + 2 * MATRIX, out.down);
}

bool fill(Experts& experts, bool shared, PyObject* const* given, Py_ssize_t count) {
    try {
        experts.routed.resize(size_t(count - shared));
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t e = 0; e < count; e++)
        if (!expert(given + e * EXPERT, e < count - shared ? experts.routed[size_t(e)] : experts.shared)) return false;
    experts.has_shared = shared;
    if (const char* reason = refuses(experts)) {
        PyErr_SetString(PyExc_ValueError, reason);
        return false;
    }
    return true;
}

}  // namespace

const Experts* experts_in(PyObject* object) { return static_cast<const Experts*>(PyCapsule_GetPointer(object, NAME)); }

PyObject* make_experts(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[2];
    if (count < 2 || (count - 2) % EXPERT != 0) {
        PyErr_Format(PyExc_TypeError, "experts takes 2 numbers and %zd for each expert, not %zd", EXPERT, count);
        return nullptr;
    }
    if (!numbers("experts", given, 2, 2, n)) return nullptr;
    auto* made = new (std::nothrow) Experts{int(n[0]), {}, false, {}};
    if (made == nullptr) return PyErr_NoMemory();
    const bool shared = n[1] != 0 && count > 2;
    PyObject* object = fill(*made, shared, given + 2, (count - 2) / EXPERT) ? PyCapsule_New(made, NAME, release) : nullptr;
    if (object == nullptr) delete made;
    return object;
}

PyObject* call_experts(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 13) return PyErr_Format(PyExc_TypeError, "run_experts takes 13 arguments, not %zd", count);
    long long n[12];
    const Experts* experts = experts_in(given[0]);
    if (experts == nullptr || !numbers("run_experts", given + 1, 12, 12, n)) return nullptr;
    const long long x = n[0], tokens = n[2], chosen = n[3], weights = n[5], each = n[6], out = n[8], out_stride = n[9];
    if (x == 0 || out == 0 || tokens < 1 || tokens > (1 << 24) || each < 0 || each > (1 << 16) || out_stride < experts->hidden() ||
        (each > 0 && (chosen == 0 || weights == 0))) {
        PyErr_SetString(PyExc_ValueError, "run_experts: the tokens, the choices or the result don't fit the experts");
        return nullptr;
    }
    const Hidden hidden{tokens, address<void>(x), n[1] != 0, nullptr};
    const Choices choices{each, address<void>(chosen), n[4] != 0, address<float>(weights), address<float>(n[7])};
    ExpertsResult result;
    Py_BEGIN_ALLOW_THREADS
    result = run_experts(*experts, hidden, choices, address<float>(out), out_stride, n[10] != 0, int(n[11]));
    Py_END_ALLOW_THREADS
    if (result.status == ExpertsResult::NO_MEMORY) return PyErr_NoMemory();
    if (result.status == ExpertsResult::DONE) Py_RETURN_NONE;
    const long long named = choices.wide ? static_cast<const int64_t*>(choices.experts)[result.place]
                                         : static_cast<const int32_t*>(choices.experts)[result.place];
    return PyErr_Format(PyExc_ValueError, "token %lld chose expert %lld, and there are experts 0 to %lld",
                        (long long)(result.place / each), named, (long long)(experts->routed.size()) - 1);
}

}  // namespace ktopt
