// What stands between the matrix products of a decoder layer, for one token at a time: norms, rotation, gated activations. Written on
// simd.h's vectors; each instruction set compiles its own. attention_segments.h has the attention.
#pragma once

#include <cmath>

#include "generic.h"
#include "simd.h"

namespace ktopt {
namespace {

constexpr int W = Vector::WIDTH;

// out = x / sqrt(mean(x^2) + eps) * weight. out may be x.
void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    Vector squares[4] = {Vector::zero(), Vector::zero(), Vector::zero(), Vector::zero()};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int s = 0; s < 4; s++) {
            const Vector v = Vector::load(x + i + s * W);
            squares[s] = v.times_plus(v, squares[s]);
        }
    float total = ((squares[0] + squares[1]) + (squares[2] + squares[3])).sum();
    for (; i < n; i++) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / float(n) + eps);
    for (i = 0; i + W <= n; i += W) (Vector::load(x + i) * Vector::all(scale) * Vector::load(weight + i)).store(out + i);
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// x * sigmoid(y)
inline Vector swish(Vector x, Vector y) { return x / (exponential(Vector::zero() - y) + Vector::all(1.0f)); }

// x * (1 + erf(x / sqrt 2)) / 2. Abramowitz and Stegun's 7.1.26 has erf to 1.5e-7 for positive numbers, which is enough: x * erf(x)
// is the same for -x.
inline Vector gelu(Vector x) {
    const Vector one = Vector::all(1.0f), size = (Vector::zero() - x).max(x), z = size * Vector::all(0.70710678f);
    const Vector t = one / z.times_plus(Vector::all(0.3275911f), one);
    Vector p = Vector::all(1.061405429f);
    constexpr float FURTHER[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    for (float next : FURTHER) p = p.times_plus(t, Vector::all(next));
    const Vector erf = one - p * t * exponential(Vector::zero() - z * z);
    return size.times_plus(erf, x) * Vector::all(0.5f);
}

template <int activation>
inline Vector activated(Vector x) {
    if constexpr (activation == RELU) return Vector::zero().max(x);  // in this order NaN stays NaN
    if constexpr (activation == RELU2) return Vector::zero().max(x) * Vector::zero().max(x);
    if constexpr (activation == GELU) return gelu(x);
    if constexpr (activation == QUICK_GELU) return swish(x, x * Vector::all(1.702f));
    if constexpr (activation == GELU_TANH) {  // x * (1 + tanh(u)) / 2 = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
        const Vector cubic = x * x * x * Vector::all(0.044715f) + x;
        return swish(x, cubic * Vector::all(1.5957691216f));
    }
    return swish(x, x);
}

template <int activation>
void gated_by(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) (activated<activation>(Vector::load(gate + i)) * Vector::load(up + i)).store(out + i);
    if (i == n) return;
    float g[W] = {}, made[W];
    for (int64_t j = i; j < n; j++) g[j - i] = gate[j];
    activated<activation>(Vector::load(g)).store(made);
    for (int64_t j = i; j < n; j++) out[j] = made[j - i] * up[j];
}

// out = activation(gate) * up. out may be gate.
void gated(int activation, const float* gate, const float* up, int64_t n, float* out) {
    switch (activation) {
    case SILU: return gated_by<SILU>(gate, up, n, out);
    case GELU_TANH: return gated_by<GELU_TANH>(gate, up, n, out);
    case RELU: return gated_by<RELU>(gate, up, n, out);
    case GELU: return gated_by<GELU>(gate, up, n, out);
    case QUICK_GELU: return gated_by<QUICK_GELU>(gate, up, n, out);
    default: return gated_by<RELU2>(gate, up, n, out);
    }
}

// Rotates the first `dim` numbers of x in place: pairs (i, i + dim/2). cos and sin are of size dim, each half its own.
void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    float* y = x + half;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const Vector a = Vector::load(x + i), b = Vector::load(y + i);
        (a * Vector::load(cos + i) - b * Vector::load(sin + i)).store(x + i);
        (b * Vector::load(cos + half + i) + a * Vector::load(sin + half + i)).store(y + i);
    }
    for (; i < half; i++) {
        const float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[half + i] + a * sin[half + i];
    }
}

// Whether float16 can hold numbers; inf and NaN it can.
inline bool within_float16(const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (std::isfinite(x[i]) && std::fabs(x[i]) > 65504.0f) return false;
    return true;
}

// Whole blocks of Q8_0: a scale in float16 and 32 numbers that count by it. Answers false where float16 can't hold the scale.
inline bool narrow_q8_0(const float* x, int64_t n, uint8_t* out) {
    bool fits = true;
    for (int64_t i = 0; i < n; i += 32, out += layout_of(Q8_0).bytes) {
        float scale, sum, sums[2];
        int8_t numbers[32];
        quantize32(x + i, numbers, scale, sum, sums);
        fits &= within_float16(&scale, 1);
        const uint16_t half = float_to_half(scale);
        std::memcpy(out, &half, sizeof half);
        std::memcpy(out + sizeof half, numbers, sizeof numbers);
    }
    return fits;
}

// Rounds to float16 or bfloat16, to blocks of Q8_0, or copies. Answers false where float16 can't hold a number or a scale.
bool narrow(int kind, const float* x, int64_t n, void* out) {
    auto* halves = static_cast<uint16_t*>(out);
    if (kind == Q8_0) return narrow_q8_0(x, n, static_cast<uint8_t*>(out));
    if (kind == F32) {
        std::memcpy(out, x, size_t(n) * sizeof(float));
        return true;
    }
    if (kind == BF16) {
        for (int64_t i = 0; i < n; i++) halves[i] = to_bfloat16(x[i]);
        return true;
    }
    constexpr float MOST = 65504.0f;
    bool fits = true;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const Vector v = Vector::load(x + i);
        if (!(v.max(Vector::zero() - v).largest() <= MOST)) fits &= within_float16(x + i, W);
        v.store_float16(halves + i);
    }
    for (; i < n; i++) {
        fits &= within_float16(x + i, 1);
        halves[i] = float_to_half(x[i]);
    }
    return fits;
}

void add(const float* x, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i++) to[i] += x[i];
}

}  // namespace
}  // namespace ktopt
