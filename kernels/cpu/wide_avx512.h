// AVX512's ways to unpack a row's blocks: 64 numbers at a time in one register, and 256 numbers' scales in another.
#pragma once

#include <immintrin.h>

#include <utility>

#include "generic.h"

namespace ktopt {
namespace {

#if defined(__AVX512VNNI__)
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif

inline __m512i load64(const void* p) { return _mm512_loadu_si512(p); }
inline __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m512i twice(const void* p) { return _mm512_broadcast_i64x4(load32(p)); }
inline __m512i bytes(int value) { return _mm512_set1_epi8(char(value)); }

// Qwords of the two halves.
inline __m512i halves(long long low, long long high) { return _mm512_set_epi64(high, high, high, high, low, low, low, low); }

// Sums of four products of bytes, as 16 int32. With VNNI u is unsigned, to 255. Without, a SIGNED format's numbers (128 taken off)
// give their sign to the activation, since maddubs saturates.
template <bool SIGNED>
inline __m512i products(__m512i u, __m512i q) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, q);
#else
    if constexpr (SIGNED) {
        q = _mm512_mask_sub_epi8(q, _mm512_movepi8_mask(u), _mm512_setzero_si512(), q);
        u = _mm512_abs_epi8(u);
    }
    return _mm512_madd_epi16(_mm512_maddubs_epi16(u, q), _mm512_set1_epi16(1));
#endif
}

// A format's scales and offsets: for groups of 16 in all lanes, for groups of 32 in the low eight.
struct Groups {
    __m512 scale, offset;
};

inline __m512 low8(__m256 x) { return _mm512_zextps256_ps512(x); }
inline __m512 high8(__m512 x) { return low8(_mm512_extractf32x8_ps(x, 1)); }

// Wide<kind>: groups(p, blocks) and chunk(p, c, second), the 64 numbers from 64 * c on. In blocks of 32, `second` says whether the
// chunk's second block is there; where not, the first stands in, and meets activations that are zero.
template <int kind>
struct Wide;

template <int kind>
struct Wide32 {
    static constexpr int BYTES = layout_of(kind).bytes;

    static inline const uint8_t* first(const uint8_t* p, int c) { return p + 2 * c * BYTES; }
    static inline const uint8_t* last(const uint8_t* p, int c, bool second) { return p + (2 * c + second) * BYTES; }

    // The 16 bytes at `at` of two blocks: low halves of the first, high halves, low halves of the second, high halves.
    static inline __m512i nibbles(const uint8_t* p, int c, bool second, int at) {
        const __m512i both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load16(first(p, c) + at)), 0xff00,
                                                         load16(last(p, c, second) + at));
        return _mm512_and_si512(_mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0)), bytes(15));
    }

    // The float16 at `at` of each block, as eight float32. `blocks` is a constant where this is inlined. They are put together in
    // a register: written to memory one by one, reading them all would wait for the writes.
    template <int... b>
    static inline __m512 halves_at(const uint8_t* p, int blocks, int at, std::integer_sequence<int, b...>) {
        __m128i found = _mm_setzero_si128();
        const auto half = [&](int block) {
            uint16_t h;
            std::memcpy(&h, p + block * BYTES + at, 2);
            return h;
        };
        ((found = b < blocks ? _mm_insert_epi16(found, half(b), b) : found), ...);
        return low8(_mm256_cvtph_ps(found));
    }
    static inline __m512 eight(const uint8_t* p, int blocks, int at) {
        return halves_at(p, blocks, at, std::make_integer_sequence<int, 8>());
    }

    static inline Groups one_half(const uint8_t* p, int blocks) { return {eight(p, blocks, 0), _mm512_setzero_ps()}; }

    static inline Groups two_halves(const uint8_t* p, int blocks) {
        return {eight(p, blocks, 0), _mm512_sub_ps(_mm512_setzero_ps(), eight(p, blocks, 2))};
    }

    // Two blocks' masks of fifth bits at `at`, set in u.
    static inline __m512i fifth_bits(__m512i u, const uint8_t* p, int c, bool second, int at) {
        uint32_t low, high;
        std::memcpy(&low, first(p, c) + at, 4);
        std::memcpy(&high, last(p, c, second) + at, 4);
        return _mm512_mask_add_epi8(u, _cvtu64_mask64(uint64_t(high) << 32 | low), u, bytes(16));
    }
};

// Scales of 8 blocks of 18 bytes: halfwords 0, 9, 18, ...
inline Groups scales18(const uint8_t* p) {
    alignas(64) static const int16_t at[32] = {0, 9, 18, 27, 36, 45, 54, 63};
    const __m512i found = _mm512_permutex2var_epi16(load64(p), _mm512_load_si512(at), load64(p + 64));
    return {low8(_mm256_cvtph_ps(_mm512_castsi512_si128(found))), _mm512_setzero_ps()};
}

template <> struct Wide<Q4_0> : Wide32<Q4_0> {
    static inline Groups groups(const uint8_t* p, int blocks) { return blocks == 8 ? scales18(p) : one_half(p, blocks); }
    static inline __m512i chunk(const uint8_t* p, int c, bool second) { return nibbles(p, c, second, 2); }
};

template <> struct Wide<Q4_1> : Wide32<Q4_1> {
    static inline Groups groups(const uint8_t* p, int blocks) {
        if (blocks != 8) return two_halves(p, blocks);
        // scales lie in halfwords 0, 10, 20, 30 from the start and from byte 80, offsets after them
        alignas(64) static const int16_t at[32] = {0, 10, 20, 30, 32, 42, 52, 62, 1, 11, 21, 31, 33, 43, 53, 63};
        const __m512i found = _mm512_permutex2var_epi16(load64(p), _mm512_load_si512(at), load64(p + 80));
        const __m512 both = _mm512_cvtph_ps(_mm512_castsi512_si256(found));
        return {both, high8(_mm512_sub_ps(_mm512_setzero_ps(), both))};
    }
    static inline __m512i chunk(const uint8_t* p, int c, bool second) { return nibbles(p, c, second, 4); }
};

template <> struct Wide<Q5_0> : Wide32<Q5_0> {
    static inline Groups groups(const uint8_t* p, int blocks) { return one_half(p, blocks); }
    static inline __m512i chunk(const uint8_t* p, int c, bool second) {
        return fifth_bits(nibbles(p, c, second, 6), p, c, second, 2);
    }
};

template <> struct Wide<Q5_1> : Wide32<Q5_1> {
    static inline Groups groups(const uint8_t* p, int blocks) { return two_halves(p, blocks); }
    static inline __m512i chunk(const uint8_t* p, int c, bool second) {
        return fifth_bits(nibbles(p, c, second, 8), p, c, second, 4);
    }
};

template <> struct Wide<Q8_0> : Wide32<Q8_0> {
    static inline Groups groups(const uint8_t* p, int blocks) { return one_half(p, blocks); }
    static inline __m512i chunk(const uint8_t* p, int c, bool second) {
        const __m512i low = _mm512_castsi256_si512(load32(first(p, c) + 2));
        const __m512i both = _mm512_inserti64x4(low, load32(last(p, c, second) + 2), 1);
        return VNNI ? _mm512_xor_si512(both, bytes(0x80)) : both;
    }
};

inline __m512i iq4_levels(__m512i u) {
    const __m128i levels = load16(IQ4_LEVELS);
    const __m128i table = VNNI ? _mm_xor_si128(levels, _mm_set1_epi8(char(0x80))) : levels;
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), u);
}

template <> struct Wide<IQ4_NL> : Wide32<IQ4_NL> {
    static inline Groups groups(const uint8_t* p, int blocks) { return blocks == 8 ? scales18(p) : one_half(p, blocks); }
    static inline __m512i chunk(const uint8_t* p, int c, bool second) { return iq4_levels(nibbles(p, c, second, 2)); }
};

// The six-bit scales and offsets of Q4_K and Q5_K: eight of each.
inline Groups groups_k4(const uint8_t* p) {
    uint32_t s[3];
    std::memcpy(s, p + 4, 12);
    const __m128i six = _mm_set_epi32(int((s[2] >> 4 & 0x0f0f0f0f) | (s[1] >> 6 & 0x03030303) << 4), int(s[1] & 0x3f3f3f3f),
                                      int((s[2] & 0x0f0f0f0f) | (s[0] >> 6 & 0x03030303) << 4), int(s[0] & 0x3f3f3f3f));
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six));
    const __m512 scale = _mm512_mul_ps(numbers, _mm512_set1_ps(half_at(p)));
    return {scale, high8(_mm512_mul_ps(numbers, _mm512_set1_ps(half_at(p + 2))))};
}

inline __m512i nibbles_k(const uint8_t* p) {
    return _mm512_and_si512(_mm512_srlv_epi64(twice(p), halves(0, 4)), bytes(15));
}

// Bit `low` of the 32 bytes at p for the first half, bit `low` + 1 for the second.
inline __mmask64 bits_k(const uint8_t* p, int low) {
    const long long ones = 0x0101010101010101;
    return _mm512_test_epi8_mask(twice(p), halves(ones << low, ones << (low + 1)));
}

template <> struct Wide<Q4_K> {
    static inline Groups groups(const uint8_t* p, int) { return groups_k4(p); }
    static inline __m512i chunk(const uint8_t* p, int c, bool) { return nibbles_k(p + 16 + 32 * c); }
};

template <> struct Wide<Q5_K> {
    static inline Groups groups(const uint8_t* p, int) { return groups_k4(p); }
    static inline __m512i chunk(const uint8_t* p, int c, bool) {
        const __m512i low = nibbles_k(p + 48 + 32 * c);
        return _mm512_mask_add_epi8(low, bits_k(p + 16, 2 * c), low, bytes(16));
    }
};

template <> struct Wide<Q6_K> {
    static inline Groups groups(const uint8_t* p, int) {
        const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p + 192)));
        return {_mm512_mul_ps(numbers, _mm512_set1_ps(half_at(p + 208))), _mm512_setzero_ps()};
    }
    static inline __m512i chunk(const uint8_t* p, int c, bool) {
        const __m512i packed = load64(p + 64 * (c / 2)), top = twice(p + 128 + 32 * (c / 2));
        const __m512i low = _mm512_and_si512(c % 2 ? _mm512_srli_epi16(packed, 4) : packed, bytes(15));
        const __m512i high = c % 2 ? _mm512_srlv_epi64(top, halves(0, 2)) : _mm512_sllv_epi64(top, halves(4, 2));
        return _mm512_or_si512(low, _mm512_and_si512(high, bytes(0x30)));
    }
};

inline __m512i two_bits_k(const uint8_t* p, int c) {
    const __m512i shifts = c % 2 ? halves(4, 6) : halves(0, 2);
    return _mm512_and_si512(_mm512_srlv_epi64(twice(p + 32 * (c / 2)), shifts), bytes(3));
}

template <> struct Wide<Q2_K> {
    static inline Groups groups(const uint8_t* p, int) {
        const __m128i both = load16(p);
        const __m512i low = _mm512_cvtepu8_epi32(_mm_and_si128(both, _mm_set1_epi8(15)));
        const __m512i high = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(15)));
        return {_mm512_mul_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(half_at(p + 80))),
                _mm512_mul_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(half_at(p + 82)))};
    }
    static inline __m512i chunk(const uint8_t* p, int c, bool) { return two_bits_k(p + 16, c); }
};

template <> struct Wide<Q3_K> {
    static inline Groups groups(const uint8_t* p, int) {
        uint32_t s[3];
        std::memcpy(s, p + 96, 12);
        const uint32_t low = 0x0f0f0f0f, high = 0x30303030;
        const __m128i six = _mm_set_epi32(
            int((s[1] >> 4 & low) | (s[2] >> 2 & high)), int((s[0] >> 4 & low) | (s[2] & high)),
            int((s[1] & low) | (s[2] << 2 & high)), int((s[0] & low) | (s[2] << 4 & high)));
        const __m512i numbers = _mm512_sub_epi32(_mm512_cvtepu8_epi32(six), _mm512_set1_epi32(32));
        return {_mm512_mul_ps(_mm512_cvtepi32_ps(numbers), _mm512_set1_ps(half_at(p + 108))), _mm512_setzero_ps()};
    }
    static inline __m512i chunk(const uint8_t* p, int c, bool) {
        const __m512i low = two_bits_k(p + 32, c);
        return _mm512_mask_add_epi8(low, bits_k(p, 2 * c), low, bytes(4));
    }
};

template <> struct Wide<IQ4_XS> {
    static inline Groups groups(const uint8_t* p, int) {
        uint32_t low;
        uint16_t high;
        std::memcpy(&high, p + 2, 2);
        std::memcpy(&low, p + 4, 4);
        const __m256i eight = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
        const __m256i l = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(int(low)), _mm256_slli_epi32(eight, 2)),
                                           _mm256_set1_epi32(15));
        const __m256i h = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(high), _mm256_slli_epi32(eight, 1)),
                                           _mm256_set1_epi32(3));
        const __m256i number = _mm256_sub_epi32(_mm256_or_si256(l, _mm256_slli_epi32(h, 4)), _mm256_set1_epi32(32));
        return {low8(_mm256_mul_ps(_mm256_cvtepi32_ps(number), _mm256_set1_ps(half_at(p)))), _mm512_setzero_ps()};
    }
    static inline __m512i chunk(const uint8_t* p, int c, bool) {
        const __m512i both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load16(p + 8 + 32 * c)), 0xff00,
                                                         load16(p + 24 + 32 * c));
        return iq4_levels(_mm512_and_si512(_mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0)), bytes(15)));
    }
};

}  // namespace
}  // namespace ktopt
