// What stands between the matrix products of a decoder layer, for one token at a time: norms, rotation, gated activations, and the
// attention of one query to a stretch of the cache. Written on simd.h's vectors; each instruction set compiles its own.
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

template <int kind>
inline Vector load_cached(const uint8_t* row, int64_t i) {
    if constexpr (kind == F32) return Vector::load(reinterpret_cast<const float*>(row) + i);
    if constexpr (kind == F16) return Vector::load_float16(reinterpret_cast<const uint16_t*>(row) + i);
    return Vector::load_bfloat16(reinterpret_cast<const uint16_t*>(row) + i);
}

constexpr int BLOCK = 128;  // tokens whose scores are held together
constexpr int HEADS = 4;    // query heads that are worked at together

// Bytes ahead of which keys and values are asked for: the CPU's own prefetching stops at each page of 4 KiB.
constexpr int64_t CACHE_AHEAD = 4096;

inline void ask_ahead(const uint8_t* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + CACHE_AHEAD + at);
}

// Products of H queries with four keys.
template <int kind, int H>
inline void four_dots(const uint8_t* keys, int64_t row_bytes, const float* q, int64_t dim, float* out) {
    Vector total[H][4];
    ask_ahead(keys, 4 * row_bytes);
    for (int h = 0; h < H; h++)
        for (int t = 0; t < 4; t++) total[h][t] = Vector::zero();
    for (int64_t i = 0; i < dim; i += W) {
        Vector k[4];
        for (int t = 0; t < 4; t++) k[t] = load_cached<kind>(keys + t * row_bytes, i);
        for (int h = 0; h < H; h++) {
            const Vector each = Vector::load(q + h * dim + i);
            for (int t = 0; t < 4; t++) total[h][t] = each.times_plus(k[t], total[h][t]);
        }
    }
    for (int h = 0; h < H; h++) Vector::sums(total[h], out + h * BLOCK);
}

template <int kind, int H>
inline void one_dot(const uint8_t* key, const float* q, int64_t dim, float* out) {
    for (int h = 0; h < H; h++) {
        Vector total = Vector::zero();
        for (int64_t i = 0; i < dim; i += W) total = Vector::load(q + h * dim + i).times_plus(load_cached<kind>(key, i), total);
        out[h * BLOCK] = total.sum();
    }
}

// C vectors of `out` += weights times values, for H heads. weights lie BLOCK apart, results `stride`.
template <int kind, int H, int C>
inline void weighted(const uint8_t* values, int64_t row_bytes, int64_t tokens, const float* weights, float* out, int64_t stride) {
    Vector total[H][C];
    for (int h = 0; h < H; h++)
        for (int c = 0; c < C; c++) total[h][c] = Vector::load(out + h * stride + c * W);
    for (int64_t t = 0; t < tokens; t++, values += row_bytes) {
        ask_ahead(values, C * W * layout_of(kind).bytes);
        for (int c = 0; c < C; c++) {
            const Vector v = load_cached<kind>(values, c * W);
            for (int h = 0; h < H; h++) total[h][c] = Vector::all(weights[h * BLOCK + t]).times_plus(v, total[h][c]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int c = 0; c < C; c++) total[h][c].store(out + h * stride + c * W);
}

// The softmax of one head's block of scores joins what stands in `state`: [0] the largest score, [1] the sum of weights. Scores
// become weights; earlier results are scaled.
inline void join(float* scores, int64_t tokens, float scale, float* state, float* out, int64_t dim) {
    for (int64_t t = tokens; t % W != 0; t++) scores[t] = -INFINITY;
    Vector most = Vector::all(-INFINITY);
    for (int64_t t = 0; t < tokens; t += W) {
        const Vector s = Vector::load(scores + t) * Vector::all(scale);
        s.store(scores + t);
        most = most.max(s);
    }
    const float largest = std::fmax(state[0], most.largest());
    const float before = state[0] == -INFINITY ? 0.0f : std::exp(state[0] - largest);
    Vector sum = Vector::zero();
    for (int64_t t = 0; t < tokens; t += W) {
        const Vector weight = exponential(Vector::load(scores + t) - Vector::all(largest));
        weight.store(scores + t);
        sum = sum + weight;
    }
    state[0] = largest;
    state[1] = state[1] * before + sum.sum();
    for (int64_t i = 0; i < dim; i += W) (Vector::load(out + i) * Vector::all(before)).store(out + i);
}

template <int kind, int H>
void attend_heads(const Stretch& s, const float* q, float* out) {
    constexpr int64_t ITEM = layout_of(kind).bytes;
    const int64_t key_bytes = s.key_dim * ITEM, value_bytes = s.value_dim * ITEM, stride = s.value_dim + 2;
    alignas(64) float scores[H * BLOCK];
    for (int64_t start = 0; start < s.tokens; start += BLOCK) {
        const int64_t count = s.tokens - start < BLOCK ? s.tokens - start : BLOCK;
        const uint8_t *keys = s.keys + start * key_bytes, *values = s.values + start * value_bytes;
        int64_t t = 0;
        for (; t + 4 <= count; t += 4) four_dots<kind, H>(keys + t * key_bytes, key_bytes, q, s.key_dim, scores + t);
        for (; t < count; t++) one_dot<kind, H>(keys + t * key_bytes, q, s.key_dim, scores + t);
        for (int h = 0; h < H; h++)
            join(scores + h * BLOCK, count, s.scale, out + h * stride + s.value_dim, out + h * stride, s.value_dim);
        int64_t i = 0;
        for (; i + 4 * W <= s.value_dim; i += 4 * W)
            weighted<kind, H, 4>(values + i * ITEM, value_bytes, count, scores, out + i, stride);
        for (; i < s.value_dim; i += W) weighted<kind, H, 1>(values + i * ITEM, value_bytes, count, scores, out + i, stride);
    }
}

template <int kind>
void attend_kind(const Stretch& s, const float* q, int64_t heads, float* out) {
    const int64_t stride = s.value_dim + 2;
    for (int64_t h = 0; h < heads; h++) {
        std::memset(out + h * stride, 0, size_t(s.value_dim) * sizeof(float));
        out[h * stride + s.value_dim] = -INFINITY;
        out[h * stride + s.value_dim + 1] = 0;
    }
    in_groups(heads, [&](auto count, int64_t h) {
        attend_heads<kind, decltype(count)::value>(s, q + h * s.key_dim, out + h * stride);
    });
}

// Attention of `heads` queries that share keys and values to a stretch of them. A head's row of `out` is its unnormalised result,
// the largest score, and the sum of weights.
void attend(const Stretch& s, const float* q, int64_t heads, float* out) {
    switch (s.kind) {
    case F32: attend_kind<F32>(s, q, heads, out); break;
    case F16: attend_kind<F16>(s, q, heads, out); break;
    default: attend_kind<BF16>(s, q, heads, out); break;
    }
}

}  // namespace
}  // namespace ktopt
