// A slab's grouped-query attention.
#include <atomic>
#include <vector>

#include "attention.h"
#include "attention_decode.h"
#include "slab.h"

namespace ktopt {

// From a head's keys to the next head's, of one sequence or of one page.
int64_t Slab::head_bytes() const {
    const int64_t tokens = run_.ragged != nullptr ? run_.ragged->page_tokens : run_.cache->capacity;
    return tokens * layer_.attention.head_dim * layout_of(cache_kind()).bytes;
}

// Where in the cache's keys, and in its values, those of token t begin, of the first head.
int64_t Slab::place(int64_t t) const {
    const Attention& a = layer_.attention;
    const int64_t token_bytes = a.head_dim * layout_of(cache_kind()).bytes;
    if (run_.ragged != nullptr) {
        const int64_t at = slot(t), size = run_.ragged->page_tokens;
        return at / size * a.kv_heads * head_bytes() + at % size * token_bytes;
    }
    return sequence_of(t) * a.kv_heads * head_bytes() + (run_.cache->past + token_of(t)) * token_bytes;
}

void Slab::rotated(float* head, const Norm& norm, int64_t t) {
    const Attention& a = layer_.attention;
    if (norm.weight != nullptr) isa_.rms_norm(head, norm.weight, a.head_dim, norm.eps, head);
    const int64_t at = rotation(t, a.rotary_dim);
    isa_.rotate(head, run_.cos + at, run_.sin + at, a.rotary_dim);
}

// Norms and rotates a token's heads, and puts its keys and values into the cache.
bool Slab::remember(float* qkv, int64_t t) {
    const Attention& a = layer_.attention;
    uint8_t* keys = run_.ragged != nullptr ? run_.pages->keys : run_.cache->keys;
    uint8_t* values = run_.ragged != nullptr ? run_.pages->values : run_.cache->values;
    for (int64_t h = 0; h < a.heads; h++) rotated(qkv + h * a.head_dim, a.q_norm, t);
    bool fits = true;
    for (int64_t h = 0, at = place(t); h < a.kv_heads; h++, at += head_bytes()) {
        float* key = qkv + (a.heads + h) * a.head_dim;
        rotated(key, a.k_norm, t);
        fits &= isa_.narrow(cache_kind(), key, a.head_dim, keys + at);
        fits &= isa_.narrow(cache_kind(), key + a.kv_heads * a.head_dim, a.head_dim, values + at);
    }
    return fits;
}

void Slab::grouped_attention() {
    const Attention& a = layer_.attention;
    const int64_t width = a.qkv.width(), out_width = a.heads * a.head_dim;
    float *qkv = results_, *attended = results_ + count_ * width;
    a.qkv.run(normed(layer_.before_attention, a.qkv), count_, qkv, width, false, run_.threads, many());
    std::atomic<bool> fit{true};
    each_token(count_, run_.threads, [&](int64_t t) {
        if (!remember(qkv + t * width, t)) fit = false;
    });
    if (fit && run_.queries != nullptr) {
        float* queries = run_.queries + row() * out_width;
        for (int64_t t = 0; t < count_; t++) std::copy_n(qkv + t * width, out_width, queries + t * out_width);
        return;
    }
    if (!fit || !attend(qkv, attended)) {
        outcome_ = fit ? Outcome::no_memory : Outcome::beyond_float16;
        return;
    }
    add_attended(attended, out_width);
}

// x += the output matrices on attention's results, `width` numbers a token.
void Slab::add_attended(const float* attended, int64_t width) {
    const Bundle& output = layer_.attention.output;
    each_token(count_, run_.threads, [&](int64_t t) { prepare(output, attended, width, t); });
    residual(output, input(attended, width), layer_.after_attention);
}

// What token t sees: from the first that is no padding, and within the window, to itself.
Sight Slab::sight(int64_t t) const {
    const Attention& a = layer_.attention;
    const int64_t end = run_.cache->past + token_of(t) + 1, sequence = sequence_of(t);
    int64_t start = run_.starts == nullptr ? 0 : run_.starts[sequence];
    if (a.window > 0) start = std::max(start, end - a.window);
    start = std::min(start, end - 1);
    const int64_t at = sequence * a.kv_heads * head_bytes() + start * a.head_dim * layout_of(run_.cache->kind).bytes;
    return {run_.cache->keys + at, run_.cache->values + at, end - start};
}

bool Slab::attend(const float* q, float* out) {
    if (run_.ragged != nullptr) return attend_paged(q, out);
    const Attention& a = layer_.attention;
    const KeyValueCache& cache = *run_.cache;
    if (run_.tokens > 1) {
        const int64_t at = sequence_ * a.kv_heads * head_bytes(), start = run_.starts == nullptr ? 0 : run_.starts[sequence_];
        return prefill_attention({a.heads, a.kv_heads, a.head_dim, a.head_dim, a.scale, a.window},
                                 {cache.kind, cache.keys + at, cache.values + at, head_bytes(), head_bytes()}, q, a.qkv.width(),
                                 count_, cache.past + token_, start, out, a.heads * a.head_dim, run_.threads);
    }
    const DecodeShape shape{cache.kind, a.heads, a.kv_heads, a.head_dim, a.head_dim, head_bytes(), head_bytes(), a.scale};
    std::vector<Sight> sights;
    for (int64_t t = 0; t < count_; t++) sights.push_back(sight(t));
    return decode_attention(shape, sights.data(), count_, q, a.qkv.width(), out, a.heads * a.head_dim, run_.threads);
}

}  // namespace ktopt
