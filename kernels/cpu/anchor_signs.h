// The sign index (anchors.h): a token's signs, four at a time, look up what a query makes of them in a table of 16 bytes, for
// all the tokens that a register holds at once (as Quicker ADC does, arXiv 1812.09162).
#pragma once

#include <cmath>

#include "anchors.h"
#include "generic.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ktopt {
namespace {
namespace anchor {

#if defined(__AVX512F__)
constexpr int TABLE_LANES = 4;  // lanes of 16 bytes in a register: of 32 tokens and two bytes of signs
#elif defined(__AVX2__)
constexpr int TABLE_LANES = 2;
#else
constexpr int TABLE_LANES = 1;
#endif
constexpr int MOST = 31;  // of an entry: eight of them fit a byte

// Entry v of group g is the sum of q over the numbers 4 g to 4 g + 3, each plus or minus by a bit of v, above the smallest such sum,
// in steps. A byte of signs holds groups 2 i and 2 i + 1; registers take `TABLE_LANES / 2` such bytes of 32 tokens.
inline SignScale sign_table(const float* q, int64_t dim, uint8_t* table) {
    float most = 0, all = 0;
    for (int64_t g = 0; g < dim; g += 4) {
        const float reach = std::fabs(q[g]) + std::fabs(q[g + 1]) + std::fabs(q[g + 2]) + std::fabs(q[g + 3]);
        most = reach > most ? reach : most;
        all += reach;
    }
    const bool usable = most > 0 && most < 1e30f;  // else, as for NaN, all entries are 0
    const float step = usable ? 2 * most / MOST : 0.0f, inverse = usable ? 1 / step : 0.0f;
    constexpr int BYTES = TABLE_LANES < 2 ? 1 : TABLE_LANES / 2, COPIES = TABLE_LANES < 2 ? 1 : 2;
    for (int64_t g = 0; g < dim / 4; g++) {
        uint8_t entry[16];
        float scaled[4], reach = 0;
        for (int i = 0; i < 4; i++) {
            scaled[i] = usable ? q[4 * g + i] * inverse : 0.0f;
            reach += std::fabs(scaled[i]);
        }
        for (int v = 0; v < 16; v++) {
            float sum = reach + 0.5f;
            for (int i = 0; i < 4; i++) sum += (v >> i & 1) ? scaled[i] : -scaled[i];
            entry[v] = uint8_t(int(sum));
        }
        const int64_t byte = g / 2, half = g % 2;
        uint8_t* to = table + ((byte / BYTES * 2 + half) * BYTES + byte % BYTES) * COPIES * 16;
        for (int c = 0; c < COPIES; c++) std::memcpy(to + 16 * c, entry, 16);
    }
    return {step, usable ? all * inverse : 0.0f};
}

#if defined(__AVX512F__)

template <int heads>
inline void signs_of(const SignBlock& b) {
    const __m512i low4 = _mm512_set1_epi8(15);
    const size_t bytes = table_bytes(b.dim);
    const int64_t steps = b.dim / 16;
    __m512 best[heads];
    for (auto& each : best) each = _mm512_set1_ps(-__builtin_inff());
    const uint8_t* signs = b.signs;
    for (int64_t g = 0; g < b.groups; g++) {
        __m512i sums[heads];
        for (auto& sum : sums) sum = _mm512_setzero_si512();
        for (int64_t from = 0; from < steps; from += 4) {
            const int64_t to = from + 4 < steps ? from + 4 : steps;
            __m512i few[heads];
            for (auto& each : few) each = _mm512_setzero_si512();
            for (int64_t i = from; i < to; i++, signs += 64) {
                const __m512i x = _mm512_loadu_si512(signs), low = _mm512_and_si512(x, low4);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(x, 4), low4);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) {
                    const uint8_t* table = b.tables + size_t(h) * bytes + 128 * i;
                    const __m512i first = _mm512_shuffle_epi8(_mm512_loadu_si512(table), low);
                    const __m512i second = _mm512_shuffle_epi8(_mm512_loadu_si512(table + 64), high);
                    few[h] = _mm512_add_epi8(few[h], _mm512_add_epi8(first, second));
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                const __m512i first = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(few[h]));
                const __m512i second = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(few[h], 1));
                sums[h] = _mm512_add_epi16(sums[h], _mm512_add_epi16(first, second));
            }
        }
        const auto* magnitude = reinterpret_cast<const __m256i*>(b.magnitude + g * TOKEN_GROUP);
        const __m512 left = _mm512_cvtph_ps(_mm256_loadu_si256(magnitude)), right = _mm512_cvtph_ps(_mm256_loadu_si256(magnitude + 1));
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const __m512 centre = _mm512_set1_ps(b.centre[h]);
            const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(sums[h])));
            const __m512 c = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(sums[h], 1)));
            best[h] = _mm512_max_ps(best[h], _mm512_mul_ps(left, _mm512_sub_ps(a, centre)));
            best[h] = _mm512_max_ps(best[h], _mm512_mul_ps(right, _mm512_sub_ps(c, centre)));
        }
    }
    for (int h = 0; h < heads; h++) b.best[h] = _mm512_reduce_max_ps(best[h]);
}

#elif defined(__AVX2__)

template <int heads>
inline void signs_of(const SignBlock& b) {
    const __m256i low4 = _mm256_set1_epi8(15);
    const size_t bytes = table_bytes(b.dim);
    const int64_t steps = b.dim / 8;
    Vector best[heads];
    for (auto& each : best) each = Vector::all(-__builtin_inff());
    const uint8_t* signs = b.signs;
    for (int64_t g = 0; g < b.groups; g++) {
        __m256i sums[heads][2];
        for (auto& sum : sums) sum[0] = sum[1] = _mm256_setzero_si256();
        for (int64_t from = 0; from < steps; from += 4) {
            const int64_t to = from + 4 < steps ? from + 4 : steps;
            __m256i few[heads];
            for (auto& each : few) each = _mm256_setzero_si256();
            for (int64_t i = from; i < to; i++, signs += 32) {
                const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(signs)), low = _mm256_and_si256(x, low4);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), low4);
                for (int h = 0; h < heads; h++) {
                    const auto* table = reinterpret_cast<const __m256i*>(b.tables + size_t(h) * bytes + 64 * i);
                    const __m256i first = _mm256_shuffle_epi8(_mm256_loadu_si256(table), low);
                    const __m256i second = _mm256_shuffle_epi8(_mm256_loadu_si256(table + 1), high);
                    few[h] = _mm256_add_epi8(few[h], _mm256_add_epi8(first, second));
                }
            }
            for (int h = 0; h < heads; h++) {
                sums[h][0] = _mm256_add_epi16(sums[h][0], _mm256_cvtepu8_epi16(_mm256_castsi256_si128(few[h])));
                sums[h][1] = _mm256_add_epi16(sums[h][1], _mm256_cvtepu8_epi16(_mm256_extracti128_si256(few[h], 1)));
            }
        }
        for (int part = 0; part < 4; part++) {
            const Vector magnitude = Vector::load_float16(b.magnitude + g * TOKEN_GROUP + 8 * part);
            for (int h = 0; h < heads; h++) {
                const __m256i half = sums[h][part / 2];
                const __m128i eight = part % 2 ? _mm256_extracti128_si256(half, 1) : _mm256_castsi256_si128(half);
                const Vector sum{_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(eight))};
                best[h] = best[h].max(magnitude * (sum - Vector::all(b.centre[h])));
            }
        }
    }
    for (int h = 0; h < heads; h++) b.best[h] = best[h].largest();
}

#else

template <int heads>
inline void signs_of(const SignBlock& b) {
    const int64_t bytes = b.dim / 8;
    for (int h = 0; h < heads; h++) {
        const uint8_t* table = b.tables + size_t(h) * table_bytes(b.dim);
        float best = -__builtin_inff();
        for (int64_t g = 0; g < b.groups; g++) {
            const uint8_t* signs = b.signs + g * bytes * TOKEN_GROUP;
            uint16_t sums[TOKEN_GROUP] = {};
            for (int64_t i = 0; i < bytes; i++)
                for (int t = 0; t < TOKEN_GROUP; t++) {
                    const uint8_t x = signs[i * TOKEN_GROUP + t];
                    sums[t] = uint16_t(sums[t] + table[32 * i + (x & 15)] + table[32 * i + 16 + (x >> 4)]);
                }
            for (int t = 0; t < TOKEN_GROUP; t++) {
                const float score = half_to_float(b.magnitude[g * TOKEN_GROUP + t]) * (float(sums[t]) - b.centre[h]);
                best = score > best ? score : best;
            }
        }
        b.best[h] = best;
    }
}

#endif

inline void signs(const SignBlock& b) {
    switch (b.heads) {
    case 1: return signs_of<1>(b);
    case 2: return signs_of<2>(b);
    case 3: return signs_of<3>(b);
    default: return signs_of<4>(b);
    }
}

}  // namespace anchor
}  // namespace
}  // namespace ktopt
