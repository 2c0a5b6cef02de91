// AVX2, FMA and F16C: formats.h's unpacking as the compiler vectorises it, then products of bytes.
#include <immintrin.h>

#include "generic.h"

namespace ktopt {
namespace {

struct Lanes {
    __m256 total = _mm256_setzero_ps();

    template <class F>
    void add(const Unpacked& w, const Activations& x) {
        // maddubs takes an unsigned and a signed byte and saturates at 16 bits: numbers to 127 may stay unsigned, larger are
        // taken as signed, with the sign moved over to the activation
        constexpr bool SIGNED = F::ZERO == 128;
        constexpr float ZERO = SIGNED ? 0 : F::ZERO;
        const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(char(0x80));
        for (int g = 0; g < 8; g++) {
            __m256i u = _mm256_load_si256(reinterpret_cast<const __m256i*>(w.u + 32 * g));
            __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(x.q + 32 * g));
            if constexpr (SIGNED) {
                u = _mm256_xor_si256(u, flip);
                q = _mm256_sign_epi8(q, u);
                u = _mm256_abs_epi8(u);
            }
            const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_maddubs_epi16(u, q), ones));
            __m256 scale;
            if constexpr (F::GROUP == 32) {
                scale = _mm256_set1_ps(w.scale[g] * x.d8[g]);
            } else {
                scale = _mm256_set_m128(_mm_set1_ps(w.scale[2 * g + 1] * x.d8[g]), _mm_set1_ps(w.scale[2 * g] * x.d8[g]));
            }
            total = _mm256_fmadd_ps(scale, dot, total);
        }
        if constexpr (ZERO != 0 || F::OFFSETS) {
            const float* sums = F::GROUP == 16 ? x.s16 : x.s8;
            for (int g = 0; g < 256 / F::GROUP; g += 8) {
                __m256 offset = _mm256_mul_ps(_mm256_load_ps(w.scale + g), _mm256_set1_ps(ZERO));
                if constexpr (F::OFFSETS) offset = _mm256_add_ps(offset, _mm256_load_ps(w.offset + g));
                total = _mm256_fnmadd_ps(offset, _mm256_loadu_ps(sums + g), total);
            }
        }
    }

    float sum() const {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(total), _mm256_extractf128_ps(total, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
};

template <int kind>
constexpr RowsFunction quantized = quantized_rows<Lanes, kind>;
template <int kind>
constexpr RowsFunction floats = float_rows<kind>;

}  // namespace

KTOPT_KERNELS(avx2_kernels, "avx2", quantized, floats, dequantize);

}  // namespace ktopt
