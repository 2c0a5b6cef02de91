// Layers for Python: one is made from a dict of its numbers, addresses and matrices, which kernels/cpu/layer.py writes.
#include <cmath>
#include <string>

#include "arguments.h"
#include "layer.h"

namespace ktopt {
namespace {

constexpr const char* NAME = "ktopt.kernels.cpu.layer";

constexpr int64_t MOST_DIM = 1024, MOST_HEADS = 4096, MOST_WIDTH = 1 << 24;

bool within(int64_t n, int64_t least, int64_t most) { return n >= least && n <= most; }

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

    // A borrowed reference, or null.
    PyObject* object(const char* key) { return item(key); }

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

    // One matrix a head, from the numbers that head_matrices takes.
    HeadMatrices heads(const char* key, int64_t count) {
        PyObject* tuple = item(key);
        long long n[7] = {};
        HeadMatrices made{};
        if (tuple == nullptr || !PyTuple_Check(tuple) || PyTuple_Size(tuple) != 7) fail(std::string(key) + " must be seven numbers");
        for (int i = 0; i < 7 && !failed_; i++) n[i] = checked(PyLong_AsLongLong(PyTuple_GetItem(tuple, i)));
        if (!failed_ && !head_matrices(n, count, made)) failed_ = true;
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

void read_latent(Reader& in, Layer& layer) {
    LatentAttention& a = layer.latent;
    a.shape = {in.number("heads"), in.number("nope"), in.number("rope"), in.number("latent"), in.number("value")};
    a.q_rank = in.number("q_rank");
    a.pairing = int(in.number("pairing"));
    a.scale = in.real("scale");
    const LatentShape& s = a.shape;
    if (!in.failed() && (!within(s.heads, 1, MOST_HEADS) || !within(s.nope, 1, MOST_DIM) || !within(s.rope, 2, MOST_DIM) ||
                         s.rope % 2 != 0 || !within(s.latent, 16, 1 << 14) || s.latent % 16 != 0 || !within(s.value, 1, MOST_DIM) ||
                         !within(a.q_rank, 0, MOST_WIDTH) || !within(a.pairing, HALVES, NEIGHBOURS)))
        in.fail("the latent attention's heads or dimensions are none that the kernels have");
    a.q_norm = in.norm("q_norm");
    a.latent_norm = in.norm("latent_norm");
    if (!in.failed() && (a.latent_norm.weight == nullptr || (a.q_rank > 0 && a.q_norm.weight == nullptr)))
        in.fail("a latent needs a norm");
    if (in.failed()) return;
    const int64_t query = s.heads * (s.nope + s.rope);
    a.first = in.bundle("first", layer.hidden, (a.q_rank > 0 ? a.q_rank : query) + s.width());
    if (a.q_rank > 0) a.second = in.bundle("second", a.q_rank, query);
    a.output = in.bundle("output", s.heads * s.value, layer.hidden);
    a.keys = in.heads("keys", s.heads);
    a.values = in.heads("values", s.heads);
    const bool fit = a.keys.transposed ? a.keys.rows == s.nope && a.keys.columns == s.latent
                                       : a.keys.rows == s.latent && a.keys.columns == s.nope;
    if (!in.failed() && (!fit || a.values.rows != s.value || a.values.columns != s.latent || a.values.transposed))
        in.fail("kv_b_proj doesn't fit the heads");
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

void read_routed(Reader& in, Layer& layer) {
    RoutedMlp& m = layer.routed;
    m.experts = experts_in(in.object("experts"));
    if (m.experts == nullptr) in.fail("experts must be what experts() made");
    Routing& r = m.routing;
    r.experts = in.number("routed");
    r.chosen = in.number("chosen");
    r.sigmoid = in.number("sigmoid") != 0;
    r.normalize = in.number("normalize") != 0;
    r.sum_of_two = in.number("sum_of_two") != 0;
    r.scale = in.real("routed_scale");
    r.bias = in.floats("choice_bias");
    r.groups = in.number("groups");
    r.kept_groups = in.number("kept_groups");
    m.gated = in.number("gated") != 0;
    if (in.failed()) return;
    if (!within(r.experts, 1, MOST_EXPERTS) || r.experts != int64_t(m.experts->routed.size()) ||
        m.experts->hidden() != layer.hidden || !within(r.groups, 1, r.experts) || r.experts % r.groups != 0 ||
        !within(r.kept_groups, 1, r.groups) || !within(r.chosen, 1, r.experts / r.groups * r.kept_groups) ||
        (m.gated && !m.experts->has_shared)) {
        in.fail("the router doesn't fit the experts");
        return;
    }
    m.products = in.bundle("router", layer.hidden, r.experts + m.gated);
}

void destroy(PyObject* capsule) { delete static_cast<Layer*>(PyCapsule_GetPointer(capsule, NAME)); }

const char* unfit_latents(const Layer& layer, const LatentCache& cache) {
    if (layer.latent.shape.heads == 0) return "the layer's attention isn't latent";
    if (cache.kind != F32 && cache.kind != F16 && cache.kind != BF16 && cache.kind != Q8_0)
        return "a cache of latents holds float32, float16, bfloat16 or Q8_0";
    if (layer.latent.shape.width() % layout_of(cache.kind).elements != 0) return "a token of the cache must be whole blocks";
    if (cache.data == nullptr) return "there is no cache";
    if (!within(cache.pages, 1, INT32_MAX) || !within(cache.page_tokens, 1, INT32_MAX)) return "the cache is too small";
    return nullptr;
}

const char* unfit_ragged(const Layer& layer, const Run& run) {
    const Ragged& r = *run.ragged;
    if (r.firsts == nullptr || r.pasts == nullptr || r.tables == nullptr) return "an address is missing";
    if (!within(r.sequences, 1, run.tokens) || r.firsts[0] != 0 || r.firsts[r.sequences] != run.tokens)
        return "the rows aren't those of the sequences";
    if (!within(r.page_tokens, 16, 1 << 20) || r.page_tokens % 16 != 0) return "pages must have a multiple of 16 tokens";
    if (run.latents == nullptr) {
        const PagedKeyValues& c = *run.pages;
        if (layer.attention.heads == 0) return "the layer's attention is latent";
        if (c.kind != F32 && c.kind != F16 && c.kind != BF16) return "a cache holds float32, float16 or bfloat16";
        if (c.keys == nullptr || c.values == nullptr) return "there is no cache";
    } else if (const char* reason = unfit_latents(layer, run.latents->cache)) {
        return reason;
    }
    const int64_t pages = run.latents != nullptr ? run.latents->cache.pages : run.pages->pages;
    for (int64_t s = 0; s < r.sequences; s++) {
        const int64_t count = r.firsts[s + 1] - r.firsts[s];
        if (count < 1 || !within(r.pasts[s], 0, 1 << 30) || r.tables[s] == nullptr) return "a sequence has no new tokens, or no pages";
        for (int64_t i = 0; i * r.page_tokens < r.pasts[s] + count; i++)
            if (!within(r.tables[s][i], 0, pages - 1)) return "a page lies beyond the cache";
    }
    return nullptr;
}

const char* unfit(const Layer& layer, const Run& run) {
    if (run.x == nullptr || run.cos == nullptr || run.sin == nullptr) return "an address is missing";
    if (!within(run.batch, 1, 1 << 20) || !within(run.tokens, 1, 1 << 30)) return "there must be a sequence and a token";
    if (run.ragged != nullptr) return unfit_ragged(layer, run);
    if (run.cache != nullptr) {
        const KeyValueCache& c = *run.cache;
        if (layer.attention.heads == 0) return "the layer's attention is latent";
        if (c.kind != F32 && c.kind != F16 && c.kind != BF16) return "a cache holds float32, float16 or bfloat16";
        if (c.keys == nullptr || c.values == nullptr) return "there is no cache";
        if (c.past < 0 || c.capacity < c.past + run.tokens) return "the cache is too small";
    }
    if (run.latents != nullptr) {
        const PagedLatents& l = *run.latents;
        if (const char* reason = unfit_latents(layer, l.cache)) return reason;
        if (l.table == nullptr) return "there is no cache";
        if (l.past < 0 || l.table_columns * l.cache.page_tokens < l.past + run.tokens) return "the cache is too small";
        const int64_t columns = (l.past + run.tokens + l.cache.page_tokens - 1) / l.cache.page_tokens;
        for (int64_t s = 0; s < run.batch; s++)
            for (int64_t i = 0; i < columns; i++)
                if (!within(l.table[s * l.table_columns + i], 0, l.cache.pages - 1)) return "a page lies beyond the cache";
    }
    return nullptr;
}

// The layer and the numbers after it; null with an exception set where they aren't.
const Layer* layer_and(const char* name, PyObject* const* given, Py_ssize_t count, Py_ssize_t wanted, long long* n) {
    if (count < 1) {
        PyErr_Format(PyExc_TypeError, "%s needs a layer", name);
        return nullptr;
    }
    auto* layer = static_cast<const Layer*>(PyCapsule_GetPointer(given[0], NAME));
    return layer != nullptr && numbers(name, given + 1, count - 1, wanted, n) ? layer : nullptr;
}

PyObject* ran(const Layer& layer, const Run& r) {
    if (const char* reason = unfit(layer, r)) {
        PyErr_SetString(PyExc_ValueError, reason);
        return nullptr;
    }
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = run(layer, r);
    Py_END_ALLOW_THREADS
    if (outcome == Outcome::no_memory) return PyErr_NoMemory();
    if (outcome == Outcome::beyond_float16) {
        PyErr_SetString(PyExc_OverflowError, "a key or a value is beyond float16");
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* missing() {
    PyErr_SetString(PyExc_ValueError, "an address is missing, or the layer's attention is latent");
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
    if (in.has("nope")) {
        read_latent(in, *layer);
    } else {
        read_attention(in, *layer);
    }
    if (in.has("experts")) {
        read_routed(in, *layer);
    } else {
        read_mlp(in, *layer);
    }
    return in.failed() ? nullptr : PyCapsule_New(layer.release(), NAME, destroy);
}

PyObject* run_layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[13];
    const Layer* layer = layer_and("run_layer", given, count, 13, n);
    if (layer == nullptr) return nullptr;
    const KeyValueCache cache{int(n[6]), address<uint8_t>(n[7]), address<uint8_t>(n[8]), n[9], n[10]};
    return ran(*layer, {address<float>(n[0]), n[1], n[2], address<const float>(n[3]), address<const float>(n[4]), n[5] != 0, &cache,
                        nullptr, address<const int64_t>(n[11]), int(n[12])});
}

PyObject* run_before_attention(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[13];
    const Layer* layer = layer_and("run_before_attention", given, count, 13, n);
    if (layer == nullptr) return nullptr;
    const KeyValueCache cache{int(n[6]), address<uint8_t>(n[7]), address<uint8_t>(n[8]), n[9], n[10]};
    Run run{address<float>(n[0]), n[1], n[2], address<const float>(n[3]), address<const float>(n[4]), n[5] != 0, &cache,
            nullptr, nullptr, int(n[12])};
    run.queries = address<float>(n[11]);
    return run.queries == nullptr ? missing() : ran(*layer, run);
}

PyObject* run_after_attention(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[4];
    const Layer* layer = layer_and("run_after_attention", given, count, 4, n);
    if (layer == nullptr) return nullptr;
    auto* x = address<float>(n[0]);
    Run run{x, 1, n[1], x, x, true, nullptr, nullptr, nullptr, int(n[3])};
    run.attended = address<const float>(n[2]);
    return run.attended == nullptr || layer->attention.heads == 0 ? missing() : ran(*layer, run);
}

PyObject* run_latent_layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[15];
    const Layer* layer = layer_and("run_latent_layer", given, count, 15, n);
    if (layer == nullptr) return nullptr;
    const PagedLatents latents{{int(n[6]), address<const uint8_t>(n[7]), n[8], n[9]}, address<const int32_t>(n[10]), n[11], n[12]};
    return ran(*layer, {address<float>(n[0]), n[1], n[2], address<const float>(n[3]), address<const float>(n[4]), n[5] != 0, nullptr,
                        &latents, address<const int64_t>(n[13]), int(n[14])});
}

// Rows of many sequences, of either attention; latents have no values.
PyObject* run_paged(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[15];
    const Layer* layer = layer_and("run_paged", given, count, 15, n);
    if (layer == nullptr) return nullptr;
    const bool is_latent = layer->latent.shape.heads > 0;
    const Ragged ragged{n[9], address<const int64_t>(n[10]), address<const int64_t>(n[11]), address<const int32_t* const>(n[12]), n[8],
                        n[14] != 0};
    const PagedKeyValues pages{int(n[4]), address<uint8_t>(n[5]), address<uint8_t>(n[6]), n[7]};
    const PagedLatents latents{{int(n[4]), address<const uint8_t>(n[5]), n[7], n[8]}, nullptr, 0, 0};
    Run run{address<float>(n[0]), 1, n[1], address<const float>(n[2]), address<const float>(n[3]), true, nullptr,
            is_latent ? &latents : nullptr, nullptr, int(n[13])};
    run.ragged = &ragged;
    run.pages = is_latent ? nullptr : &pages;
    return ran(*layer, run);
}

PyObject* run_mlp(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[3];
    const Layer* layer = layer_and("run_mlp", given, count, 3, n);
    if (layer == nullptr) return nullptr;
    auto* x = address<float>(n[0]);
    return ran(*layer, {x, 1, n[1], x, x, true, nullptr, nullptr, nullptr, int(n[2])});
}

}  // namespace ktopt
