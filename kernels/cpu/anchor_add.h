// Makes a block's anchors from its keys (anchors.h): once over the keys for what stands for all of them, once for each token.
#pragma once

#include "anchor_turn.h"
#include "anchors.h"
#include "generic.h"
#include "simd.h"

namespace ktopt {
namespace {
namespace anchor {

template <int kind>
inline Vector numbers(const uint8_t* p, int64_t at) {
    if constexpr (kind == F32) return Vector::load(reinterpret_cast<const float*>(p) + at);
    if constexpr (kind == F16) return Vector::load_float16(reinterpret_cast<const uint16_t*>(p) + at);
    return Vector::load_bfloat16(reinterpret_cast<const uint16_t*>(p) + at);
}

// As float16, rounded down or up.
template <bool up>
inline void store_bound(const Vector& x, uint16_t* out) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(x.v, up ? 2 : 1));
#elif defined(__AVX2__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(x.v, up ? 2 : 1));
#else
    for (int i = 0; i < Vector::WIDTH; i++) {
        const float value = up ? -x.v[i] : x.v[i];
        uint16_t half = float_to_half(value);
        if (half_to_float(half) > value) half = half == 0 ? 0x8001 : uint16_t(half & 0x8000 ? half + 1 : half - 1);
        out[i] = up ? uint16_t(half ^ 0x8000) : half;
    }
#endif
}

// Whole numbers from 0 to 15, as bytes.
inline void store_nibbles(Vector x, uint8_t* out) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
#elif defined(__AVX2__)
    const __m256i wide = _mm256_cvtps_epi32(x.v);
    const __m128i few = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(few, few));
#else
    for (int i = 0; i < Vector::WIDTH; i++) out[i] = uint8_t(x.v[i]);
#endif
}

// A bit for each number that isn't negative.
inline unsigned positive(Vector x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_GE_OQ);
#elif defined(__AVX2__)
    return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x.v, _mm256_setzero_ps(), _CMP_GE_OQ)));
#else
    unsigned bits = 0;
    for (int i = 0; i < Vector::WIDTH; i++) bits |= unsigned(x.v[i] >= 0) << i;
    return bits;
#endif
}

inline Vector magnitude_of(Vector x) { return x.max(Vector::zero() - x); }

// The smallest and the largest numbers and the mean. False where a number is beyond the limit, or is none.
template <int kind>
inline bool add_bounds(const NewBlock& b) {
    constexpr int BYTES = layout_of(kind).bytes;
    const Vector share = Vector::all(1.0f / float(b.tokens));
    for (int64_t d = 0; d < b.dim; d += Vector::WIDTH) {
        Vector low = numbers<kind>(b.keys, d), high = low, sum = low;
        for (int64_t t = 1; t < b.tokens; t++) {
            const Vector x = numbers<kind>(b.keys + t * b.token_stride * BYTES, d);
            low = x.min(low);
            high = x.max(high);
            sum = sum + x;
        }
        // where a number is NaN or infinite, so is the sum, and what it is taken from itself
        const Vector nothing = sum - sum, reach = magnitude_of(low).max(magnitude_of(high));
        if (!(nothing.sum() == 0) || !(reach.largest() <= b.limit)) return false;
        if (b.low) store_bound<false>(low, b.low + d);
        if (b.high) store_bound<true>(high, b.high + d);
        if (b.mean) (sum * share).store_float16(b.mean + d);
    }
    return true;
}

// The codes and signs of a token, whose turned differences from the mean key are `off`, to place `t`.
inline void add_token(const NewBlock& b, const float* off, Vector low, Vector high, Vector reach, int64_t t) {
    const int64_t padded = b.groups * TOKEN_GROUP;
    constexpr float SMALLEST = 0x1p-14f;  // normal float16
    float least[Vector::WIDTH];
    (Vector::zero() - low).store(least);
    const float lowest = half_to_float(b.steps[padded + t] = float_to_half(-Vector::load(least).largest()));
    const float step = half_to_float(b.steps[t] = float_to_half((high.largest() - lowest) / 15));
    b.magnitude[t] = float_to_half(reach.sum() / float(b.dim));
    const float inverse = 1 / (step > SMALLEST ? step : SMALLEST);
    uint8_t* codes = b.codes + t / 16 * b.dim * 8 + t % 16 * 4;
    uint8_t* signs = b.signs + t / TOKEN_GROUP * b.dim * 4 + t % TOKEN_GROUP;
    for (int64_t d = 0; d < b.dim; d += Vector::WIDTH) {
        const Vector x = Vector::load(off + d);
        const Vector code = ((x - Vector::all(lowest)) * Vector::all(inverse)).rounded();
        uint8_t bytes[Vector::WIDTH];
        store_nibbles(code.max(Vector::zero()).min(Vector::all(15)), bytes);
        const unsigned bits = positive(x);
        for (int i = 0; i < Vector::WIDTH; i += 8) {
            uint32_t first, second;
            std::memcpy(&first, bytes + i, 4);
            std::memcpy(&second, bytes + i + 4, 4);
            first |= second << 4;
            std::memcpy(codes + (d + i) * 8, &first, 4);
            signs[(d + i) * 4] = uint8_t(bits >> i);
        }
    }
}

template <int kind>
inline bool add_block(const NewBlock& b) {
    constexpr int BYTES = layout_of(kind).bytes;
    if (!add_bounds<kind>(b)) return false;
    if (b.codes == nullptr) return true;
    float *mean = b.room, *off = b.room + b.dim;
    for (int64_t d = 0; d < b.dim; d += Vector::WIDTH) Vector::load_float16(b.mean + d).store(mean + d);
    for (int64_t t = 0; t < b.groups * TOKEN_GROUP; t++) {
        const uint8_t* key = b.keys + (t < b.tokens ? t : b.tokens - 1) * b.token_stride * BYTES;
        Vector low = Vector::all(3e38f), high = Vector::all(-3e38f), reach = Vector::zero();
        for (int64_t d = 0; d < b.dim; d += Vector::WIDTH) (numbers<kind>(key, d) - Vector::load(mean + d)).store(off + d);
        turn(off, b.dim);
        for (int64_t d = 0; d < b.dim; d += Vector::WIDTH) {
            const Vector x = Vector::load(off + d);
            low = x.min(low);
            high = x.max(high);
            reach = reach + magnitude_of(x);
        }
        add_token(b, off, low, high, reach, t);
    }
    return true;
}

inline bool add(const NewBlock& b) {
    switch (b.kind) {
    case F32: return add_block<F32>(b);
    case F16: return add_block<F16>(b);
    default: return add_block<BF16>(b);
    }
}

}  // namespace anchor

}  // namespace
}  // namespace ktopt
