// Every block format, unpacked by plain C++: the one description of the layouts, which each instruction set compiles for itself and
// vectorises or replaces. A format gives unsigned numbers u, and scales and offsets for groups of 16 or 32 of them:
//     weight = scale * (u - ZERO) - offset
#pragma once

#include <cstring>

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

inline float half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

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
        for (int i = 0; i < 32; i++) u[i] = p[2 + i] ^ 0x80;
    }
};
struct OneIQ4_NL {
    static inline void unpack(const uint8_t* p, uint8_t* u, float& scale, float&) {
        scale = half_at(p);
        for (int i = 0; i < 16; i++) {
            u[i] = uint8_t(IQ4_LEVELS[p[2 + i] & 15] + 128);
            u[i + 16] = uint8_t(IQ4_LEVELS[p[2 + i] >> 4] + 128);
        }
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
        for (int part = 0; part < 2; part++)
            for (int s = 0; s < 4; s++)
                for (int i = 0; i < 32; i++) out.u[128 * part + 32 * s + i] = p[16 + 32 * part + i] >> (2 * s) & 3;
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
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < 32; i++)
                out.u[32 * j + i] = uint8_t((p[32 + 32 * (j / 4) + i] >> (2 * (j % 4)) & 3) | (p[i] >> j & 1) << 2);
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
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 32; i++) {
                out.u[64 * j + i] = p[16 + 32 * j + i] & 15;
                out.u[64 * j + 32 + i] = p[16 + 32 * j + i] >> 4;
            }
    }
};

template <> struct Format<Q5_K> : Format256<Q5_K, 32, 0, true> {
    static inline void unpack(const uint8_t* p, int64_t, Unpacked& out) {
        scales_k4(p, out);
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 32; i++) {
                out.u[64 * j + i] = uint8_t((p[48 + 32 * j + i] & 15) | (p[16 + i] >> (2 * j) & 1) << 4);
                out.u[64 * j + 32 + i] = uint8_t((p[48 + 32 * j + i] >> 4) | (p[16 + i] >> (2 * j + 1) & 1) << 4);
            }
    }
};

template <> struct Format<Q6_K> : Format256<Q6_K, 16, 32, false> {
    static inline void unpack(const uint8_t* p, int64_t, Unpacked& out) {
        const float d = half_at(p + 208);
        for (int g = 0; g < 16; g++) out.scale[g] = d * float(int8_t(p[192 + g]));
        for (int part = 0; part < 2; part++) {
            const uint8_t *low = p + 64 * part, *high = p + 128 + 32 * part;
            uint8_t* u = out.u + 128 * part;
            for (int i = 0; i < 32; i++) {
                u[i] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
                u[i + 32] = uint8_t((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
                u[i + 64] = uint8_t((low[i] >> 4) | (high[i] >> 4 & 3) << 4);
                u[i + 96] = uint8_t((low[i + 32] >> 4) | (high[i] >> 6) << 4);
            }
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
            for (int i = 0; i < 16; i++) {
                const uint8_t packed = p[8 + 16 * g + i];
                out.u[32 * g + i] = uint8_t(IQ4_LEVELS[packed & 15] + 128);
                out.u[32 * g + 16 + i] = uint8_t(IQ4_LEVELS[packed >> 4] + 128);
            }
        }
    }
};

}  // namespace
}  // namespace ktopt
