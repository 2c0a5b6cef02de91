// One block of a latent cache and 16 heads: scores, the softmax carried on, the weighted sum of latents. In float32, for every
// instruction set. latent_bfloat16.h has the same for CPUs that multiply bfloat16.
//
// A query is held with its heads side by side, 16 for each number, so that a score needs no sum across lanes: number k of a token
// goes to all lanes and meets number k of 16 heads.
#pragma once

#include <type_traits>

#include "fused.h"

namespace ktopt {
namespace {

// One float for each of 16 heads, or 16 numbers of a latent.
struct Sixteen {
    static constexpr int PARTS = 16 / Vector::WIDTH;
    static constexpr int TOKENS = PARTS == 1 ? 16 : 4, HEADS = TOKENS;  // as many sums as registers hold
    Vector part[PARTS];

    template <class Function>
    static Sixteen each(Function function) {
        Sixteen made;
        for (int i = 0; i < PARTS; i++) made.part[i] = function(i);
        return made;
    }
    static Sixteen all(float x) { return each([=](int) { return Vector::all(x); }); }
    static Sixteen load(const float* p) { return each([=](int i) { return Vector::load(p + i * Vector::WIDTH); }); }
    void store(float* p) const {
        for (int i = 0; i < PARTS; i++) part[i].store(p + i * Vector::WIDTH);
    }
    Sixteen times_plus(const Sixteen& y, const Sixteen& z) const {
        return each([&](int i) { return part[i].times_plus(y.part[i], z.part[i]); });
    }
    Sixteen max(const Sixteen& y) const { return each([&](int i) { return part[i].max(y.part[i]); }); }
    Sixteen operator+(const Sixteen& y) const { return each([&](int i) { return part[i] + y.part[i]; }); }
    Sixteen operator-(const Sixteen& y) const { return each([&](int i) { return part[i] - y.part[i]; }); }
    Sixteen operator*(const Sixteen& y) const { return each([&](int i) { return part[i] * y.part[i]; }); }
    Sixteen exponential() const { return each([&](int i) { return ktopt::exponential(part[i]); }); }
};

void add_scaled(const float* x, int64_t n, float scale, float* to) {
    const Vector factor = Vector::all(scale);
    int64_t i = 0;
    for (; i + Vector::WIDTH <= n; i += Vector::WIDTH) Vector::load(x + i).times_plus(factor, Vector::load(to + i)).store(to + i);
    for (; i < n; i++) to[i] += scale * x[i];
}

void pack_query(const float* query, size_t query_stride, int heads, int64_t width, float scale, void* out) {
    auto* to = static_cast<float*>(out);
    for (int h = 0; h < LATENT_HEADS; h++)
        for (int64_t k = 0; k < width; k++) to[k * LATENT_HEADS + h] = h < heads ? query[size_t(h) * query_stride + k] * scale : 0.0f;
}

// Scores of TOKENS tokens, 16 for each.
template <int TOKENS>
inline void score_tokens(const float* rows, size_t stride, const float* query, int64_t width, float* scores) {
    Sixteen total[TOKENS];
    for (Sixteen& sum : total) sum = Sixteen::all(0);
    for (int64_t k = 0; k < width; k++, query += LATENT_HEADS) {
        const Sixteen q = Sixteen::load(query);
        for (int t = 0; t < TOKENS; t++) total[t] = Sixteen::all(rows[size_t(t) * stride + k]).times_plus(q, total[t]);
    }
    for (int t = 0; t < TOKENS; t++) total[t].store(scores + t * LATENT_HEADS);
}

// Scores to weights, in place; the softmax so far is scaled to the new largest exponent. `earlier` (16) is what it is scaled by.
inline void carry_on(float* scores, const LatentBlock& b, float* earlier) {
    const Sixteen before = Sixteen::load(b.highest);
    Sixteen highest = before;
    for (int t = 0; t < b.tokens; t++) highest = highest.max(Sixteen::load(scores + t * LATENT_HEADS));
    const Sixteen factor = (before - highest).exponential();
    Sixteen sum = Sixteen::load(b.sum) * factor;
    for (int t = 0; t < b.tokens; t++) {
        const Sixteen weight = (Sixteen::load(scores + t * LATENT_HEADS) - highest).exponential();
        sum = sum + weight;
        weight.store(scores + t * LATENT_HEADS);
    }
    highest.store(b.highest);
    sum.store(b.sum);
    factor.store(earlier);
}

// Numbers [at, at + 16) of HEADS heads' sums.
template <int HEADS>
inline void add_latents(const LatentBlock& b, const float* weights, const float* earlier, int64_t at, float* out) {
    const auto* row = reinterpret_cast<const float*>(b.rows) + at;
    const size_t stride = b.row_bytes / sizeof(float);
    Sixteen total[HEADS];
    for (int h = 0; h < HEADS; h++) total[h] = Sixteen::load(out + h * b.latent + at) * Sixteen::all(earlier[h]);
    for (int t = 0; t < b.tokens; t++, row += stride, weights += LATENT_HEADS) {
        const Sixteen latent = Sixteen::load(row);
        for (int h = 0; h < HEADS; h++) total[h] = latent.times_plus(Sixteen::all(weights[h]), total[h]);
    }
    for (int h = 0; h < HEADS; h++) total[h].store(out + h * b.latent + at);
}

// Calls f(integral constant of how many, the first) for tokens in steps; the last step overlaps the one before rather than be short.
template <int STEP, class Function>
inline void in_steps(int tokens, Function f) {
    for (int t = 0; t + STEP <= tokens; t += STEP) f(std::integral_constant<int, STEP>(), t);
    if (tokens % STEP == 0) return;
    if (tokens > STEP) f(std::integral_constant<int, STEP>(), tokens - STEP);
    if constexpr (STEP > 1)
        if (tokens < STEP) in_steps<(STEP + 3) / 4>(tokens, f);
}

// Asks for a share of the next block: each of `steps` calls for its part of it.
inline void fetch_share(const LatentBlock& b, int64_t step, int64_t steps) {
    const size_t share = (b.next_bytes + size_t(steps) - 1) / size_t(steps), from = size_t(step) * share;
    for (size_t at = from; at < from + share && at < b.next_bytes; at += 64) __builtin_prefetch(b.next + at, 0, 2);
}

template <int TOKENS, int HEADS>
void attend_floats(const LatentBlock& b) {
    alignas(64) float scores[LATENT_BLOCK * LATENT_HEADS], earlier[LATENT_HEADS];
    const auto* rows = reinterpret_cast<const float*>(b.rows);
    const size_t stride = b.row_bytes / sizeof(float);
    const auto* query = static_cast<const float*>(b.query);
    in_steps<TOKENS>(b.tokens, [&](auto count, int t) {
        score_tokens<decltype(count)::value>(rows + size_t(t) * stride, stride, query, b.width, scores + t * LATENT_HEADS);
    });
    carry_on(scores, b, earlier);
    for (int64_t at = 0; at < b.latent; at += 16) {
        fetch_share(b, at / 16, b.latent / 16);
        for (int h = 0; h < LATENT_HEADS; h += HEADS)
            add_latents<HEADS>(b, scores + h, earlier + h, at, b.out + h * b.latent);
    }
}

constexpr LatentKernels latent_floats = {pack_query, attend_floats<Sixteen::TOKENS, Sixteen::HEADS>};

#if !defined(__AVX512BF16__)
constexpr LatentKernels latent_pairs = {};
#endif

}  // namespace
}  // namespace ktopt

#if defined(__AVX512BF16__)
#include "latent_bfloat16.h"
#endif
