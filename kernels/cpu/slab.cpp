#include "slab.h"

#include <cmath>

#include "scratch.h"

namespace ktopt {
namespace {

thread_local Scratch slab_scratch;

}  // namespace

Slab::Slab(const Layer& layer, const Run& run, int64_t sequence, int64_t token, int64_t count)
    : layer_(layer), run_(run), isa_(kernels()), sequence_(sequence), token_(token), count_(count),
      x_(run.x + row() * layer.hidden) {}

Outcome Slab::go() {
    if (!reserve()) return Outcome::no_memory;
    const int64_t attended = layer_.attention.heads * layer_.attention.head_dim;
    if (run_.attended != nullptr) add_attended(run_.attended + row() * attended, attended);
    if (run_.ragged != nullptr) find_spans();
    if (run_.cache != nullptr || run_.pages != nullptr) grouped_attention();
    if (run_.latents != nullptr) latent_attention();
    if (outcome_ != Outcome::done || run_.queries != nullptr) return outcome_;
    if (layer_.routed.experts == nullptr) {
        dense_mlp();
    } else {
        routed_mlp();
    }
    return outcome_;
}

// Memory for the widest of what stands between the products.
bool Slab::reserve() {
    const Attention& a = layer_.attention;
    const LatentAttention& l = layer_.latent;
    const RoutedMlp& r = layer_.routed;
    const int64_t query = l.shape.heads * (l.shape.nope + l.shape.rope), attended = l.shape.heads * l.shape.value;
    const int64_t widest = std::max({layer_.hidden, a.heads * a.head_dim, l.q_rank, attended, layer_.mlp.intermediate});
    const int64_t results = std::max({a.qkv.width() + a.heads * a.head_dim, l.first.width() + query + attended,
                                      2 * layer_.mlp.intermediate, r.products.width() + 2 * r.routing.chosen + 1});
    const size_t n = size_t(count_);
    if (!slab_scratch.reset(2 * Scratch::room<float>(n * size_t(layer_.hidden)) + Scratch::room<float>(n * size_t(results)) +
                            Scratch::room<Activations>(n * size_t(activation_blocks(widest)))))
        return false;
    normed_ = slab_scratch.take<float>(n * size_t(layer_.hidden));
    made_ = slab_scratch.take<float>(n * size_t(layer_.hidden));
    results_ = slab_scratch.take<float>(n * size_t(results));
    quantized_ = slab_scratch.take<Activations>(n * size_t(activation_blocks(widest)));
    return true;
}

Input Slab::normed(const Norm& norm, const Bundle& bundle) {
    const int64_t hidden = layer_.hidden;
    each_token(count_, run_.threads, [&](int64_t t) {
        isa_.rms_norm(x_ + t * hidden, norm.weight, hidden, norm.eps, normed_ + t * hidden);
        prepare(bundle, normed_, hidden, t);
    });
    return input(normed_, hidden);
}

void Slab::residual(const Bundle& bundle, const Input& in, const Norm& norm) {
    const bool plain = norm.weight == nullptr;
    bundle.run(in, count_, plain ? x_ : made_, layer_.hidden, plain, run_.threads, many());
    if (!plain) add_normed(norm);
}

void Slab::add_normed(const Norm& norm) {
    const int64_t hidden = layer_.hidden;
    each_token(count_, run_.threads, [&](int64_t t) {
        isa_.rms_norm(made_ + t * hidden, norm.weight, hidden, norm.eps, made_ + t * hidden);
        isa_.add(made_ + t * hidden, hidden, x_ + t * hidden);
    });
}

void Slab::dense_mlp() {
    const Mlp& m = layer_.mlp;
    const int64_t n = m.intermediate;
    float* both = results_;
    m.gate_up.run(normed(layer_.before_mlp, m.gate_up), count_, both, 2 * n, false, run_.threads, many());
    each_token(count_, run_.threads, [&](int64_t t) {
        float* gate = both + 2 * t * n;
        isa_.gated(m.activation, gate, gate + n, n, gate);
        if (m.down.quantized()) isa_.quantize(gate, n, quantized_ + t * activation_blocks(n));
    });
    residual(m.down, {both, 2 * n, quantized_, activation_blocks(n)}, layer_.after_mlp);
}

void Slab::routed_mlp() {
    const RoutedMlp& m = layer_.routed;
    const int64_t hidden = layer_.hidden, width = m.products.width(), chosen = m.routing.chosen;
    float *products = results_, *weights = products + count_ * width, *shared = weights + count_ * chosen;
    auto* ids = reinterpret_cast<int32_t*>(shared + count_);
    each_token(count_, run_.threads, [&](int64_t t) {
        isa_.rms_norm(x_ + t * hidden, layer_.before_mlp.weight, hidden, layer_.before_mlp.eps, normed_ + t * hidden);
        isa_.quantize(normed_ + t * hidden, hidden, quantized_ + t * activation_blocks(hidden));
    });
    m.products.run(input(normed_, hidden), count_, products, width, false, run_.threads, many());
    each_token(count_, run_.threads, [&](int64_t t) {
        choose(m.routing, products + t * width, ids + t * chosen, weights + t * chosen);
        if (m.gated) shared[t] = 1.0f / (1.0f + std::exp(-products[t * width + m.routing.experts]));
    });
    const bool plain = layer_.after_mlp.weight == nullptr;
    const ExpertsResult result =
        run_experts(*m.experts, {count_, normed_, false, quantized_, many()},
                    {chosen, ids, false, weights, m.gated ? shared : nullptr}, plain ? x_ : made_, hidden, plain, run_.threads);
    if (result.status != ExpertsResult::DONE) outcome_ = Outcome::no_memory;  // choose() names no others
    if (!plain) add_normed(layer_.after_mlp);
}

}  // namespace ktopt
