// AVX512 (F, BW, DQ, VL), and built a second time with VNNI. Blocks are unpacked in registers, 64 numbers at a time.
#include <immintrin.h>

#include "table.h"

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

    // The float16 at `at` of each block, as eight float32. `blocks` is a constant where this is inlined.
    static inline __m512 eight(const uint8_t* p, int blocks, int at) {
        uint16_t h[8];
        for (int b = 0; b < 8; b++) {
            h[b] = 0;
            if (b < blocks) std::memcpy(&h[b], p + b * BYTES + at, 2);
        }
        return low8(_mm256_cvtph_ps(_mm_setr_epi16(short(h[0]), short(h[1]), short(h[2]), short(h[3]), short(h[4]), short(h[5]),
                                                   short(h[6]), short(h[7]))));
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

// The group that each of a chunk's 16 sums of four belongs to.
template <int group>
inline __m512i group_of_lane(int c) {
    const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    if constexpr (group == 16) return _mm512_add_epi32(four, _mm512_set1_epi32(4 * c));
    return _mm512_add_epi32(_mm512_srli_epi32(four, 1), _mm512_set1_epi32(2 * c));
}

// Add 64 * chunks numbers of a row, or 32 fewer where `second` is false, for each token.
template <int kind, int tokens, int chunks, bool second>
inline void step(const uint8_t* p, const Activations* x, size_t x_stride, __m512* total) {
    using F = Format<kind>;
    constexpr bool SIGNED = F::ZERO == 128 && !VNNI;
    constexpr int ZERO = SIGNED ? 0 : F::ZERO;
    const Groups g = Wide<kind>::groups(p, 2 * chunks - !second);
    __m512 offset = g.offset, scale[tokens];
    if constexpr (ZERO != 0) offset = _mm512_mul_ps(g.scale, _mm512_set1_ps(ZERO));
    for (int t = 0; t < tokens; t++) {
        __m512 d = low8(_mm256_load_ps(x[t * x_stride].d8));
        if constexpr (F::GROUP == 16)
            d = _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), d);
        scale[t] = _mm512_mul_ps(g.scale, d);
        if constexpr (ZERO != 0 || F::OFFSETS) {
            const __m512 sums = F::GROUP == 16 ? _mm512_load_ps(x[t * x_stride].s16) : low8(_mm256_load_ps(x[t * x_stride].s8));
            total[t] = _mm512_fnmadd_ps(offset, sums, total[t]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < chunks; c++) {
        const __m512i u = Wide<kind>::chunk(p, c, second || c + 1 < chunks);
        const __m512i lanes = group_of_lane<F::GROUP>(c);
        for (int t = 0; t < tokens; t++) {
            const __m512i dot = products<SIGNED>(u, load64(x[t * x_stride].q + 64 * c));
            total[t] = _mm512_fmadd_ps(_mm512_permutexvar_ps(lanes, scale[t]), _mm512_cvtepi32_ps(dot), total[t]);
        }
    }
}

template <int kind, int tokens>
inline void wide_row(const uint8_t* row, int64_t columns, const Activations* x, size_t x_stride, float* out, size_t out_stride) {
    __m512 total[tokens];
    for (int t = 0; t < tokens; t++) total[t] = _mm512_setzero_ps();
    for (; columns >= 256; columns -= 256, row += Format<kind>::SPAN, x++) step<kind, tokens, 4, true>(row, x, x_stride, total);
    if constexpr (layout_of(kind).elements == 32) {
        switch (columns / 32) {
        case 1: step<kind, tokens, 1, false>(row, x, x_stride, total); break;
        case 2: step<kind, tokens, 1, true>(row, x, x_stride, total); break;
        case 3: step<kind, tokens, 2, false>(row, x, x_stride, total); break;
        case 4: step<kind, tokens, 2, true>(row, x, x_stride, total); break;
        case 5: step<kind, tokens, 3, false>(row, x, x_stride, total); break;
        case 6: step<kind, tokens, 3, true>(row, x, x_stride, total); break;
        case 7: step<kind, tokens, 4, false>(row, x, x_stride, total); break;
        default: break;
        }
    }
    for (int t = 0; t < tokens; t++) out[t * out_stride] = _mm512_reduce_add_ps(total[t]);
}

template <int kind>
void wide_rows(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const void* x, size_t x_stride,
               int64_t tokens, float* out, size_t out_stride) {
    const auto* activations = static_cast<const Activations*>(x);
    for (int64_t r = 0; r < rows; r++, weight += row_bytes)
        in_groups(tokens, [&](auto count, int64_t t) {
            wide_row<kind, decltype(count)::value>(weight, columns, activations + t * x_stride, x_stride, out + t * out_stride + r,
                                                   out_stride);
        });
}

// 16 numbers to their place, rounded to nearest even where they become bfloat16. They are no NaN: scales are finite.
inline void store_numbers(__m512 x, void* out, int64_t at, bool bfloat16) {
    if (!bfloat16) {
        _mm512_storeu_ps(static_cast<float*>(out) + at, x);
        return;
    }
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + at), _mm512_cvtepi32_epi16(rounded));
}

template <int kind>
void wide_dequantize(const uint8_t* row, int64_t columns, void* out, bool bfloat16) {
    using F = Format<kind>;
    constexpr bool SIGNED = F::ZERO == 128 && !VNNI;
    alignas(64) float scale[16], offset[16];
    alignas(64) uint8_t u[64];
    for (int64_t start = 0; start < columns; start += 256, row += F::SPAN) {
        const int64_t count = columns - start < 256 ? columns - start : 256;
        const Groups g = Wide<kind>::groups(row, int(count / 32));
        _mm512_store_ps(scale, g.scale);
        _mm512_store_ps(offset, g.offset);
        for (int c = 0; 64 * c < count; c++) {
            const __m512i chunk = Wide<kind>::chunk(row, c, 64 * c + 32 < count);
            _mm512_store_si512(u, chunk);
            for (int i = 64 * c; i < 64 * c + 64 && i < count; i += 16) {
                const __m128i few = load16(u + i % 64);
                const __m512i wide = SIGNED ? _mm512_cvtepi8_epi32(few)
                                            : _mm512_sub_epi32(_mm512_cvtepu8_epi32(few), _mm512_set1_epi32(F::ZERO));
                __m512 number = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(scale[i / F::GROUP]));
                if constexpr (F::OFFSETS) number = _mm512_sub_ps(number, _mm512_set1_ps(offset[i / F::GROUP]));
                store_numbers(number, out, start + i, bfloat16);
            }
        }
    }
}

template <int kind>
inline __m512 load_floats(const uint8_t* p, __mmask16 there) {
    if constexpr (kind == F32) return _mm512_maskz_loadu_ps(there, p);
    const __m256i halves = _mm256_maskz_loadu_epi16(there, p);
    if constexpr (kind == F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

template <int kind, int tokens>
inline void wide_float_row(const uint8_t* row, int64_t columns, const float* x, size_t x_stride, float* out, size_t out_stride) {
    constexpr int BYTES = layout_of(kind).bytes, SUMS = tokens == 1 ? 4 : 1;  // several sums, so that one doesn't wait for another
    __m512 total[SUMS][tokens];
    for (auto& sums : total)
        for (auto& sum : sums) sum = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 16 * SUMS <= columns; i += 16 * SUMS)
        for (int s = 0; s < SUMS; s++) {
            const __m512 w = load_floats<kind>(row + (i + 16 * s) * BYTES, 0xffff);
            for (int t = 0; t < tokens; t++)
                total[s][t] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x + t * x_stride + i + 16 * s), total[s][t]);
        }
    for (; i < columns; i += 16) {
        const __mmask16 there = columns - i < 16 ? __mmask16((1u << (columns - i)) - 1) : __mmask16(0xffff);
        const __m512 w = load_floats<kind>(row + i * BYTES, there);
        for (int t = 0; t < tokens; t++)
            total[0][t] = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(there, x + t * x_stride + i), total[0][t]);
    }
    for (int t = 0; t < tokens; t++) {
        for (int s = 1; s < SUMS; s++) total[0][t] = _mm512_add_ps(total[0][t], total[s][t]);
        out[t * out_stride] = _mm512_reduce_add_ps(total[0][t]);
    }
}

template <int kind>
void wide_float_rows(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const void* x, size_t x_stride,
                     int64_t tokens, float* out, size_t out_stride) {
    const auto* floats = static_cast<const float*>(x);
    for (int64_t r = 0; r < rows; r++, weight += row_bytes)
        in_groups(tokens, [&](auto count, int64_t t) {
            wide_float_row<kind, decltype(count)::value>(weight, columns, floats + t * x_stride, x_stride,
                                                         out + t * out_stride + r, out_stride);
        });
}

}  // namespace

#if defined(__AVX512VNNI__)
KTOPT_KERNELS(avx512vnni_kernels, "avx512vnni", wide_rows, wide_float_rows, wide_dequantize);
#else
KTOPT_KERNELS(avx512_kernels, "avx512", wide_rows, wide_float_rows, wide_dequantize);
#endif

}  // namespace ktopt
