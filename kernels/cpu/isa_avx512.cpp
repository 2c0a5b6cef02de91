// AVX512 (F, BW, DQ, VL), and built again with VNNI, and with VNNI and BF16. Blocks are unpacked in registers, 64 numbers at a
// time.
#include "gemm_avx512.h"
#include "quantize_avx512.h"
#include "table.h"

namespace ktopt {
namespace {

// The group that each of a chunk's 16 sums of four belongs to.
template <int group>
inline __m512i group_of_lane(int c) {
    const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    if constexpr (group == 16) return _mm512_add_epi32(four, _mm512_set1_epi32(4 * c));
    return _mm512_add_epi32(_mm512_srli_epi32(four, 1), _mm512_set1_epi32(2 * c));
}

// Add 64 * chunks numbers of a row, or 32 fewer where `second` is false, for each token.
template <int kind, int tokens, int chunks, bool second>
inline void step(const uint8_t* p, const Activations* x, size_t x_stride, __m512* total) {
    using F = Format<kind>;
    constexpr bool SIGNED = F::ZERO == 128 && !VNNI;
    constexpr int ZERO = SIGNED ? 0 : F::ZERO;
    const Groups g = Wide<kind>::groups(p, 2 * chunks - !second);
    __m512 offset = g.offset, scale[tokens];
    if constexpr (ZERO != 0) offset = _mm512_mul_ps(g.scale, _mm512_set1_ps(ZERO));
    for (int t = 0; t < tokens; t++) {
        __m512 d = low8(_mm256_load_ps(x[t * x_stride].d8));
        if constexpr (F::GROUP == 16)
            d = _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), d);
        scale[t] = _mm512_mul_ps(g.scale, d);
        if constexpr (ZERO != 0 || F::OFFSETS) {
            const __m512 sums = F::GROUP == 16 ? _mm512_load_ps(x[t * x_stride].s16) : low8(_mm256_load_ps(x[t * x_stride].s8));
            total[t] = _mm512_fnmadd_ps(offset, sums, total[t]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < chunks; c++) {
        const __m512i u = Wide<kind>::chunk(p, c, second || c + 1 < chunks);
        const __m512i lanes = group_of_lane<F::GROUP>(c);
        for (int t = 0; t < tokens; t++) {
            const __m512i dot = products<SIGNED>(u, load64(x[t * x_stride].q + 64 * c));
            total[t] = _mm512_fmadd_ps(_mm512_permutexvar_ps(lanes, scale[t]), _mm512_cvtepi32_ps(dot), total[t]);
        }
    }
}

template <int kind, int tokens>
inline void wide_row(const uint8_t* row, int64_t columns, const Activations* x, size_t x_stride, float* out, size_t out_stride) {
    __m512 total[tokens];
    for (int t = 0; t < tokens; t++) total[t] = _mm512_setzero_ps();
    for (; columns >= 256; columns -= 256, row += Format<kind>::SPAN, x++) step<kind, tokens, 4, true>(row, x, x_stride, total);
    if constexpr (layout_of(kind).elements == 32) {
        switch (columns / 32) {
        case 1: step<kind, tokens, 1, false>(row, x, x_stride, total); break;
        case 2: step<kind, tokens, 1, true>(row, x, x_stride, total); break;
        case 3: step<kind, tokens, 2, false>(row, x, x_stride, total); break;
        case 4: step<kind, tokens, 2, true>(row, x, x_stride, total); break;
        case 5: step<kind, tokens, 3, false>(row, x, x_stride, total); break;
        case 6: step<kind, tokens, 3, true>(row, x, x_stride, total); break;
        case 7: step<kind, tokens, 4, false>(row, x, x_stride, total); break;
        default: break;
        }
    }
    for (int t = 0; t < tokens; t++) out[t * out_stride] = _mm512_reduce_add_ps(total[t]);
}

// Bytes ahead of which weights are asked for: the CPU's own prefetching stops at each page of 4 KiB.
constexpr size_t AHEAD = 4096;

template <int kind>
void wide_rows(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const void* x, size_t x_stride,
               int64_t tokens, float* out, size_t out_stride) {
    const auto* activations = static_cast<const Activations*>(x);
    for (int64_t r = 0; r < rows; r++, weight += row_bytes) {
        for (size_t line = 0; line < row_bytes; line += 64) _mm_prefetch(weight + AHEAD + line, _MM_HINT_T0);
        in_groups(tokens, [&](auto count, int64_t t) {
            wide_row<kind, decltype(count)::value>(weight, columns, activations + t * x_stride, x_stride, out + t * out_stride + r,
                                                   out_stride);
        });
    }
}

// 16 numbers to their place, rounded to nearest even where they become bfloat16. They are no NaN: scales are finite.
inline void store_numbers(__m512 x, void* out, int64_t at, bool bfloat16) {
    if (!bfloat16) {
        _mm512_storeu_ps(static_cast<float*>(out) + at, x);
        return;
    }
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + at), _mm512_cvtepi32_epi16(rounded));
}

template <int kind>
void wide_dequantize(const uint8_t* row, int64_t columns, void* out, bool bfloat16) {
    using F = Format<kind>;
    constexpr bool SIGNED = F::ZERO == 128 && !VNNI;
    alignas(64) float scale[16], offset[16];
    alignas(64) uint8_t u[64];
    for (int64_t start = 0; start < columns; start += 256, row += F::SPAN) {
        const int64_t count = columns - start < 256 ? columns - start : 256;
        const Groups g = Wide<kind>::groups(row, int(count / 32));
        _mm512_store_ps(scale, g.scale);
        _mm512_store_ps(offset, g.offset);
        for (int c = 0; 64 * c < count; c++) {
            const __m512i chunk = Wide<kind>::chunk(row, c, 64 * c + 32 < count);
            _mm512_store_si512(u, chunk);
            for (int i = 64 * c; i < 64 * c + 64 && i < count; i += 16) {
                const __m128i few = load16(u + i % 64);
                const __m512i wide = SIGNED ? _mm512_cvtepi8_epi32(few)
                                            : _mm512_sub_epi32(_mm512_cvtepu8_epi32(few), _mm512_set1_epi32(F::ZERO));
                __m512 number = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(scale[i / F::GROUP]));
                if constexpr (F::OFFSETS) number = _mm512_sub_ps(number, _mm512_set1_ps(offset[i / F::GROUP]));
                store_numbers(number, out, start + i, bfloat16);
            }
        }
    }
}

template <int kind>
inline __m512 load_floats(const uint8_t* p, __mmask16 there) {
    if constexpr (kind == F32) return _mm512_maskz_loadu_ps(there, p);
    const __m256i halves = _mm256_maskz_loadu_epi16(there, p);
    if constexpr (kind == F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

template <int kind, int tokens>
inline void wide_float_row(const uint8_t* row, int64_t columns, const float* x, size_t x_stride, float* out, size_t out_stride) {
    constexpr int BYTES = layout_of(kind).bytes, SUMS = tokens == 1 ? 4 : 1;  // several sums, so that one doesn't wait for another
    __m512 total[SUMS][tokens];
    for (auto& sums : total)
        for (auto& sum : sums) sum = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 16 * SUMS <= columns; i += 16 * SUMS)
        for (int s = 0; s < SUMS; s++) {
            const __m512 w = load_floats<kind>(row + (i + 16 * s) * BYTES, 0xffff);
            for (int t = 0; t < tokens; t++)
                total[s][t] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x + t * x_stride + i + 16 * s), total[s][t]);
        }
    for (; i < columns; i += 16) {
        const __mmask16 there = columns - i < 16 ? __mmask16((1u << (columns - i)) - 1) : __mmask16(0xffff);
        const __m512 w = load_floats<kind>(row + i * BYTES, there);
        for (int t = 0; t < tokens; t++)
            total[0][t] = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(there, x + t * x_stride + i), total[0][t]);
    }
    for (int t = 0; t < tokens; t++) {
        for (int s = 1; s < SUMS; s++) total[0][t] = _mm512_add_ps(total[0][t], total[s][t]);
        out[t * out_stride] = _mm512_reduce_add_ps(total[0][t]);
    }
}

template <int kind>
void wide_float_rows(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const void* x, size_t x_stride,
                     int64_t tokens, float* out, size_t out_stride) {
    const auto* floats = static_cast<const float*>(x);
    for (int64_t r = 0; r < rows; r++, weight += row_bytes)
        in_groups(tokens, [&](auto count, int64_t t) {
            wide_float_row<kind, decltype(count)::value>(weight, columns, floats + t * x_stride, x_stride,
                                                         out + t * out_stride + r, out_stride);
        });
}

}  // namespace

#if defined(__AVX512BF16__)
KTOPT_KERNELS(avx512bf16_kernels, "avx512bf16", wide_quantize, wide_rows, wide_float_rows, wide_dequantize, tall_product);
#elif defined(__AVX512VNNI__)
KTOPT_KERNELS(avx512vnni_kernels, "avx512vnni", wide_quantize, wide_rows, wide_float_rows, wide_dequantize, tall_product);
#else
KTOPT_KERNELS(avx512_kernels, "avx512", wide_quantize, wide_rows, wide_float_rows, wide_dequantize, no_product);
#endif

}  // namespace ktopt
