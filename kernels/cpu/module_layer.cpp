// Layers for Python: one is made from a dict of its numbers, addresses and matrices, which kernels/cpu/layer.py writes.
#include <cmath>
#include <string>

#include "arguments.h"
#include "layer.h"

namespace ktopt {
namespace {

constexpr const char* NAME = "ktopt.kernels.cpu.layer";

// Reads a description. After the first thing that is wrong, `failed` stays true with an exception set, and all else reads as zero.
class Reader {
public:
    explicit Reader(PyObject* given) : given_(given) {
        if (!PyDict_Check(given)) fail("a layer's description is a dict");
    }
    bool failed() const { return failed_; }

    void fail(const std::string& why) {
        if (!failed_) PyErr_SetString(PyExc_ValueError, why.c_str());
        failed_ = true;
    }

    bool has(const char* key) const {
        PyObject* value = failed_ ? nullptr : PyDict_GetItemString(given_, key);
        return value != nullptr && value != Py_None;
    }

    int64_t number(const char* key) {
        PyObject* value = item(key);
        const long long n = value == nullptr ? 0 : PyLong_AsLongLong(value);
        return checked(n);
    }

    float real(const char* key) {
        PyObject* value = item(key);
        const double x = value == nullptr ? 0 : PyFloat_AsDouble(value);
        return float(checked(x));
    }

    // The address of floats, or null where there are none.
    const float* floats(const char* key) { return has(key) ? reinterpret_cast<const float*>(uintptr_t(number(key))) : nullptr; }

    Norm norm(const char* key) {
        if (!has(key)) return {};
        PyObject* pair = item(key);
        PyObject* weight = PyTuple_Check(pair) && PyTuple_Size(pair) == 2 ? PyTuple_GetItem(pair, 0) : nullptr;
        if (weight == nullptr) {
            fail(std::string(key) + " must be an address and an epsilon");
            return {};
        }
        const long long at = checked(PyLong_AsLongLong(weight));
        return {reinterpret_cast<const float*>(uintptr_t(at)), float(checked(PyFloat_AsDouble(PyTuple_GetItem(pair, 1))))};
    }

    // Matrices on `columns` inputs that give `width` numbers: a list of (kind, address, rows, columns, nbytes, at, bias or 0).
    Bundle bundle(const char* key, int64_t columns, int64_t width) {
        Bundle made;
        PyObject* list = item(key);
        if (list == nullptr || !PyList_Check(list)) {
            fail(std::string(key) + " must be a list of matrices");
            return made;
        }
        int64_t covered = 0;
        for (Py_ssize_t i = 0; i < PyList_Size(list) && !failed_; i++) {
            long long n[7];
            Matrix weight;
            if (!row(PyList_GetItem(list, i), n) || !matrix(n, weight)) {
                failed_ = true;
            } else if (weight.columns != columns || n[5] != covered) {
                fail(std::string(key) + ": a matrix doesn't fit the others");
            } else {
                covered += weight.rows;
                made.add({weight, n[5], reinterpret_cast<const float*>(uintptr_t(n[6]))});
            }
        }
        if (!failed_ && (covered != width || made.products().size() > Bundle::MOST_PRODUCTS))
            fail(std::string(key) + ": the matrices don't give as many numbers as they should");
        return made;
    }

private:
    PyObject* item(const char* key) {
        PyObject* value = failed_ ? nullptr : PyDict_GetItemString(given_, key);
        if (value == nullptr) fail(std::string("the description lacks ") + key);
        return value;
    }

    template <class T>
    T checked(T value) {
        if (!failed_ && PyErr_Occurred()) failed_ = true;
        return failed_ ? T(0) : value;
    }

    bool row(PyObject* tuple, long long (&n)[7]) {
        if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 7) {
            fail("a matrix is seven numbers");
            return false;
        }
        for (int i = 0; i < 7; i++) n[i] = checked(PyLong_AsLongLong(PyTuple_GetItem(tuple, i)));
        return !failed_;
    }

    PyObject* given_;
    bool failed_ = false;
};

constexpr int64_t MOST_DIM = 1024, MOST_HEADS = 4096, MOST_WIDTH = 1 << 24;

bool within(int64_t n, int64_t least, int64_t most) { return n >= least && n <= most; }

void read_attention(Reader& in, Layer& layer) {
    Attention& a = layer.attention;
    a.heads = in.number("heads");
    a.kv_heads = in.number("kv_heads");
    a.head_dim = in.number("head_dim");
    a.rotary_dim = in.number("rotary_dim");
    a.window = in.number("window");
    a.scale = in.real("scale");
    if (!in.failed() &&
        (!within(a.kv_heads, 1, MOST_HEADS) || !within(a.heads, a.kv_heads, MOST_HEADS) || a.heads % a.kv_heads != 0 ||
         !within(a.head_dim, 16, MOST_DIM) || a.head_dim % 16 != 0 || !within(a.rotary_dim, 2, a.head_dim) ||
         a.rotary_dim % 2 != 0 || a.window < 0))
        in.fail("the attention's heads or dimensions are none that the kernels have");
    a.q_norm = in.norm("q_norm");
    a.k_norm = in.norm("k_norm");
    if (in.failed()) return;
    a.qkv = in.bundle("qkv", layer.hidden, (a.heads + 2 * a.kv_heads) * a.head_dim);
    a.output = in.bundle("output", a.heads * a.head_dim, layer.hidden);
}

void read_mlp(Reader& in, Layer& layer) {
    Mlp& m = layer.mlp;
    m.activation = int(in.number("activation"));
    m.intermediate = in.number("intermediate");
    if (!in.failed() && (!within(m.activation, SILU, RELU) || !within(m.intermediate, 1, MOST_WIDTH)))
        in.fail("the MLP's activation or size is none that the kernels have");
    if (in.failed()) return;
    m.gate_up = in.bundle("gate_up", layer.hidden, 2 * m.intermediate);
    m.down = in.bundle("down", m.intermediate, layer.hidden);
}

void destroy(PyObject* capsule) { delete static_cast<Layer*>(PyCapsule_GetPointer(capsule, NAME)); }

const char* unfit(const Run& run) {
    if (run.x == nullptr || run.cos == nullptr || run.sin == nullptr) return "an address is missing";
    if (!within(run.batch, 1, 1 << 20) || !within(run.tokens, 1, 1 << 30)) return "there must be a sequence and a token";
    const KeyValueCache& c = run.cache;
    if (c.kind != F32 && c.kind != F16 && c.kind != BF16) return "a cache holds float32, float16 or bfloat16";
    if (c.keys == nullptr || c.values == nullptr) return "there is no cache";
    if (c.past < 0 || c.capacity < c.past + run.tokens) return "the cache is too small";
    return nullptr;
}

}  // namespace

PyObject* make_layer(PyObject*, PyObject* description) {
    Reader in(description);
    auto layer = std::make_unique<Layer>();
    layer->hidden = in.number("hidden");
    if (!in.failed() && !within(layer->hidden, 1, MOST_WIDTH)) in.fail("a layer needs a hidden size");
    layer->before_attention = in.norm("before_attention");
    layer->after_attention = in.norm("after_attention");
    layer->before_mlp = in.norm("before_mlp");
    layer->after_mlp = in.norm("after_mlp");
    if (!in.failed() && (layer->before_attention.weight == nullptr || layer->before_mlp.weight == nullptr))
        in.fail("a layer norms before its attention and before its MLP");
    read_attention(in, *layer);
    read_mlp(in, *layer);
    return in.failed() ? nullptr : PyCapsule_New(layer.release(), NAME, destroy);
}

PyObject* run_layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[13];
    auto* layer = count < 1 ? nullptr : static_cast<const Layer*>(PyCapsule_GetPointer(given[0], NAME));
    if (count < 1) PyErr_SetString(PyExc_TypeError, "run_layer needs a layer");
    if (layer == nullptr || !numbers("run_layer", given + 1, count - 1, 13, n)) return nullptr;
    const Run r{address<float>(n[0]), n[1], n[2], address<const float>(n[3]), address<const float>(n[4]), n[5] != 0,
                {int(n[6]), address<uint8_t>(n[7]), address<uint8_t>(n[8]), n[9], n[10]},
                address<const int64_t>(n[11]), int(n[12])};
    if (const char* reason = unfit(r)) {
        PyErr_SetString(PyExc_ValueError, reason);
        return nullptr;
    }
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = run(*layer, r);
    Py_END_ALLOW_THREADS
    if (outcome == Outcome::no_memory) return PyErr_NoMemory();
    if (outcome == Outcome::beyond_float16) {
        PyErr_SetString(PyExc_OverflowError, "a key or a value is beyond float16");
        return nullptr;
    }
    Py_RETURN_NONE;
}

}  // namespace ktopt
