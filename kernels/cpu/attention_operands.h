// What the products of attention_tiles.h are made of: elements of 32 bits, one of which a step takes of every row. Numbers are
// single float32; Pairs are two neighbours in bfloat16, whose products the CPU adds up.
#pragma once

#include "attention_lanes.h"

namespace ktopt {
namespace {
namespace prefill {

// Calls f with the kind as a constant.
template <class Function>
inline void with_kind(int kind, Function f) {
    if (kind == F32) f(std::integral_constant<int, F32>());
    if (kind == F16) f(std::integral_constant<int, F16>());
    if (kind == BF16) f(std::integral_constant<int, BF16>());
}

// DEPTH numbers make an element, a cache of kind NATIVE has its keys as elements already, and POWER are the coefficients of a
// polynomial that is 2^x from -1/2 to 1/2, from the highest to 1.
struct Numbers {
    static constexpr int DEPTH = 1, NATIVE = F32;
    using Floats = Lanes::Floats;

    // sums + x * the element at p in all lanes
    static inline Floats dot(Floats sums, Floats x, const uint8_t* p) {
        return Lanes::multiply_add(x, Lanes::all(load_float<F32>(p)), sums);
    }

    // An element of each lane from DEPTH numbers.
    static inline Floats joined(const Floats (&x)[1]) { return x[0]; }

    // A query as elements, times scale.
    static inline void query(const float* q, int64_t dim, float scale, float* out) {
        for (int64_t d = 0; d < dim; d++) out[d] = q[d] * scale;
    }

    // Rows of `dim` numbers as elements.
    static inline void keys(int kind, const uint8_t* from, int64_t rows, int64_t dim, float* out) {
        with_kind(kind, [&](auto k) {
            for (int64_t i = 0; i < rows * dim; i++) out[i] = load_float<k>(from + i * layout_of(k).bytes);
        });
    }

    // Elements of neighbouring rows: (rows / DEPTH, dim).
    static inline void values(int kind, const uint8_t* from, int64_t rows, int64_t dim, float* out) {
        keys(kind, from, rows, dim, out);
    }

    static constexpr float POWER[] = {1.3264727e-3f, 9.671513e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.93147e-1f, 1};  // to 1e-7
};

#if defined(__AVX512BF16__)

struct Pairs {
    static constexpr int DEPTH = 2, NATIVE = BF16;
    using Floats = __m512;

    static inline Floats dot(Floats sums, Floats x, const uint8_t* p) {
        int32_t pair;
        std::memcpy(&pair, p, 4);
        return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
    }

    static inline Floats joined(const Floats (&x)[2]) {
        const __m512i low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x[0])));
        const __m512i high = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x[1])));
        return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }

    // An element of each lane from DEPTH numbers.
    static inline Floats joined(const Floats (&x)[1]) { return x[0]; }

    // A query as elements, times scale.
    static inline void query(const float* q, int64_t dim, float scale, float* out) {
        for (int64_t d = 0; d < dim; d += 16) {
            const __mmask16 there = dim - d < 16 ? 0xff : 0xffff;
            const __m256bh narrow = _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_maskz_loadu_ps(there, q + d), Lanes::all(scale)));
            _mm256_mask_storeu_epi16(out + d / 2, there, reinterpret_cast<__m256i>(narrow));
        }
    }

    // 16 numbers as bfloat16, or 8
    template <int kind>
    static inline __m256i narrow(const uint8_t* p, __mmask16 there) {
        if constexpr (kind == BF16) return _mm256_maskz_loadu_epi16(there, p);
        if constexpr (kind == F32) return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, p)));
        return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, p))));
    }

    static inline void keys(int kind, const uint8_t* from, int64_t rows, int64_t dim, float* out) {
        with_kind(kind, [&](auto k) {
            auto* to = reinterpret_cast<uint8_t*>(out);
            for (int64_t i = 0; i < rows * dim; i += 16) {
                const __mmask16 there = rows * dim - i < 16 ? 0xff : 0xffff;
                _mm256_mask_storeu_epi16(to + 2 * i, there, narrow<k>(from + i * layout_of(k).bytes, there));
            }
        });
    }

    static inline void values(int kind, const uint8_t* from, int64_t rows, int64_t dim, float* out) {
        with_kind(kind, [&](auto k) {
            constexpr int BYTES = layout_of(k).bytes;
            for (int64_t row = 0; row < rows; row += 2, from += 2 * dim * BYTES, out += dim)
                for (int64_t d = 0; d < dim; d += 16) {
                    const __mmask16 there = dim - d < 16 ? 0xff : 0xffff, second = row + 1 < rows ? there : 0;
                    const __m512i low = _mm512_cvtepu16_epi32(narrow<k>(from + d * BYTES, there));
                    const __m512i high = _mm512_cvtepu16_epi32(narrow<k>(from + (dim + d) * BYTES, second));
                    _mm512_mask_storeu_epi32(out + d, there, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
                }
        });
    }

    static constexpr float POWER[] = {9.582853e-3f, 5.5906426e-2f, 2.40241e-1f, 6.931241e-1f, 1};  // to 3e-6: bfloat16 has 4e-3
};

using Operand = Pairs;

#else

using Operand = Numbers;

#endif

}  // namespace prefill
}  // namespace
}  // namespace ktopt
