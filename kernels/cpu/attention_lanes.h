// The vectors that attention_tiles.h computes with, one query a lane, for the instruction set that a file is compiled for. An
// element is what one step of a product takes of a row: a number, or two neighbours in bfloat16 where the CPU multiplies those.
#pragma once

#include <cfloat>

#include "generic.h"

namespace ktopt {
namespace {
namespace prefill {

#if defined(__AVX512F__)

struct Lanes {
    static constexpr int COUNT = 16, STEPS = 8;  // STEPS * TILE_VECTORS sums, all in registers
    using Floats = __m512;

    static inline Floats zero() { return _mm512_setzero_ps(); }
    static inline Floats all(float x) { return _mm512_set1_ps(x); }
    static inline Floats load(const float* p) { return _mm512_load_ps(p); }
    static inline void store(float* p, Floats x) { _mm512_store_ps(p, x); }
    static inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where one is NaN
    // x times 2 to the whole number in the low bits of n
    static inline Floats scaled(Floats x, Floats n) {
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
    }
    // scores where low <= key <= high, and -inf elsewhere
    static inline Floats masked(Floats scores, int32_t key, const int32_t* low, const int32_t* high) {
        const __m512i at = _mm512_set1_epi32(key);
        const __mmask16 seen = _mm512_cmple_epi32_mask(_mm512_load_si512(low), at);
        return _mm512_mask_mov_ps(all(-__builtin_inff()), _mm512_mask_cmpge_epi32_mask(seen, _mm512_load_si512(high), at), scores);
    }

    // A square of COUNT numbers, rows to columns.
    static inline void transpose(const float* in, size_t in_stride, float* out, size_t out_stride) {
        __m512 a[16], b[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(in + size_t(i) * in_stride);
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                const __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + j + 2]);
                a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
                a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
            }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {  // quarters of four rows each now hold columns j, j + 4, j + 8 and j + 12
            const __m512 even = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88);
            const __m512 odd = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
            const __m512 even2 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
            const __m512 odd2 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
            _mm512_storeu_ps(out + size_t(j) * out_stride, _mm512_shuffle_f32x4(even, even2, 0x88));
            _mm512_storeu_ps(out + size_t(8 + j) * out_stride, _mm512_shuffle_f32x4(even, even2, 0xdd));
            _mm512_storeu_ps(out + size_t(4 + j) * out_stride, _mm512_shuffle_f32x4(odd, odd2, 0x88));
            _mm512_storeu_ps(out + size_t(12 + j) * out_stride, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
        }
    }
};

#elif defined(__AVX2__)

struct Lanes {
    static constexpr int COUNT = 8, STEPS = 4;
    using Floats = __m256;

    static inline Floats zero() { return _mm256_setzero_ps(); }
    static inline Floats all(float x) { return _mm256_set1_ps(x); }
    static inline Floats load(const float* p) { return _mm256_load_ps(p); }
    static inline void store(float* p, Floats x) { _mm256_store_ps(p, x); }
    static inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static inline Floats scaled(Floats x, Floats n) {
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
    }
    static inline Floats masked(Floats scores, int32_t key, const int32_t* low, const int32_t* high) {
        const __m256i at = _mm256_set1_epi32(key);
        const __m256i early = _mm256_cmpgt_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(low)), at);
        const __m256i late = _mm256_cmpgt_epi32(at, _mm256_load_si256(reinterpret_cast<const __m256i*>(high)));
        return _mm256_blendv_ps(scores, all(-__builtin_inff()), _mm256_castsi256_ps(_mm256_or_si256(early, late)));
    }
    static inline void transpose(const float* in, size_t in_stride, float* out, size_t out_stride) {
        for (size_t i = 0; i < COUNT; i++)
            for (size_t j = 0; j < COUNT; j++) out[j * out_stride + i] = in[i * in_stride + j];
    }
};

#else

struct Lanes {
    static constexpr int COUNT = 4, STEPS = 4;
    using Floats = float __attribute__((vector_size(16)));  // in whatever registers the compiler has for them
    using Ints = int32_t __attribute__((vector_size(16)));

    static inline Floats zero() { return Floats{}; }
    static inline Floats all(float x) { return Floats{x, x, x, x}; }
    static inline Floats load(const float* p) {
        Floats x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
    static inline Floats add(Floats a, Floats b) { return a + b; }
    static inline Floats subtract(Floats a, Floats b) { return a - b; }
    static inline Floats multiply(Floats a, Floats b) { return a * b; }
    static inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
    static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
    static inline Floats scaled(Floats x, Floats n) { return Floats(Ints(x) + (Ints(n) << 23)); }
    static inline Floats masked(Floats scores, int32_t key, const int32_t* low, const int32_t* high) {
        Floats out = scores;
        for (int i = 0; i < COUNT; i++)
            if (key < low[i] || key > high[i]) out[i] = -__builtin_inff();
        return out;
    }
    static inline void transpose(const float* in, size_t in_stride, float* out, size_t out_stride) {
        for (size_t i = 0; i < COUNT; i++)
            for (size_t j = 0; j < COUNT; j++) out[j * out_stride + i] = in[i * in_stride + j];
    }
};

#endif

}  // namespace prefill
}  // namespace
}  // namespace ktopt
