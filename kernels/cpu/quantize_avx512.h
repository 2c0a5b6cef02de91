// Activations to 8 bits with AVX512, 256 at a time: the same numbers as generic.h's quantize32 makes of each group of 32.
#pragma once

#include "wide_avx512.h"

namespace ktopt {
namespace {

inline __m256i larger(__m256i a, __m256i b) { return _mm256_max_epu32(a, b); }

// The largest lane of each of eight registers, register i's in lane i.
inline __m256i eight_largest(const __m512i* x) {
    __m256i pairs[4], fours[2];
    for (int i = 0; i < 4; i++) {
        const __m256i a = larger(_mm512_castsi512_si256(x[2 * i]), _mm512_extracti32x8_epi32(x[2 * i], 1));
        const __m256i b = larger(_mm512_castsi512_si256(x[2 * i + 1]), _mm512_extracti32x8_epi32(x[2 * i + 1], 1));
        pairs[i] = larger(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    }
    for (int i = 0; i < 2; i++)
        fours[i] = larger(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                          _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    return larger(_mm256_permute2x128_si256(fours[0], fours[1], 0x20), _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

// Sums of 16 bytes each in four registers of 64, in order.
inline __m512i sums_of_16(const __m512i* q) {
    __m512i fours[4];
    for (int c = 0; c < 4; c++) fours[c] = products<false>(bytes(1), q[c]);
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(fours[0], fours[1]), _mm512_unpackhi_epi32(fours[0], fours[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(fours[2], fours[3]), _mm512_unpackhi_epi32(fours[2], fours[3]));
    const __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));  // lane 4 i + c: 16 i of q[c]
    return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), sums);
}

inline void quantize256(const float* x, Activations* out) {
    __m512i largest[8], q[4];
    for (int g = 0; g < 8; g++) {
        const __m512i a = load64(x + 32 * g), b = load64(x + 32 * g + 16), magnitude = _mm512_set1_epi32(0x7fffffff);
        largest[g] = _mm512_max_epu32(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude));
    }
    const __m256i bits = eight_largest(largest);
    const __m256 amax = _mm256_castsi256_ps(bits), top = _mm256_set1_ps(127.0f);
    const __mmask8 finite = _mm256_cmplt_epu32_mask(bits, _mm256_set1_epi32(0x7f800000));
    const __mmask8 counts = _mm256_mask_cmp_ps_mask(finite, amax, _mm256_set1_ps(SMALLEST), _CMP_GE_OQ);
    const __m512 inverse = low8(_mm256_maskz_div_ps(counts, top, amax));
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    const __m256 d = _mm256_mask_blend_ps(finite, nan, _mm256_maskz_div_ps(counts, amax, top));
    for (int c = 0; c < 4; c++) {
        __m128i few[4];
        for (int i = 0; i < 4; i++) {
            const __m512 scale = _mm512_permutexvar_ps(_mm512_set1_epi32(2 * c + i / 2), inverse);
            few[i] = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 64 * c + 16 * i), scale)));
            _mm_store_si128(reinterpret_cast<__m128i*>(out->q + 64 * c + 16 * i), few[i]);
        }
        q[c] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(few[1], few[0])), _mm256_set_m128i(few[3], few[2]), 1);
    }
    const __m512i halves = sums_of_16(q);
    const __m512i pairs = _mm512_add_epi32(halves, _mm512_shuffle_epi32(halves, _MM_PERM_CDAB));
    const __m512 each = _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), low8(d));
    _mm256_store_ps(out->d8, d);
    _mm256_store_ps(out->s8, _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm512_cvtepi64_epi32(pairs))));
    _mm512_store_ps(out->s16, _mm512_mul_ps(each, _mm512_cvtepi32_ps(halves)));
}

void wide_quantize(const float* x, int64_t columns, Activations* out) {
    for (; columns >= 256; columns -= 256, x += 256, out++) quantize256(x, out);
    if (columns == 0) return;
    float padded[256] = {};
    std::memcpy(padded, x, size_t(columns) * sizeof(float));
    quantize256(padded, out);
}

}  // namespace
}  // namespace ktopt
