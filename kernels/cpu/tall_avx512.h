// Weights of 16 rows unpacked side by side for products of many tokens: a register holds four consecutive numbers of each row, as
// vpdpbusd takes them, and another the scale of each row's group. Blocks are turned before they are unpacked, so that the work is
// done on packed bytes, 16 rows at once.
#pragma once

#include "wide_avx512.h"

namespace ktopt {
namespace {

// 256 numbers of 32 rows, in two halves of 16: u[k][half] is numbers 4 k to 4 k + 3 of each row.
template <int GROUP>
struct alignas(64) Tall {
    uint8_t u[64][2][64];
    float scale[256 / GROUP][2][16];
    float offset[256 / GROUP][2][16];
};

// Rows that lie `row_bytes` apart. What is read next is asked for in good time: reading in 16 places at once is more than the
// hardware foresees, and waits for memory at every line.
struct Rows {
    size_t row_bytes;
    const uint8_t *ahead, *end;

    inline void look_ahead() {
        if (ahead >= end) return;
        for (int line = 0; line < 5; line++) _mm_prefetch(ahead + 64 * line, _MM_HINT_T1);
        ahead += 5 * 64;  // 256 bytes are read meanwhile, and scales
    }
};

struct Four {
    __m512i at[4];
};

// 16 bytes at p of each of 16 rows: register j has bytes 4 j to 4 j + 3, a row a lane.
inline Four turned(const uint8_t* p, Rows& from) {
    const size_t row_bytes = from.row_bytes;
    from.look_ahead();
    __m512i lines[4];  // row r is lane r / 4 of lines[r % 4]
    for (int i = 0; i < 4; i++) {
        const uint8_t* row = p + i * row_bytes;
        lines[i] = _mm512_castsi128_si512(load16(row));
        lines[i] = _mm512_mask_broadcast_i32x4(lines[i], 0x00f0, load16(row + 4 * row_bytes));
        lines[i] = _mm512_mask_broadcast_i32x4(lines[i], 0x0f00, load16(row + 8 * row_bytes));
        lines[i] = _mm512_mask_broadcast_i32x4(lines[i], 0xf000, load16(row + 12 * row_bytes));
    }
    const __m512i low01 = _mm512_unpacklo_epi32(lines[0], lines[1]), high01 = _mm512_unpackhi_epi32(lines[0], lines[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(lines[2], lines[3]), high23 = _mm512_unpackhi_epi32(lines[2], lines[3]);
    return {{_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23), _mm512_unpacklo_epi64(high01, high23),
             _mm512_unpackhi_epi64(high01, high23)}};
}

// Sixteen registers of sixteen floats, turned.
inline void turn(__m512* rows) {
    __m512 pairs[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
        const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
        const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i + 2], rows[i + 3]));
        const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i + 2], rows[i + 3]));
        pairs[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
        pairs[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
        pairs[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
        pairs[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
    }
    for (int i = 0; i < 4; i++) {  // a lane of pairs[4 n + i] is number 4 lane + i of rows 4 n to 4 n + 3
        const __m512 low01 = _mm512_shuffle_f32x4(pairs[i], pairs[4 + i], 0x44);
        const __m512 high01 = _mm512_shuffle_f32x4(pairs[i], pairs[4 + i], 0xee);
        const __m512 low23 = _mm512_shuffle_f32x4(pairs[8 + i], pairs[12 + i], 0x44);
        const __m512 high23 = _mm512_shuffle_f32x4(pairs[8 + i], pairs[12 + i], 0xee);
        rows[i] = _mm512_shuffle_f32x4(low01, low23, 0x88);
        rows[4 + i] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
        rows[8 + i] = _mm512_shuffle_f32x4(high01, high23, 0x88);
        rows[12 + i] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
}

inline __m512i masked(__m512i x, int mask) { return _mm512_and_si512(x, bytes(mask)); }

// Bits moved up by `by`, or down where it is negative, and masked.
template <int by>
inline __m512i moved(__m512i x, int mask) {
    return masked(by >= 0 ? _mm512_slli_epi16(x, by >= 0 ? by : 0) : _mm512_srli_epi16(x, by < 0 ? -by : 0), mask);
}

// Numbers<kind>::unpack(p, from, blocks, put): put(k, x) for each k, from 256 numbers of 16 rows, or `blocks` blocks of 32.
template <int kind>
struct Numbers;

// A format in blocks of 32: one(p, from, x), where x are the eight registers of a block.
template <int kind, class One>
struct Numbers32 {
    template <class Put>
    static inline void unpack(const uint8_t* p, Rows& from, int blocks, Put put) {
        for (int b = 0; b < blocks; b++, p += layout_of(kind).bytes) {
            __m512i x[8];
            One::one(p, from, x);
            for (int j = 0; j < 8; j++) put(8 * b + j, x[j]);
        }
    }
};

inline void tall_nibbles(const uint8_t* p, Rows& from, __m512i* x) {
    const Four packed = turned(p, from);
    for (int j = 0; j < 4; j++) {
        x[j] = masked(packed.at[j], 15);
        x[4 + j] = moved<-4>(packed.at[j], 15);
    }
}

// Each row's 32 fifth bits, set in the numbers: four bits choose four bytes.
inline void tall_fifth_bits(__m512i bits, __m512i* x) {
    alignas(64) static const uint32_t spread[16] = {
        0x00000000, 0x00000010, 0x00001000, 0x00001010, 0x00100000, 0x00100010, 0x00101000, 0x00101010,
        0x10000000, 0x10000010, 0x10001000, 0x10001010, 0x10100000, 0x10100010, 0x10101000, 0x10101010,
    };
    const __m512i table = _mm512_load_si512(spread);
    for (int j = 0; j < 8; j++)
        x[j] = _mm512_or_si512(x[j], _mm512_permutexvar_epi32(_mm512_srli_epi32(bits, unsigned(4 * j)), table));
}

struct TallQ4_0 {
    static inline void one(const uint8_t* p, Rows& from, __m512i* x) { tall_nibbles(p + 2, from, x); }
};
struct TallQ4_1 {
    static inline void one(const uint8_t* p, Rows& from, __m512i* x) { tall_nibbles(p + 4, from, x); }
};
struct TallQ5_0 {
    static inline void one(const uint8_t* p, Rows& from, __m512i* x) {
        const Four start = turned(p, from);  // the scale, the fifth bits, and numbers
        tall_nibbles(p + 6, from, x);
        tall_fifth_bits(_mm512_or_si512(_mm512_srli_epi32(start.at[0], 16), _mm512_slli_epi32(start.at[1], 16)), x);
    }
};
struct TallQ5_1 {
    static inline void one(const uint8_t* p, Rows& from, __m512i* x) {
        const Four start = turned(p, from);
        tall_nibbles(p + 8, from, x);
        tall_fifth_bits(start.at[1], x);
    }
};
struct TallQ8_0 {
    static inline void one(const uint8_t* p, Rows& from, __m512i* x) {
        const Four low = turned(p + 2, from), high = turned(p + 18, from);
        for (int j = 0; j < 4; j++) {
            x[j] = _mm512_xor_si512(low.at[j], bytes(0x80));
            x[4 + j] = _mm512_xor_si512(high.at[j], bytes(0x80));
        }
    }
};
struct TallIQ4_NL {
    static inline void one(const uint8_t* p, Rows& from, __m512i* x) {
        tall_nibbles(p + 2, from, x);
        for (int j = 0; j < 8; j++) x[j] = iq4_levels(x[j]);
    }
};

template <> struct Numbers<Q4_0> : Numbers32<Q4_0, TallQ4_0> {};
template <> struct Numbers<Q4_1> : Numbers32<Q4_1, TallQ4_1> {};
template <> struct Numbers<Q5_0> : Numbers32<Q5_0, TallQ5_0> {};
template <> struct Numbers<Q5_1> : Numbers32<Q5_1, TallQ5_1> {};
template <> struct Numbers<Q8_0> : Numbers32<Q8_0, TallQ8_0> {};
template <> struct Numbers<IQ4_NL> : Numbers32<IQ4_NL, TallIQ4_NL> {};

template <> struct Numbers<IQ4_XS> {
    template <class Put>
    static inline void unpack(const uint8_t* p, Rows& from, int, Put put) {
        for (int g = 0; g < 8; g++) {
            __m512i x[8];
            tall_nibbles(p + 8 + 16 * g, from, x);
            for (int j = 0; j < 8; j++) put(8 * g + j, iq4_levels(x[j]));
        }
    }
};

template <> struct Numbers<Q4_K> {
    template <class Put>
    static inline void unpack(const uint8_t* p, Rows& from, int, Put put) {
        for (int piece = 0; piece < 8; piece++) {
            __m512i x[8];
            tall_nibbles(p + 16 + 16 * piece, from, x);
            const int k = 16 * (piece / 2) + 4 * (piece % 2);
            for (int j = 0; j < 4; j++) {
                put(k + j, x[j]);
                put(k + 8 + j, x[4 + j]);
            }
        }
    }
};

template <> struct Numbers<Q5_K> {
    template <int c, class Put>
    static inline void two_groups(const uint8_t* p, Rows& from, const Four& high, int k, Put put) {
        __m512i x[8];
        tall_nibbles(p + 32 * c, from, x);
        for (int j = 0; j < 4; j++) {
            put(16 * c + k + j, _mm512_or_si512(x[j], moved<4 - 2 * c>(high.at[j], 16)));
            put(16 * c + k + 8 + j, _mm512_or_si512(x[4 + j], moved<3 - 2 * c>(high.at[j], 16)));
        }
    }
    template <class Put>
    static inline void unpack(const uint8_t* p, Rows& from, int, Put put) {
        for (int h = 0; h < 2; h++) {
            const Four high = turned(p + 16 + 16 * h, from);
            two_groups<0>(p + 48 + 16 * h, from, high, 4 * h, put);
            two_groups<1>(p + 48 + 16 * h, from, high, 4 * h, put);
            two_groups<2>(p + 48 + 16 * h, from, high, 4 * h, put);
            two_groups<3>(p + 48 + 16 * h, from, high, 4 * h, put);
        }
    }
};

template <> struct Numbers<Q6_K> {
    template <class Put>
    static inline void unpack(const uint8_t* p, Rows& from, int, Put put) {
        for (int piece = 0; piece < 4; piece++) {
            const uint8_t* low = p + 64 * (piece / 2) + 16 * (piece % 2);
            __m512i first[8], second[8];
            tall_nibbles(low, from, first);
            tall_nibbles(low + 32, from, second);
            const Four high = turned(p + 128 + 16 * piece, from);
            const int k = 32 * (piece / 2) + 4 * (piece % 2);
            for (int j = 0; j < 4; j++) {
                put(k + j, _mm512_or_si512(first[j], moved<4>(high.at[j], 0x30)));
                put(k + 8 + j, _mm512_or_si512(second[j], moved<2>(high.at[j], 0x30)));
                put(k + 16 + j, _mm512_or_si512(first[4 + j], moved<0>(high.at[j], 0x30)));
                put(k + 24 + j, _mm512_or_si512(second[4 + j], moved<-2>(high.at[j], 0x30)));
            }
        }
    }
};

// Four registers of two-bit numbers, a shift apart each, of Q2_K and Q3_K.
template <class Put>
inline void tall_two_bits(const uint8_t* p, Rows& from, int k, Put put) {
    const Four packed = turned(p, from);
    for (int j = 0; j < 4; j++) {
        put(k + j, masked(packed.at[j], 3), j);
        put(k + 8 + j, moved<-2>(packed.at[j], 3), j);
        put(k + 16 + j, moved<-4>(packed.at[j], 3), j);
        put(k + 24 + j, moved<-6>(packed.at[j], 3), j);
    }
}

template <> struct Numbers<Q2_K> {
    template <class Put>
    static inline void unpack(const uint8_t* p, Rows& from, int, Put put) {
        for (int piece = 0; piece < 4; piece++)
            tall_two_bits(p + 16 + 16 * piece, from, 32 * (piece / 2) + 4 * (piece % 2),
                          [&](int k, __m512i x, int) { put(k, x); });
    }
};

template <> struct Numbers<Q3_K> {
    template <class Put>
    static inline void unpack(const uint8_t* p, Rows& from, int, Put put) {
        for (int piece = 0; piece < 4; piece++) {
            const Four high = turned(p + 16 * (piece % 2), from);
            tall_two_bits(p + 32 + 16 * piece, from, 32 * (piece / 2) + 4 * (piece % 2), [&](int k, __m512i x, int j) {
                const __mmask64 set = _mm512_test_epi8_mask(high.at[j], bytes(1 << (k / 8)));
                put(k, _mm512_mask_add_epi8(x, set, x, bytes(4)));
            });
        }
    }
};

// Scales and offsets of 256 numbers of 16 rows into a half of a tile.
template <int kind>
inline void tall_scales(const uint8_t* p, size_t row_bytes, int blocks, Tall<Format<kind>::GROUP>& out, int half) {
    using F = Format<kind>;
    __m512 scale[16], offset[16];
    for (int r = 0; r < 16; r++) {
        const Groups g = Wide<kind>::groups(p + r * row_bytes, blocks);
        scale[r] = g.scale;
        offset[r] = g.offset;
        if constexpr (F::GROUP == 32 && F::OFFSETS)
            scale[r] = _mm512_insertf32x8(scale[r], _mm512_castps512_ps256(offset[r]), 1);
    }
    turn(scale);
    if constexpr (F::GROUP == 16 && F::OFFSETS) turn(offset);
    for (int g = 0; g < 256 / F::GROUP; g++) {
        _mm512_store_ps(out.scale[g][half], scale[g]);
        if constexpr (F::OFFSETS) _mm512_store_ps(out.offset[g][half], F::GROUP == 32 ? scale[8 + g % 8] : offset[g]);
    }
}

// 256 numbers, or as many blocks of 32, of 16 rows into a half of a tile.
template <int kind>
inline void unpack_tall(const uint8_t* p, Rows& from, int blocks, Tall<Format<kind>::GROUP>& out, int half) {
    tall_scales<kind>(p, from.row_bytes, blocks, out, half);
    Numbers<kind>::unpack(p, from, blocks, [&](int k, __m512i x) { _mm512_store_si512(out.u[k][half], x); });
}

}  // namespace
}  // namespace ktopt
