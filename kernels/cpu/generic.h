// What is the same for every instruction set: loops over rows, blocks and tokens. A file that includes this says how 256 unpacked
// weights meet 256 activations: a struct Lanes with an accumulator, `add<Format>` and `sum`.
#pragma once

#include <type_traits>

#include "formats.h"

namespace ktopt {
namespace {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

template <int kind>
inline float load_float(const uint8_t* p) {
    if constexpr (kind == F32) {
        float x;
        std::memcpy(&x, p, 4);
        return x;
    } else if constexpr (kind == F16) {
        return half_at(p);
    } else {
        uint16_t h;
        std::memcpy(&h, p, 2);
        return float_of(uint32_t(h) << 16);
    }
}

constexpr float SMALLEST = 0x1p-118f;  // below it, 127 / x overflows: such a group of 32 counts as zero

// Quantise one group of 32. Its scale is NaN where it holds inf or NaN, so that the result is NaN as well.
inline void quantize32(const float* x, int8_t* q, float& d, float& s32, float* s16) {
    uint32_t largest = 0;
    for (int i = 0; i < 32; i++) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float amax = float_of(largest);
    const bool finite = largest < 0x7f800000;
    const float inverse = finite && amax >= SMALLEST ? 127.0f / amax : 0.0f;
    d = !finite ? float_of(0x7fc00000) : inverse != 0 ? amax / 127.0f : 0.0f;
    int half[2] = {0, 0};
    for (int h = 0; h < 2; h++)
        for (int i = 16 * h; i < 16 * h + 16; i++) {
            const float moved = (finite ? x[i] : 0.0f) * inverse + 12582912.0f;  // its low bits are x rounded to nearest
            const int value = int(bits_of(moved) & 0x7fffff) - 0x400000;
            q[i] = int8_t(value);
            half[h] += value;
        }
    s16[0] = d * float(half[0]);
    s16[1] = d * float(half[1]);
    s32 = d * float(half[0] + half[1]);
}

inline void quantize(const float* x, int64_t columns, Activations* out) {
    for (int64_t start = 0; start < columns; start += 256, out++) {
        const int64_t left = columns - start;
        if (left < 256) std::memset(static_cast<void*>(out), 0, sizeof *out);
        for (int g = 0; g < 8 && 32 * g < left; g++)
            quantize32(x + start + 32 * g, out->q + 32 * g, out->d8[g], out->s8[g], out->s16 + 2 * g);
    }
}

void widen(const uint16_t* bfloat16, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) out[i] = float_of(uint32_t(bfloat16[i]) << 16);
}

inline uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

// Numbers of one group of G.
template <class F, int G>
inline void numbers(const uint8_t* u, float scale, float offset, float* out) {
    for (int i = 0; i < G; i++) {
        const float value = scale * float(int(u[i]) - F::ZERO);
        out[i] = F::OFFSETS ? value - offset : value;
    }
}

template <int kind>
void dequantize(const uint8_t* row, int64_t columns, void* out, bool bfloat16) {
    auto *wide = static_cast<float*>(out), *made = wide;
    auto* narrow = static_cast<uint16_t*>(out);
    float piece[256];
    for (int64_t start = 0; start < columns; start += 256) {
        const int64_t count = columns - start < 256 ? columns - start : 256;
        if (bfloat16 || is_float(kind)) made = piece;
        if constexpr (is_float(kind)) {
            for (int64_t i = 0; i < count; i++) made[i] = load_float<kind>(row + (start + i) * layout_of(kind).bytes);
        } else {
            using F = Format<kind>;
            Unpacked w;
            F::unpack(row, count, w);
            row += F::SPAN;
            for (int64_t g = 0; g < count / F::GROUP; g++)
                numbers<F, F::GROUP>(w.u + g * F::GROUP, w.scale[g], w.offset[g], made + g * F::GROUP);
        }
        if (bfloat16) {
            for (int64_t i = 0; i < count; i++) narrow[start + i] = to_bfloat16(made[i]);
        } else if (made == piece) {
            std::memcpy(wide + start, piece, size_t(count) * sizeof(float));
        } else {
            made += 256;
        }
    }
}

template <class Lanes, int kind, int tokens>
inline void row_times(const uint8_t* row, int64_t columns, const Activations* x, size_t x_stride, float* out, size_t out_stride) {
    using F = Format<kind>;
    Unpacked w;
    Lanes lanes[tokens];
    for (int64_t start = 0; start < columns; start += 256, row += F::SPAN, x++) {
        F::unpack(row, columns - start < 256 ? columns - start : 256, w);
        for (int t = 0; t < tokens; t++) lanes[t].template add<F>(w, x[t * x_stride]);
    }
    for (int t = 0; t < tokens; t++) out[t * out_stride] = lanes[t].sum();
}

// Calls f with tokens in groups of four, and what is left: f(integral constant of how many, the first).
template <class Function>
inline void in_groups(int64_t tokens, Function f) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) f(std::integral_constant<int, 4>(), t);
    switch (tokens - t) {
    case 3: f(std::integral_constant<int, 3>(), t); break;
    case 2: f(std::integral_constant<int, 2>(), t); break;
    case 1: f(std::integral_constant<int, 1>(), t); break;
    default: break;
    }
}

template <class Lanes, int kind>
void quantized_rows(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const void* x, size_t x_stride,
                    int64_t tokens, float* out, size_t out_stride) {
    const auto* activations = static_cast<const Activations*>(x);
    for (int64_t r = 0; r < rows; r++, weight += row_bytes)
        in_groups(tokens, [&](auto count, int64_t t) {
            row_times<Lanes, kind, decltype(count)::value>(weight, columns, activations + t * x_stride, x_stride,
                                                           out + t * out_stride + r, out_stride);
        });
}

template <int kind>
void float_rows(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const void* x, size_t x_stride,
                int64_t tokens, float* out, size_t out_stride) {
    constexpr int LANES = 16;
    for (int64_t r = 0; r < rows; r++, weight += row_bytes)
        for (int64_t t = 0; t < tokens; t++) {
            const float* token = static_cast<const float*>(x) + t * x_stride;
            float sums[LANES] = {};
            int64_t i = 0;
            for (; i + LANES <= columns; i += LANES)
                for (int l = 0; l < LANES; l++)
                    sums[l] += load_float<kind>(weight + (i + l) * layout_of(kind).bytes) * token[i + l];
            float sum = 0;
            for (; i < columns; i++) sum += load_float<kind>(weight + i * layout_of(kind).bytes) * token[i];
            for (int l = 0; l < LANES; l++) sum += sums[l];
            out[t * out_stride + r] = sum;
        }
}

}  // namespace
}  // namespace ktopt
