// A slab's multi-head latent attention, absorbed.
#include <atomic>
#include <vector>

#include "slab.h"

namespace ktopt {
namespace {

// Rotates the `dim` numbers of x in place; `turned` is memory for as many.
void rotate_pairs(int pairing, const Kernels& isa, float* x, const float* cos, const float* sin, int64_t dim, float* turned) {
    if (pairing == HALVES) {
        isa.rotate(x, cos, sin, dim);
        return;
    }
    const int64_t half = dim / 2, apart = pairing == NEIGHBOURS ? 1 : half, step = pairing == NEIGHBOURS ? 2 : 1;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        turned[i * step] = a * cos[i] - b * sin[i];
        turned[i * step + apart] = b * cos[i] + a * sin[i];
    }
    std::copy_n(turned, dim, x);
}

constexpr int64_t MOST_ROPE = 1024;

}  // namespace

// Norms and rotates token t's latent, and puts it into its page. `made` is its latent and its rotary key.
bool Slab::remember_latent(float* made, int64_t t) {
    const LatentAttention& a = layer_.latent;
    const PagedLatents& latents = *run_.latents;
    const LatentCache& cache = latents.cache;
    float turned[MOST_ROPE];
    const int64_t at = rotation(t, a.shape.rope);
    isa_.rms_norm(made, a.latent_norm.weight, a.shape.latent, a.latent_norm.eps, made);
    rotate_pairs(a.pairing, isa_, made + a.shape.latent, run_.cos + at, run_.sin + at, a.shape.rope, turned);
    const int64_t token = latents.past + token_of(t), size = cache.page_tokens;
    const int64_t to_slot = run_.ragged != nullptr ? slot(t)
                                                   : latents.table[sequence_of(t) * latents.table_columns + token / size] * size + token % size;
    const Layout layout = layout_of(cache.kind);
    auto* to = const_cast<uint8_t*>(cache.data) + to_slot * (a.shape.width() / layout.elements * layout.bytes);
    return isa_.narrow(cache.kind, made, a.shape.width(), to);
}

void Slab::latent_attention() {
    const LatentAttention& a = layer_.latent;
    const PagedLatents& latents = *run_.latents;
    const int64_t heads = a.shape.heads, each_head = a.shape.nope + a.shape.rope, width = a.first.width();
    const int64_t query_width = heads * each_head, out_width = heads * a.shape.value;
    float *first = results_, *query = first + count_ * width, *attended = query + count_ * query_width;
    a.first.run(normed(layer_.before_attention, a.first), count_, first, width, false, run_.threads, many());
    if (a.q_rank > 0) {
        each_token(count_, run_.threads, [&](int64_t t) {
            float* low = first + t * width;
            isa_.rms_norm(low, a.q_norm.weight, a.q_rank, a.q_norm.eps, low);
            if (a.second.quantized()) isa_.quantize(low, a.q_rank, quantized_ + t * activation_blocks(a.q_rank));
        });
        a.second.run({first, width, quantized_, activation_blocks(a.q_rank)}, count_, query, query_width, false, run_.threads, many());
    }
    std::atomic<bool> fit{true};
    each_token(count_, run_.threads, [&](int64_t t) {
        float turned[MOST_ROPE];
        if (a.q_rank == 0) std::copy_n(first + t * width, query_width, query + t * query_width);
        const int64_t at = rotation(t, a.shape.rope);
        for (int64_t h = 0; h < heads; h++)
            rotate_pairs(a.pairing, isa_, query + t * query_width + h * each_head + a.shape.nope, run_.cos + at, run_.sin + at,
                         a.shape.rope, turned);
        if (!remember_latent(first + t * width + (a.q_rank > 0 ? a.q_rank : query_width), t)) fit = false;
    });
    std::vector<LatentRow> rows;
    for (const Span& span : spans_)
        for (int64_t i = 0; i < span.count; i++)
            rows.push_back({run_.ragged->tables[span.sequence], 0, span.position + i + 1});
    for (int64_t t = 0; t < count_ && run_.ragged == nullptr; t++) {
        const int64_t end = latents.past + token_of(t) + 1, start = run_.starts == nullptr ? 0 : run_.starts[sequence_of(t)];
        rows.push_back({latents.table + sequence_of(t) * latents.table_columns, std::min(start, end - 1), end});
    }
    const bool done = fit && attend_absorbed(a.shape, latents.cache, rows.data(), count_, query, a.keys, a.values, a.scale, attended,
                                             run_.threads);
    if (!done) {
        outcome_ = fit ? Outcome::no_memory : Outcome::beyond_float16;
        return;
    }
    each_token(count_, run_.threads, [&](int64_t t) { prepare(a.output, attended, out_width, t); });
    residual(a.output, input(attended, out_width), layer_.after_attention);
}

}  // namespace ktopt
