// The orthonormal Hadamard matrix that keys in 4 bits and the queries that meet them are multiplied by (anchors.h): it leaves their
// products as they are, and spreads a channel that stands far out over all of them.
#pragma once

#include <cmath>

#include "anchors.h"
#include "generic.h"
#include "simd.h"

namespace ktopt {
namespace {
namespace anchor {

// Sums and differences of the numbers that stand 1, 2, 4 and (of 16) 8 apart.
inline Vector within(Vector x) {
#if defined(__AVX512F__)
    const auto step = [&](__m512 other, __mmask16 second) {
        x.v = _mm512_add_ps(other, _mm512_mask_sub_ps(x.v, second, _mm512_setzero_ps(), x.v));
    };
    step(_mm512_permute_ps(x.v, 0xB1), 0xAAAA);
    step(_mm512_permute_ps(x.v, 0x4E), 0xCCCC);
    step(_mm512_shuffle_f32x4(x.v, x.v, 0xB1), 0xF0F0);
    step(_mm512_shuffle_f32x4(x.v, x.v, 0x4E), 0xFF00);
    return x;
#elif defined(__AVX2__)
    const auto step = [&](__m256 other, __m256 flip) { x.v = _mm256_add_ps(other, _mm256_xor_ps(x.v, flip)); };
    step(_mm256_permute_ps(x.v, 0xB1), _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f));
    step(_mm256_permute_ps(x.v, 0x4E), _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f));
    step(_mm256_permute2f128_ps(x.v, x.v, 1), _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f));
    return x;
#else
    float n[Vector::WIDTH];
    x.store(n);
    for (int apart = 1; apart < Vector::WIDTH; apart *= 2)
        for (int i = 0; i < Vector::WIDTH; i++)
            if (!(i & apart)) {
                const float a = n[i], b = n[i + apart];
                n[i] = a + b;
                n[i + apart] = a - b;
            }
    return Vector::load(n);
#endif
}

// In blocks of the largest power of two that divides dim, a multiple of 16.
inline void turn(float* x, int64_t dim) {
    const int64_t block = dim & -dim;
    const Vector scale = Vector::all(1 / std::sqrt(float(block)));
    for (int64_t d = 0; d < dim; d += Vector::WIDTH) (within(Vector::load(x + d)) * scale).store(x + d);
    for (int64_t apart = Vector::WIDTH; apart < block; apart *= 2)
        for (int64_t from = 0; from < dim; from += 2 * apart)
            for (int64_t d = from; d < from + apart; d += Vector::WIDTH) {
                const Vector a = Vector::load(x + d), b = Vector::load(x + d + apart);
                (a + b).store(x + d);
                (a - b).store(x + d + apart);
            }
}

}  // namespace anchor
}  // namespace
}  // namespace ktopt
