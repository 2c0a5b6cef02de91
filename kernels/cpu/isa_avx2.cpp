// AVX2, FMA and F16C: formats.h's unpacking as the compiler vectorises it, then products of bytes.
#include <immintrin.h>

#include "table.h"

namespace ktopt {
namespace {

struct Lanes {
    __m256 total = _mm256_setzero_ps();
    float offsets[4] = {};

    template <class F>
    void add(const Unpacked& w, const Activations& x) {
        for (int g = 0; g < 8; g++) {
            const __m256i u = _mm256_load_si256(reinterpret_cast<const __m256i*>(w.u + 32 * g));
            const __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(x.q + 32 * g));
            const __m256 dot = _mm256_cvtepi32_ps(products<F::ZERO>(u, q));
            __m256 scale;
            if constexpr (F::GROUP == 32) {
                scale = _mm256_set1_ps(w.scale[g] * x.d8[g]);
            } else {
                scale = _mm256_set_m128(_mm_set1_ps(w.scale[2 * g + 1] * x.d8[g]), _mm_set1_ps(w.scale[2 * g] * x.d8[g]));
            }
            total = _mm256_fmadd_ps(scale, dot, total);
        }
        if constexpr (F::OFFSETS) {  // one by one, as they were written: a wide load would wait for all those stores
            const float* sums = F::GROUP == 16 ? x.s16 : x.s8;
            for (int g = 0; g < 256 / F::GROUP; g++) offsets[g % 4] += w.offset[g] * sums[g];
        }
    }

    // Sums of four products of (u - ZERO) and q, as eight int32. maddubs takes an unsigned and a signed byte and saturates at 16
    // bits, so signed numbers give their sign to the activation.
    template <int ZERO>
    static __m256i products(__m256i u, __m256i q) {
        if constexpr (ZERO != 0) {
            u = _mm256_sub_epi8(u, _mm256_set1_epi8(char(ZERO)));
            q = _mm256_sign_epi8(q, u);
            u = _mm256_abs_epi8(u);
        }
        return _mm256_madd_epi16(_mm256_maddubs_epi16(u, q), _mm256_set1_epi16(1));
    }

    float sum() const {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(total), _mm256_extractf128_ps(total, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half))) - (offsets[0] + offsets[1] + offsets[2] + offsets[3]);
    }
};

template <int kind>
constexpr RowsFunction quantized = quantized_rows<Lanes, kind>;
template <int kind>
inline __m256 load_floats(const uint8_t* p) {
    if constexpr (kind == F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (kind == F16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

template <int kind>
void floats(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const void* x, size_t x_stride, int64_t tokens,
            float* out, size_t out_stride) {
    constexpr int BYTES = layout_of(kind).bytes;
    for (int64_t r = 0; r < rows; r++, weight += row_bytes)
        for (int64_t t = 0; t < tokens; t++) {
            const float* token = static_cast<const float*>(x) + t * x_stride;
            Lanes lanes[4];
            int64_t i = 0;
            for (; i + 32 <= columns; i += 32)
                for (int s = 0; s < 4; s++)
                    lanes[s].total = _mm256_fmadd_ps(load_floats<kind>(weight + (i + 8 * s) * BYTES),
                                                     _mm256_loadu_ps(token + i + 8 * s), lanes[s].total);
            float rest = 0;
            for (; i < columns; i++) rest += load_float<kind>(weight + i * BYTES) * token[i];
            for (const Lanes& each : lanes) rest += each.sum();
            out[t * out_stride + r] = rest;
        }
}

}  // namespace

KTOPT_KERNELS(avx2_kernels, "avx2", quantize, quantized, floats, dequantize, no_product);

}  // namespace ktopt
