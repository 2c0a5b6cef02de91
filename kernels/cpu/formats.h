// Every block format, unpacked by plain C++: the one description of the layouts, which each instruction set compiles for itself and
// vectorises or replaces. A format gives unsigned numbers u, and scales and offsets for groups of 16 or 32 of them:
//     weight = scale * (u - ZERO) - offset
#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "types.h"

namespace ktopt {
namespace {

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    __fp16 value;
    std::memcpy(&value, &h, 2);
    return value;
#else
    const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
    uint32_t bits;
    if (magnitude >= 0x7c00) {
        bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + (112u << 23);
    } else {  // subnormal: magnitude * 2^-24
        const float small = float(magnitude) * 0x1p-24f;
        std::memcpy(&bits, &small, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
#endif
}

// To nearest, ties to even; too large is infinite.
inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(x, 0));
#elif defined(__aarch64__)
    const __fp16 value = __fp16(x);
    uint16_t h;
    std::memcpy(&h, &value, 2);
    return h;
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: in steps of 2^-24, which adding 0.5 rounds to
        float small;
        std::memcpy(&small, &magnitude, 4);
        small += 0.5f;
        std::memcpy(&bits, &small, 4);
        return uint16_t(sign | (bits - 0x3f000000));
    }
    return uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1)) - 0x38000000) >> 13);
#endif
}

inline float half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

// 32 bytes at once, in whatever registers the compiler has for them.
using Bytes32 = uint8_t __attribute__((vector_size(32)));

inline void load(const uint8_t* p, Bytes32& out) { std::memcpy(&out, p, 32); }
inline void store(const Bytes32& bytes, uint8_t* p) { std::memcpy(p, &bytes, 32); }

constexpr int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Up to 256 numbers of a row in a common form. Groups and numbers past `count` are zero.
struct Unpacked {
    alignas(64) uint8_t u[256];
    alignas(64) float scale[16];
    alignas(64) float offset[16];
};

template <int kind>
struct Format;

// Formats in blocks of 32: eight blocks make what a block of the others is. One(block, u, scale, offset) unpacks one.
template <int kind_, int zero, bool offsets, class One>
struct Format32 {
    static constexpr int KIND = kind_, GROUP = 32, ZERO = zero, SPAN = 8 * layout_of(kind_).bytes;
    static constexpr bool OFFSETS = offsets;

    static inline void unpack(const uint8_t* p, int64_t count, Unpacked& out) {
        const int blocks = int(count / 32);
        if (blocks < 8) std::memset(&out, 0, sizeof out);
        for (int b = 0; b < blocks; b++, p += layout_of(kind_).bytes) One::unpack(p, out.u + 32 * b, out.scale[b], out.offset[b]);
    }
};

#if defined(__AVX2__)
inline __m256i nibbles32(const uint8_t* p) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

inline void store32(__m256i bytes, uint8_t* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes); }

inline void nibbles(const uint8_t* p, uint8_t* u) { store32(nibbles32(p), u); }

inline void five_bits(const uint8_t* low, const uint8_t* high, uint8_t* u) {
    int bits;
    std::memcpy(&bits, high, 4);
    // each byte of the mask eight times, then one bit of each
    const __m256i spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32(bits), _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0));
    const __m256i one = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, one), one);
    store32(_mm256_or_si256(nibbles32(low), _mm256_and_si256(set, _mm256_set1_epi8(16))), u);
}

inline void iq4_numbers(const uint8_t* p, uint8_t* u) {
    const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(IQ4_LEVELS));
    const __m256i table = _mm256_broadcastsi128_si256(_mm_xor_si128(levels, _mm_set1_epi8(char(0x80))));
    store32(_mm256_shuffle_epi8(table, nibbles32(p)), u);
}
#else
inline void nibbles(const uint8_t* p, uint8_t* u) {
    for (int i = 0; i < 16; i++) {
        u[i] = p[i] & 15;
        u[i + 16] = p[i] >> 4;
    }
}

inline void five_bits(const uint8_t* low, const uint8_t* high, uint8_t* u) {
    uint32_t bits;
    std::memcpy(&bits, high, 4);
    for (int i = 0; i < 16; i++) {
        u[i] = uint8_t((low[i] & 15) | ((bits >> i & 1) << 4));
        u[i + 16] = uint8_t((low[i] >> 4) | ((bits >> (i + 16) & 1) << 4));
    }
}

inline void iq4_numbers(const uint8_t* p, uint8_t* u) {
    for (int i = 0; i < 16; i++) {
        u[i] = uint8_t(IQ4_LEVELS[p[i] & 15] + 128);
        u[i + 16] = uint8_t(IQ4_LEVELS[p[i] >> 4] + 128);
    }
}
#endif

struct OneQ4_0 {
    static inline void unpack(const uint8_t* p, uint8_t* u, float& scale, float&) {
        scale = half_at(p);
        nibbles(p + 2, u);
    }
};
struct OneQ4_1 {
    static inline void unpack(const uint8_t* p, uint8_t* u, float& scale, float& offset) {
        scale = half_at(p);
        offset = -half_at(p + 2);
        nibbles(p + 4, u);
    }
};
struct OneQ5_0 {
    static inline void unpack(const uint8_t* p, uint8_t* u, float& scale, float&) {
        scale = half_at(p);
        five_bits(p + 6, p + 2, u);
    }
};
struct OneQ5_1 {
    static inline void unpack(const uint8_t* p, uint8_t* u, float& scale, float& offset) {
        scale = half_at(p);
        offset = -half_at(p + 2);
        five_bits(p + 8, p + 4, u);
    }
};
struct OneQ8_0 {
    static inline void unpack(const uint8_t* p, uint8_t* u, float& scale, float&) {
        scale = half_at(p);
        Bytes32 numbers;
        load(p + 2, numbers);
        store(numbers ^ 0x80, u);
    }
};
struct OneIQ4_NL {
    static inline void unpack(const uint8_t* p, uint8_t* u, float& scale, float&) {
        scale = half_at(p);
        iq4_numbers(p + 2, u);
    }
};

template <> struct Format<Q4_0> : Format32<Q4_0, 8, false, OneQ4_0> {};
template <> struct Format<Q4_1> : Format32<Q4_1, 0, true, OneQ4_1> {};
template <> struct Format<Q5_0> : Format32<Q5_0, 16, false, OneQ5_0> {};
template <> struct Format<Q5_1> : Format32<Q5_1, 0, true, OneQ5_1> {};
template <> struct Format<Q8_0> : Format32<Q8_0, 128, false, OneQ8_0> {};
template <> struct Format<IQ4_NL> : Format32<IQ4_NL, 128, false, OneIQ4_NL> {};

template <int kind_, int group, int zero, bool offsets>
struct Format256 {
    static constexpr int KIND = kind_, GROUP = group, ZERO = zero, SPAN = layout_of(kind_).bytes;
    static constexpr bool OFFSETS = offsets;
};

template <> struct Format<Q2_K> : Format256<Q2_K, 16, 0, true> {
    static inline void unpack(const uint8_t* p, int64_t, Unpacked& out) {
        const float d = half_at(p + 80), dmin = half_at(p + 82);
        for (int g = 0; g < 16; g++) {
            out.scale[g] = d * float(p[g] & 15);
            out.offset[g] = dmin * float(p[g] >> 4);
        }
        for (int part = 0; part < 2; part++) {
            Bytes32 packed;
            load(p + 16 + 32 * part, packed);
            for (int s = 0; s < 4; s++) store(packed >> (2 * s) & 3, out.u + 128 * part + 32 * s);
        }
    }
};

template <> struct Format<Q3_K> : Format256<Q3_K, 16, 4, false> {
    static inline void unpack(const uint8_t* p, int64_t, Unpacked& out) {
        const float d = half_at(p + 108);
        const uint8_t* s = p + 96;
        for (int g = 0; g < 16; g++) {
            const int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> (2 * (g / 4)) & 3;
            out.scale[g] = d * float((low | high << 4) - 32);
        }
        Bytes32 low, high;
        load(p, high);
        for (int j = 0; j < 8; j++) {
            load(p + 32 + 32 * (j / 4), low);
            store((low >> (2 * (j % 4)) & 3) | (high >> j & 1) << 2, out.u + 32 * j);
        }
    }
};

// The six-bit scales and offsets of Q4_K and Q5_K, packed in 12 bytes.
inline void scales_k4(const uint8_t* p, Unpacked& out) {
    const float d = half_at(p), dmin = half_at(p + 2);
    const uint8_t* s = p + 4;
    for (int g = 0; g < 4; g++) {
        out.scale[g] = d * float(s[g] & 63);
        out.offset[g] = dmin * float(s[g + 4] & 63);
        out.scale[g + 4] = d * float((s[g + 8] & 15) | (s[g] >> 6) << 4);
        out.offset[g + 4] = dmin * float((s[g + 8] >> 4) | (s[g + 4] >> 6) << 4);
    }
}

template <> struct Format<Q4_K> : Format256<Q4_K, 32, 0, true> {
    static inline void unpack(const uint8_t* p, int64_t, Unpacked& out) {
        scales_k4(p, out);
        for (int j = 0; j < 4; j++) {
            Bytes32 packed;
            load(p + 16 + 32 * j, packed);
            store(packed & 15, out.u + 64 * j);
            store(packed >> 4, out.u + 64 * j + 32);
        }
    }
};

template <> struct Format<Q5_K> : Format256<Q5_K, 32, 0, true> {
    static inline void unpack(const uint8_t* p, int64_t, Unpacked& out) {
        scales_k4(p, out);
        Bytes32 packed, high;
        load(p + 16, high);
        for (int j = 0; j < 4; j++) {
            load(p + 48 + 32 * j, packed);
            store((packed & 15) | (high >> (2 * j) & 1) << 4, out.u + 64 * j);
            store(packed >> 4 | (high >> (2 * j + 1) & 1) << 4, out.u + 64 * j + 32);
        }
    }
};

template <> struct Format<Q6_K> : Format256<Q6_K, 16, 32, false> {
    static inline void unpack(const uint8_t* p, int64_t, Unpacked& out) {
        const float d = half_at(p + 208);
        for (int g = 0; g < 16; g++) out.scale[g] = d * float(int8_t(p[192 + g]));
        for (int part = 0; part < 2; part++) {
            Bytes32 first, second, high;
            load(p + 64 * part, first);
            load(p + 64 * part + 32, second);
            load(p + 128 + 32 * part, high);
            uint8_t* u = out.u + 128 * part;
            store((first & 15) | (high & 3) << 4, u);
            store((second & 15) | (high >> 2 & 3) << 4, u + 32);
            store(first >> 4 | (high >> 4 & 3) << 4, u + 64);
            store(second >> 4 | high >> 6 << 4, u + 96);
        }
    }
};

template <> struct Format<IQ4_XS> : Format256<IQ4_XS, 32, 128, false> {
    static inline void unpack(const uint8_t* p, int64_t, Unpacked& out) {
        const float d = half_at(p);
        uint16_t high;
        std::memcpy(&high, p + 2, 2);
        for (int g = 0; g < 8; g++) {
            const int low = p[4 + g / 2] >> (4 * (g % 2)) & 15;
            out.scale[g] = d * float((low | (high >> (2 * g) & 3) << 4) - 32);
            iq4_numbers(p + 8 + 16 * g, out.u + 32 * g);
        }
    }
};

}  // namespace
}  // namespace ktopt
