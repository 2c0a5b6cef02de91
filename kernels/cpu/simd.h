// A vector of floats as wide as an instruction set has them, for code that is written once and compiled for each: see fused.h.
#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "formats.h"

namespace ktopt {
namespace {

#if defined(__AVX512F__)

struct Vector {
    static constexpr int WIDTH = 16;
    __m512 v;

    static Vector zero() { return {_mm512_setzero_ps()}; }
    static Vector all(float x) { return {_mm512_set1_ps(x)}; }
    static Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vector load_float16(const uint16_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static Vector load_bfloat16(const uint16_t* p) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
    }
    static Vector load_int8(const int8_t* p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
    }
    static Vector all_float16(const uint8_t* p) {
        int16_t half;
        std::memcpy(&half, p, 2);
        return {_mm512_cvtph_ps(_mm256_set1_epi16(half))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store_float16(uint16_t* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    float sum() const { return _mm512_reduce_add_ps(v); }
    // The sums of four vectors, in fewer steps than one by one.
    static void sums(const Vector (&x)[4], float* out) {
        const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0].v, x[1].v), _mm512_unpackhi_ps(x[0].v, x[1].v));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2].v, x[3].v), _mm512_unpackhi_ps(x[2].v, x[3].v));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512 lanes = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }
    float largest() const { return _mm512_reduce_max_ps(v); }
    // this * y + z
    Vector times_plus(Vector y, Vector z) const { return {_mm512_fmadd_ps(v, y.v, z.v)}; }
    Vector max(Vector y) const { return {_mm512_max_ps(v, y.v)}; }
    Vector min(Vector y) const { return {_mm512_min_ps(v, y.v)}; }
    Vector rounded() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    // this * 2^n for whole n
    Vector scaled(Vector n) const { return {_mm512_scalef_ps(v, n.v)}; }
    Vector operator+(Vector y) const { return {_mm512_add_ps(v, y.v)}; }
    Vector operator-(Vector y) const { return {_mm512_sub_ps(v, y.v)}; }
    Vector operator*(Vector y) const { return {_mm512_mul_ps(v, y.v)}; }
    Vector operator/(Vector y) const { return {_mm512_div_ps(v, y.v)}; }
};

#elif defined(__AVX2__)

struct Vector {
    static constexpr int WIDTH = 8;
    __m256 v;

    static Vector zero() { return {_mm256_setzero_ps()}; }
    static Vector all(float x) { return {_mm256_set1_ps(x)}; }
    static Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vector load_float16(const uint16_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    static Vector load_bfloat16(const uint16_t* p) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
    }
    static Vector load_int8(const int8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
    }
    static Vector all_float16(const uint8_t* p) { return all(half_at(p)); }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store_float16(uint16_t* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    float sum() const {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    static void sums(const Vector (&x)[4], float* out) {
        const __m256 lanes = _mm256_hadd_ps(_mm256_hadd_ps(x[0].v, x[1].v), _mm256_hadd_ps(x[2].v, x[3].v));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
    }
    float largest() const {
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
    }
    Vector times_plus(Vector y, Vector z) const { return {_mm256_fmadd_ps(v, y.v, z.v)}; }
    Vector max(Vector y) const { return {_mm256_max_ps(v, y.v)}; }
    Vector min(Vector y) const { return {_mm256_min_ps(v, y.v)}; }
    Vector rounded() const { return {_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    Vector scaled(Vector n) const {
        const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
        return {_mm256_mul_ps(v, _mm256_castsi256_ps(exponent))};
    }
    Vector operator+(Vector y) const { return {_mm256_add_ps(v, y.v)}; }
    Vector operator-(Vector y) const { return {_mm256_sub_ps(v, y.v)}; }
    Vector operator*(Vector y) const { return {_mm256_mul_ps(v, y.v)}; }
    Vector operator/(Vector y) const { return {_mm256_div_ps(v, y.v)}; }
};

#else

// Eight floats in whatever registers the compiler has for them: four at a time with NEON or SSE.
struct Vector {
    static constexpr int WIDTH = 8;
    using Floats = float __attribute__((vector_size(32)));
    using Ints = int32_t __attribute__((vector_size(32)));
    Floats v;

    static Vector zero() { return {Floats{}}; }
    static Vector all(float x) { return {Floats{} + x}; }
    static Vector load(const float* p) {
        Vector made;
        std::memcpy(&made.v, p, sizeof made.v);
        return made;
    }
    static Vector load_float16(const uint16_t* p) {
        Vector made;
        for (int i = 0; i < WIDTH; i++) made.v[i] = half_to_float(p[i]);
        return made;
    }
    static Vector load_bfloat16(const uint16_t* p) {
        Ints bits;
        for (int i = 0; i < WIDTH; i++) bits[i] = int32_t(uint32_t(p[i]) << 16);
        Vector made;
        std::memcpy(&made.v, &bits, sizeof bits);
        return made;
    }
    static Vector load_int8(const int8_t* p) {
        Vector made;
        for (int i = 0; i < WIDTH; i++) made.v[i] = float(p[i]);
        return made;
    }
    static Vector all_float16(const uint8_t* p) { return all(half_at(p)); }
    void store(float* p) const { std::memcpy(p, &v, sizeof v); }
    void store_float16(uint16_t* p) const {
        for (int i = 0; i < WIDTH; i++) p[i] = float_to_half(v[i]);
    }
    float sum() const {
        float total = 0;
        for (int i = 0; i < WIDTH; i++) total += v[i];
        return total;
    }
    static void sums(const Vector (&x)[4], float* out) {
        for (int i = 0; i < 4; i++) out[i] = x[i].sum();
    }
    float largest() const {
        float most = v[0];
        for (int i = 1; i < WIDTH; i++) most = v[i] > most ? v[i] : most;
        return most;
    }
    Vector times_plus(Vector y, Vector z) const { return {v * y.v + z.v}; }
    Vector max(Vector y) const { return {v > y.v ? v : y.v}; }
    Vector min(Vector y) const { return {v < y.v ? v : y.v}; }
    Vector rounded() const {  // right up to 2^22, which exponents are
        const Floats shift = Floats{} + 12582912.0f;
        return {(v + shift) - shift};
    }
    Vector scaled(Vector n) const {
        const Ints exponent = (__builtin_convertvector(n.v, Ints) + 127) << 23;
        Floats power;
        std::memcpy(&power, &exponent, sizeof power);
        return {v * power};
    }
    Vector operator+(Vector y) const { return {v + y.v}; }
    Vector operator-(Vector y) const { return {v - y.v}; }
    Vector operator*(Vector y) const { return {v * y.v}; }
    Vector operator/(Vector y) const { return {v / y.v}; }
};

#endif

// e^x to 2e-7 of it, for x of any size: 0 below -87 as far as sums notice, and e^88 above 88. NaN stays NaN. x = n ln 2 + r; the
// polynomial interpolates (e^r - 1 - r) / r^2 at Chebyshev's points of |r| <= ln 2 / 2.
inline Vector exponential(Vector x) {
    x = Vector::all(88.0f).min(Vector::all(-87.3f).max(x));
    const Vector n = (x * Vector::all(1.44269504f)).rounded();
    Vector r = n.times_plus(Vector::all(-0.693145752f), x);
    r = n.times_plus(Vector::all(-1.42860682e-6f), r);
    Vector p = Vector::all(1.98909809e-4f);
    p = p.times_plus(r, Vector::all(1.39336416e-3f));
    p = p.times_plus(r, Vector::all(8.33331048e-3f));
    p = p.times_plus(r, Vector::all(4.16664667e-2f));
    p = p.times_plus(r, Vector::all(1.66666672e-1f));
    p = p.times_plus(r, Vector::all(0.5f));
    return (p * r * r + r + Vector::all(1.0f)).scaled(n);
}

}  // namespace
}  // namespace ktopt
