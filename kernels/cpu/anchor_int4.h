// Keys in 4 bits (anchors.h): products with queries in 8 bits, exact in int32, a token a lane; then the softmax's sum.
#pragma once

#include <cmath>

#include "anchors.h"
#include "generic.h"
#include "simd.h"

namespace ktopt {
namespace {
namespace anchor {

// Sums of products of four unsigned and four signed bytes, added to int32.
#if defined(__AVX512F__)
struct Products {
    static constexpr int WIDTH = 16;  // tokens
    __m512i v = _mm512_setzero_si512();

    static __m512i load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static __m512i low(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static __m512i high(__m512i x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
    static __m512i all(int32_t four) { return _mm512_set1_epi32(four); }
    void add(__m512i u, __m512i q) {
#if defined(__AVX512VNNI__)
        v = _mm512_dpbusd_epi32(v, u, q);
#else
        v = _mm512_add_epi32(v, _mm512_madd_epi16(_mm512_maddubs_epi16(u, q), _mm512_set1_epi16(1)));
#endif
    }
    Vector floats() const { return {_mm512_cvtepi32_ps(v)}; }
};
#elif defined(__AVX2__)
struct Products {
    static constexpr int WIDTH = 8;
    __m256i v = _mm256_setzero_si256();

    static __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static __m256i low(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static __m256i high(__m256i x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
    static __m256i all(int32_t four) { return _mm256_set1_epi32(four); }
    void add(__m256i u, __m256i q) {
        v = _mm256_add_epi32(v, _mm256_madd_epi16(_mm256_maddubs_epi16(u, q), _mm256_set1_epi16(1)));
    }
    Vector floats() const { return {_mm256_cvtepi32_ps(v)}; }
};
#else
struct Products {
    static constexpr int WIDTH = 8;
    struct Bytes {
        uint8_t u[32];
    };
    int32_t v[8] = {};

    static Bytes load(const uint8_t* p) {
        Bytes made;
        std::memcpy(made.u, p, 32);
        return made;
    }
    static Bytes low(Bytes x) {
        for (uint8_t& u : x.u) u &= 15;
        return x;
    }
    static Bytes high(Bytes x) {
        for (uint8_t& u : x.u) u >>= 4;
        return x;
    }
    static int32_t all(int32_t four) { return four; }
    void add(const Bytes& u, int32_t four) {
        int8_t q[4];
        std::memcpy(q, &four, 4);
        for (int i = 0; i < 32; i++) v[i / 4] += int32_t(u.u[i]) * q[i % 4];
    }
    Vector floats() const {
        float x[8];
        for (int i = 0; i < 8; i++) x[i] = float(v[i]);
        return Vector::load(x);
    }
};
#endif

inline CodeScale query_codes(const float* q, int64_t dim, int8_t* out) {
    float most = 0, sum = 0;
    for (int64_t d = 0; d < dim; d++) {
        const float magnitude = std::fabs(q[d]);
        most = magnitude > most ? magnitude : most;
        sum += q[d];
    }
    const bool usable = most > 1e-30f && most < 1e30f && std::fabs(sum) < 1e30f;  // the last not so where one is NaN
    const float inverse = usable ? 127 / most : 0.0f;
    for (int64_t d = 0; d < dim; d++) out[d] = usable ? int8_t(std::lrintf(q[d] * inverse)) : int8_t(0);
    return {usable ? most / 127 : 0.0f, sum};
}

// The scores of 32 tokens from `t` on, into b.room.
template <int heads>
inline void score_tokens(const CodeBlock& b, int64_t t) {
    constexpr int PARTS = TOKEN_GROUP / Products::WIDTH, AT_ONCE = PARTS < 2 ? PARTS : 2, BYTES = 4 * Products::WIDTH;
    const int64_t steps = b.dim / 8, padded = b.groups * TOKEN_GROUP;
    for (int part = 0; part < PARTS; part += AT_ONCE) {
        const uint8_t* codes[AT_ONCE];
        for (int p = 0; p < AT_ONCE; p++) {
            const int64_t token = t + (part + p) * Products::WIDTH;
            codes[p] = b.codes + token / 16 * steps * 64 + token % 16 * 4;
        }
        static_assert(BYTES <= 64);
        Products sums[AT_ONCE][heads];
        for (int64_t i = 0; i < steps; i++) {
            int32_t four[heads][2];
            for (int h = 0; h < heads; h++) std::memcpy(four[h], b.q + h * b.dim + 8 * i, 8);
#pragma GCC unroll 2
            for (int p = 0; p < AT_ONCE; p++) {
                const auto x = Products::load(codes[p] + 64 * i);
                const auto low = Products::low(x), high = Products::high(x);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) {
                    sums[p][h].add(low, Products::all(four[h][0]));
                    sums[p][h].add(high, Products::all(four[h][1]));
                }
            }
        }
        for (int p = 0; p < AT_ONCE; p++) {
            const int64_t token = t + (part + p) * Products::WIDTH;
            const Vector step = Vector::load_float16(b.steps + token), low = Vector::load_float16(b.steps + padded + token);
            for (int h = 0; h < heads; h++) {
                const Vector offset = low.times_plus(Vector::all(b.scales[h].sum), Vector::all(b.base[h]));
                const Vector number = sums[p][h].floats() * Vector::all(b.scales[h].step);
                number.times_plus(step, offset).store(b.room + h * padded + token);
            }
        }
    }
}

// Waits for a block: reads a byte of each line of the cache, many at once. The products would wait for one line after the other.
inline void touch(const void* from, int64_t bytes) {
    const auto* p = static_cast<const volatile uint8_t*>(from);
    for (int64_t line = 0; line < bytes; line += 64) (void)p[line];
}

// Asks for what the next block has in place of tokens `t` to t + 32.
inline void ask_ahead(const CodeBlock& b, int64_t t) {
    if (b.next_codes == nullptr) return;
    const int64_t bytes = b.dim / 2 * TOKEN_GROUP;
    const uint8_t* from = b.next_codes + t / TOKEN_GROUP * bytes;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line);
    __builtin_prefetch(b.next_steps + t);
    __builtin_prefetch(b.next_steps + b.groups * TOKEN_GROUP + t);
}

template <int heads>
inline void codes_of(const CodeBlock& b) {
    static_assert(Vector::WIDTH == Products::WIDTH);
    const int64_t padded = b.groups * TOKEN_GROUP;
    touch(b.codes, padded * b.dim / 2);
    touch(b.steps, padded * 2 * int64_t(sizeof(uint16_t)));
    for (int64_t t = 0; t < padded; t += TOKEN_GROUP) {
        ask_ahead(b, t);
        score_tokens<heads>(b, t);
    }
    for (int h = 0; h < heads; h++) {
        float* scores = b.room + h * padded;
        for (int64_t t = b.tokens; t < padded; t++) scores[t] = -__builtin_inff();
        Vector most = Vector::load(scores), sum = Vector::zero();
        for (int64_t t = Vector::WIDTH; t < padded; t += Vector::WIDTH) most = most.max(Vector::load(scores + t));
        b.largest[h] = most.largest();
        most = Vector::all(b.largest[h]);
        for (int64_t t = 0; t < padded; t += Vector::WIDTH) sum = sum + exponential(Vector::load(scores + t) - most);
        b.sum[h] = sum.sum();
    }
}

inline void codes(const CodeBlock& b) {
    switch (b.heads) {
    case 1: return codes_of<1>(b);
    case 2: return codes_of<2>(b);
    case 3: return codes_of<3>(b);
    default: return codes_of<4>(b);
    }
}

}  // namespace anchor
}  // namespace
}  // namespace ktopt
