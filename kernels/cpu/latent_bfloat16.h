// latent.h's computation where the CPU multiplies pairs of bfloat16: twice the numbers a register, half the bytes.
#pragma once

#include "latent.h"

namespace ktopt {
namespace {

// 32 bfloat16 made of two times 16 side by side: number i of both becomes pair i.
inline __m512i pairs(__m512i low_high) {
    alignas(64) static const int16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), low_high);
}

inline __m512bh pair_for_all(const void* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    return __m512bh(_mm512_set1_epi32(both));
}

// Numbers 2k and 2k + 1 of head h lie at pair 16 * k + h.
void pack_pairs(const float* query, size_t query_stride, int heads, int64_t width, float scale, void* out) {
    auto* to = static_cast<uint16_t*>(out);
    for (int h = 0; h < LATENT_HEADS; h++)
        for (int64_t k = 0; k < width; k++)
            to[k / 2 * 2 * LATENT_HEADS + 2 * h + k % 2] = h < heads ? to_bfloat16(query[size_t(h) * query_stride + k] * scale) : 0;
}

template <int TOKENS>
inline void score_pairs(const uint8_t* rows, size_t row_bytes, const void* query, int64_t width, float* scores) {
    const auto* q = static_cast<const uint8_t*>(query);
    __m512 total[TOKENS];
    for (__m512& sum : total) sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += 2, q += 64, rows += 4) {
        const __m512bh pair = __m512bh(_mm512_loadu_si512(q));
        for (int t = 0; t < TOKENS; t++) total[t] = _mm512_dpbf16_ps(total[t], pair, pair_for_all(rows + size_t(t) * row_bytes));
    }
    for (int t = 0; t < TOKENS; t++) _mm512_storeu_ps(scores + t * LATENT_HEADS, total[t]);
}

// Weights of tokens 2i and 2i + 1 as pairs of bfloat16, 16 heads side by side. A token too many weighs nothing.
inline void pair_weights(const float* weights, int tokens, uint8_t* out) {
    for (int t = 0; t < tokens; t += 2, out += 64) {
        const __m512 even = _mm512_load_ps(weights + t * LATENT_HEADS);
        const __m512 odd = t + 1 < tokens ? _mm512_load_ps(weights + (t + 1) * LATENT_HEADS) : _mm512_setzero_ps();
        _mm512_store_si512(out, pairs(__m512i(_mm512_cvtne2ps_pbh(odd, even))));
    }
}

// Numbers [at, at + 16) of 16 heads' sums.
inline void add_latent_pairs(const LatentBlock& b, const uint8_t* weights, const float* earlier, int64_t at) {
    __m512 total[LATENT_HEADS];
    float* out = b.out + at;
    for (int h = 0; h < LATENT_HEADS; h++)
        total[h] = _mm512_mul_ps(_mm512_loadu_ps(out + h * b.latent), _mm512_set1_ps(earlier[h]));
    const uint8_t* row = b.rows + 2 * at;
    for (int t = 0; t < b.tokens; t += 2, row += 2 * b.row_bytes, weights += 64) {
        const uint8_t* second = t + 1 < b.tokens ? row + b.row_bytes : row;
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row))),
                                                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
        const __m512bh latents = __m512bh(pairs(both));
        for (int h = 0; h < LATENT_HEADS; h++) total[h] = _mm512_dpbf16_ps(total[h], latents, pair_for_all(weights + 4 * h));
    }
    for (int h = 0; h < LATENT_HEADS; h++) _mm512_storeu_ps(out + h * b.latent, total[h]);
}

void attend_pairs(const LatentBlock& b) {
    constexpr int TOKENS = 16;
    alignas(64) float scores[LATENT_BLOCK * LATENT_HEADS], earlier[LATENT_HEADS];
    alignas(64) uint8_t weights[LATENT_BLOCK * LATENT_HEADS * 2];
    in_steps<TOKENS>(b.tokens, [&](auto count, int t) {
        const uint8_t* rows = b.rows + size_t(t) * b.row_bytes;
        score_pairs<decltype(count)::value>(rows, b.row_bytes, b.query, b.width, scores + t * LATENT_HEADS);
    });
    carry_on(scores, b, earlier);
    pair_weights(scores, b.tokens, weights);
    for (int64_t at = 0; at < b.latent; at += 16) {
        fetch_share(b, at / 16, b.latent / 16);
        add_latent_pairs(b, weights, earlier, at);
    }
}

constexpr LatentKernels latent_pairs = {pack_pairs, attend_pairs};

}  // namespace
}  // namespace ktopt
