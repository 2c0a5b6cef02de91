// A slab whose rows are of several sequences in pages: which rows are whose, where their keys and values go, and what they attend to.
#include "attention.h"
#include "attention_decode.h"
#include "scratch.h"
#include "slab.h"

namespace ktopt {
namespace {

thread_local Scratch page_scratch;

}  // namespace

void Slab::find_spans() {
    const Ragged& r = *run_.ragged;
    const int64_t* after = std::upper_bound(r.firsts, r.firsts + r.sequences + 1, token_);
    for (int64_t s = after - r.firsts - 1; s < r.sequences && r.firsts[s] < token_ + count_; s++) {
        const int64_t begin = std::max(r.firsts[s], token_), end = std::min(r.firsts[s + 1], token_ + count_);
        spans_.push_back({s, begin - token_, end - begin, r.pasts[s] + begin - r.firsts[s], r.firsts[s + 1] - r.firsts[s]});
    }
    for (const Span& span : spans_) piece_of_.insert(piece_of_.end(), size_t(span.count), int32_t(&span - spans_.data()));
}

// The place of row t's token among those of all pages.
int64_t Slab::slot(int64_t t) const {
    const Span& span = spans_[size_t(piece_of_[size_t(t)])];
    const int64_t token = span.position + t - span.row, size = run_.ragged->page_tokens;
    return run_.ragged->tables[span.sequence][token / size] * size + token % size;
}

// Sequences with one new token are attended to together, wherever they stand one after another, and each other one by itself.
bool Slab::attend_paged(const float* q, float* out) {
    const Attention& a = layer_.attention;
    const PagedKeyValues& cache = *run_.pages;
    const int64_t q_stride = a.qkv.width(), out_stride = a.heads * a.head_dim, page_bytes = a.kv_heads * head_bytes();
    for (size_t i = 0, next; i < spans_.size(); i = next) {
        const Span& span = spans_[i];
        const float* from = q + span.row * q_stride;
        float* to = out + span.row * out_stride;
        for (next = i; next < spans_.size() && spans_[next].whole == 1; next++) {}
        if (next > i) {
            if (!decode_paged(&span, int64_t(next - i), from, to)) return false;
            continue;
        }
        next = i + 1;
        const KeyValues held = {cache.kind, cache.keys, cache.values, head_bytes(), head_bytes(),
                                {run_.ragged->tables[span.sequence], run_.ragged->page_tokens, page_bytes, page_bytes}};
        if (!prefill_attention({a.heads, a.kv_heads, a.head_dim, a.head_dim, a.scale, a.window}, held, from, q_stride, span.count,
                               span.position, 0, to, out_stride, run_.threads))
            return false;
    }
    return true;
}

// Sequences with one row each, one row after another.
bool Slab::decode_paged(const Span* spans, int64_t count, const float* q, float* out) {
    const Attention& a = layer_.attention;
    const PagedKeyValues& cache = *run_.pages;
    const int64_t size = run_.ragged->page_tokens, token_bytes = a.head_dim * layout_of(cache.kind).bytes, rows = count * a.kv_heads;
    const auto begin_of = [&](const Span& span) { return a.window > 0 ? std::max<int64_t>(0, span.position + 1 - a.window) : 0; };
    int64_t pages = 0;
    for (int64_t i = 0; i < count; i++) pages += spans[i].position / size - begin_of(spans[i]) / size + 1;
    const auto segments_wanted = size_t(pages * a.kv_heads);
    if (!page_scratch.reset(Scratch::room<Segment>(segments_wanted) + Scratch::room<int64_t>(size_t(rows + 1)))) return false;
    auto* segments = page_scratch.take<Segment>(segments_wanted);
    auto* first = page_scratch.take<int64_t>(size_t(rows + 1));
    int64_t made = 0;
    for (int64_t r = 0; r < rows; r++) {
        const Span& span = spans[r / a.kv_heads];
        const int64_t end = span.position + 1, head = r % a.kv_heads;
        const int32_t* table = run_.ragged->tables[span.sequence];
        first[r] = made;
        for (int64_t token = begin_of(span), next; token < end; token = next) {
            next = std::min(end, (token / size + 1) * size);
            const int64_t at = (table[token / size] * a.kv_heads + head) * head_bytes() + token % size * token_bytes;
            segments[made++] = {cache.kind, cache.keys + at, cache.values + at, next - token};
        }
    }
    first[rows] = made;
    const RowsShape shape = {rows, a.kv_heads, a.heads / a.kv_heads, a.head_dim, a.head_dim, a.scale, true};
    return attend_segments(shape, segments, first, q, a.qkv.width(), out, a.heads * a.head_dim, nullptr, run_.threads);
}

}  // namespace ktopt
