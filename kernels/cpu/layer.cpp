#include "layer.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention_decode.h"
#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t TOGETHER = 512;    // tokens that go through a layer's products at a time: what they need stays in the cache
constexpr int64_t SERIAL_TOKENS = 4;  // so few are normed and rotated on the calling thread: handing over takes longer
constexpr int64_t TOKENS_A_PART = 8;

thread_local Scratch layer_scratch;

// f(token) for all tokens, shared out where it pays.
template <class Function>
void each(int64_t tokens, int threads, Function f) {
    if (tokens <= SERIAL_TOKENS || threads <= 1) {
        for (int64_t t = 0; t < tokens; t++) f(t);
        return;
    }
    struct Job {
        Function* f;
        int64_t tokens;
    } job{&f, tokens};
    run_parts(
        [](void* given, int64_t part) {
            const Job& j = *static_cast<Job*>(given);
            const int64_t end = std::min(j.tokens, (part + 1) * TOKENS_A_PART);
            for (int64_t t = part * TOKENS_A_PART; t < end; t++) (*j.f)(t);
        },
        &job, (tokens + TOKENS_A_PART - 1) / TOKENS_A_PART, threads, tokens >= 8 * TOKENS_A_PART);
}

// Some tokens on their way through a layer: those of one sequence, or one of each.
class Slab {
public:
    Slab(const Layer& layer, const Run& run, int64_t sequence, int64_t token, int64_t count)
        : layer_(layer), run_(run), isa_(kernels()), sequence_(sequence), token_(token), count_(count),
          x_(run.x + (sequence * run.tokens + token) * layer.hidden) {}

    Outcome go() {
        if (!reserve()) return Outcome::no_memory;
        attention();
        if (outcome_ == Outcome::done) mlp();
        return outcome_;
    }

private:
    // Memory for the widest of what stands between the products.
    bool reserve() {
        const Attention& a = layer_.attention;
        const int64_t widest = std::max({layer_.hidden, a.heads * a.head_dim, layer_.mlp.intermediate});
        const int64_t results = std::max({a.qkv.width() + a.heads * a.head_dim, 2 * layer_.mlp.intermediate});
        const size_t n = size_t(count_);
        if (!layer_scratch.reset(2 * Scratch::room<float>(n * size_t(layer_.hidden)) + Scratch::room<float>(n * size_t(results)) +
                                 Scratch::room<Activations>(n * size_t(activation_blocks(widest)))))
            return false;
        normed_ = layer_scratch.take<float>(n * size_t(layer_.hidden));
        made_ = layer_scratch.take<float>(n * size_t(layer_.hidden));
        results_ = layer_scratch.take<float>(n * size_t(results));
        quantized_ = layer_scratch.take<Activations>(n * size_t(activation_blocks(widest)));
        return true;
    }

    Input input(const float* x, int64_t width) const { return {x, width, quantized_, activation_blocks(width)}; }

    // What `bundle` reads of token t's x.
    void prepare(const Bundle& bundle, const float* x, int64_t width, int64_t t) {
        if (bundle.quantized()) isa_.quantize(x + t * width, width, quantized_ + t * activation_blocks(width));
    }

    Input normed(const Norm& norm, const Bundle& bundle) {
        const int64_t hidden = layer_.hidden;
        each(count_, run_.threads, [&](int64_t t) {
            isa_.rms_norm(x_ + t * hidden, norm.weight, hidden, norm.eps, normed_ + t * hidden);
            prepare(bundle, normed_, hidden, t);
        });
        return input(normed_, hidden);
    }

    // x += bundle(in), normed first where there is a norm.
    void residual(const Bundle& bundle, const Input& in, const Norm& norm) {
        const int64_t hidden = layer_.hidden;
        if (norm.weight == nullptr) {
            bundle.run(in, count_, x_, hidden, true, run_.threads);
            return;
        }
        bundle.run(in, count_, made_, hidden, false, run_.threads);
        each(count_, run_.threads, [&](int64_t t) {
            isa_.rms_norm(made_ + t * hidden, norm.weight, hidden, norm.eps, made_ + t * hidden);
            isa_.add(made_ + t * hidden, hidden, x_ + t * hidden);
        });
    }

    int64_t sequence_of(int64_t t) const { return run_.tokens == 1 ? sequence_ + t : sequence_; }
    int64_t token_of(int64_t t) const { return run_.tokens == 1 ? 0 : token_ + t; }

    int64_t head_bytes() const {
        return run_.cache.capacity * layer_.attention.head_dim * layout_of(run_.cache.kind).bytes;
    }

    void rotated(float* head, const Norm& norm, int64_t t) {
        const Attention& a = layer_.attention;
        if (norm.weight != nullptr) isa_.rms_norm(head, norm.weight, a.head_dim, norm.eps, head);
        const int64_t at = ((run_.one_rotation ? 0 : sequence_of(t) * run_.tokens) + token_of(t)) * a.rotary_dim;
        isa_.rotate(head, run_.cos + at, run_.sin + at, a.rotary_dim);
    }

    // Norms and rotates a token's heads, and puts its keys and values into the cache.
    bool remember(float* qkv, int64_t t) {
        const Attention& a = layer_.attention;
        const KeyValueCache& cache = run_.cache;
        for (int64_t h = 0; h < a.heads; h++) rotated(qkv + h * a.head_dim, a.q_norm, t);
        const int64_t item = layout_of(cache.kind).bytes;
        bool fits = true;
        for (int64_t h = 0; h < a.kv_heads; h++) {
            float* key = qkv + (a.heads + h) * a.head_dim;
            rotated(key, a.k_norm, t);
            const int64_t at = (sequence_of(t) * a.kv_heads + h) * head_bytes() + (cache.past + token_of(t)) * a.head_dim * item;
            fits &= isa_.narrow(cache.kind, key, a.head_dim, cache.keys + at);
            fits &= isa_.narrow(cache.kind, key + a.kv_heads * a.head_dim, a.head_dim, cache.values + at);
        }
        return fits;
    }

    void attention() {
        const Attention& a = layer_.attention;
        const int64_t width = a.qkv.width(), out_width = a.heads * a.head_dim;
        float *qkv = results_, *attended = results_ + count_ * width;
        a.qkv.run(normed(layer_.before_attention, a.qkv), count_, qkv, width, false, run_.threads);
        std::atomic<bool> fit{true};
        each(count_, run_.threads, [&](int64_t t) {
            if (!remember(qkv + t * width, t)) fit = false;
        });
        if (!fit) {
            outcome_ = Outcome::beyond_float16;
            return;
        }
        if (!attend(qkv, attended)) {
            outcome_ = Outcome::no_memory;
            return;
        }
        each(count_, run_.threads, [&](int64_t t) { prepare(a.output, attended, out_width, t); });
        residual(a.output, input(attended, out_width), layer_.after_attention);
    }

    // What token t sees: from the first that is no padding, and within the window, to itself.
    Sight sight(int64_t t) const {
        const Attention& a = layer_.attention;
        const int64_t end = run_.cache.past + token_of(t) + 1, sequence = sequence_of(t);
        int64_t start = run_.starts == nullptr ? 0 : run_.starts[sequence];
        if (a.window > 0) start = std::max(start, end - a.window);
        start = std::min(start, end - 1);
        const int64_t at = sequence * a.kv_heads * head_bytes() + start * a.head_dim * layout_of(run_.cache.kind).bytes;
        return {run_.cache.keys + at, run_.cache.values + at, end - start};
    }

    bool attend(const float* q, float* out) {
        const Attention& a = layer_.attention;
        const DecodeShape shape{run_.cache.kind, a.heads,      a.kv_heads,   a.head_dim,
                                a.head_dim,      head_bytes(), head_bytes(), a.scale};
        std::vector<Sight> sights;
        for (int64_t t = 0; t < count_; t++) sights.push_back(sight(t));
        return decode_attention(shape, sights.data(), count_, q, a.qkv.width(), out, a.heads * a.head_dim, run_.threads);
    }

    void mlp() {
        const Mlp& m = layer_.mlp;
        const int64_t n = m.intermediate;
        float* both = results_;
        m.gate_up.run(normed(layer_.before_mlp, m.gate_up), count_, both, 2 * n, false, run_.threads);
        each(count_, run_.threads, [&](int64_t t) {
            float* gate = both + 2 * t * n;
            isa_.gated(m.activation, gate, gate + n, n, gate);
            if (m.down.quantized()) isa_.quantize(gate, n, quantized_ + t * activation_blocks(n));
        });
        residual(m.down, {both, 2 * n, quantized_, activation_blocks(n)}, layer_.after_mlp);
    }

    const Layer& layer_;
    const Run& run_;
    const Kernels& isa_;
    const int64_t sequence_, token_, count_;
    float* x_;
    float *normed_ = nullptr, *made_ = nullptr, *results_ = nullptr;
    Activations* quantized_ = nullptr;
    Outcome outcome_ = Outcome::done;
};

}  // namespace

Outcome run(const Layer& layer, const Run& run) {
    const int64_t sequences = run.tokens == 1 ? 1 : run.batch, tokens = run.tokens == 1 ? run.batch : run.tokens;
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t t = 0; t < tokens; t += TOGETHER) {
            const int64_t count = std::min(TOGETHER, tokens - t);
            Slab slab(layer, run, run.tokens == 1 ? t : s, run.tokens == 1 ? 0 : t, count);
            const Outcome outcome = slab.go();
            if (outcome != Outcome::done) return outcome;
        }
    return Outcome::done;
}

}  // namespace ktopt
