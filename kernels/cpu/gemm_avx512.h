// Products of many tokens with AVX512 VNNI: 32 rows are unpacked into a tile that stays in the first cache, and six tokens at a
// time run over it, with sums of a group in int32 and the rest in float32, all in registers.
#pragma once

#include "tall_avx512.h"

namespace ktopt {
namespace {

#if defined(__AVX512VNNI__)

constexpr int64_t TALL_ROWS = 32;
constexpr int64_t TALL_BLOCKS = 3;  // of 256 columns: a tile takes 30 to 36 KiB of the first cache
constexpr int MOST_TOGETHER = 6;    // tokens: 12 sums in int32, 12 in float32, and what meets in them fill 32 registers

// Adds a group's products: numbers 4 k to 4 (k + count) - 1 of 32 rows, for each token.
template <int count, int tokens>
inline void add_products(const uint8_t (*u)[2][64], const int8_t* q, size_t q_stride, __m512i (*sum)[2]) {
    for (int t = 0; t < tokens; t++) sum[t][0] = sum[t][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int k = 0; k < count; k++) {
        const __m512i low = _mm512_load_si512(u[k][0]), high = _mm512_load_si512(u[k][1]);
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++) {
            int32_t four;
            std::memcpy(&four, q + t * q_stride + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(four);
            sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], low, x);
            sum[t][1] = _mm512_dpbusd_epi32(sum[t][1], high, x);
        }
    }
}

// 32 rows of a tile times a few tokens, out = or out +=. Rows past the matrix's last are masked.
template <int GROUP, bool OFFSETS, int tokens>
void tall_tokens(const Tall<GROUP>* tile, int64_t columns, float zero, const Activations* x, size_t x_stride, float* out,
                 size_t out_stride, __mmask32 there, bool add) {
    constexpr int PARTS = 32 / GROUP;
    const __mmask16 mask[2] = {__mmask16(there), __mmask16(there >> 16)};
    const size_t bytes = x_stride * sizeof(Activations);
    __m512 total[tokens][2];
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < 2; h++)
            total[t][h] = add ? _mm512_maskz_loadu_ps(mask[h], out + t * out_stride + 16 * h) : _mm512_setzero_ps();
    for (; columns > 0; columns -= 256, tile++, x++) {
        const int groups = columns < 256 ? int(columns / GROUP) : 256 / GROUP;
        alignas(64) float moved[tokens][16];  // what a number's zero takes off: zero times a group's sum
        if constexpr (!OFFSETS)
            for (int t = 0; t < tokens; t++) {
                const Activations& a = x[t * x_stride];
                const __m512 sums = GROUP == 16 ? _mm512_load_ps(a.s16) : low8(_mm256_load_ps(a.s8));
                _mm512_store_ps(moved[t], _mm512_mul_ps(_mm512_set1_ps(zero), sums));
            }
        for (int g = 0; g < groups; g++) {
            __m512i sum[tokens][2];
            add_products<GROUP / 4, tokens>(tile->u + g * GROUP / 4, x->q + g * GROUP, bytes, sum);
            const __m512 scale[2] = {_mm512_load_ps(tile->scale[g][0]), _mm512_load_ps(tile->scale[g][1])};
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++) {
                const auto& a = *reinterpret_cast<const Activations*>(reinterpret_cast<const uint8_t*>(x) + t * bytes);
                const __m512 d = _mm512_set1_ps(a.d8[g / PARTS]);
                const __m512 taken = _mm512_set1_ps(!OFFSETS ? moved[t][g] : GROUP == 16 ? a.s16[g] : a.s8[g]);
                for (int h = 0; h < 2; h++) {
                    const __m512 number = _mm512_cvtepi32_ps(sum[t][h]);
                    if constexpr (OFFSETS) {
                        total[t][h] = _mm512_fmadd_ps(number, _mm512_mul_ps(scale[h], d), total[t][h]);
                        total[t][h] = _mm512_fnmadd_ps(_mm512_load_ps(tile->offset[g][h]), taken, total[t][h]);
                    } else {
                        total[t][h] = _mm512_fmadd_ps(_mm512_fmsub_ps(number, d, taken), scale[h], total[t][h]);
                    }
                }
            }
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < 2; h++) _mm512_mask_storeu_ps(out + t * out_stride + 16 * h, mask[h], total[t][h]);
}

// All tokens over one tile, in groups of six or nearly.
template <int GROUP, bool OFFSETS>
void tall_tile(const Tall<GROUP>* tile, int64_t columns, float zero, const Activations* x, size_t x_stride, int64_t tokens,
               float* out, size_t out_stride, __mmask32 there, bool add) {
    using Function = decltype(&tall_tokens<GROUP, OFFSETS, 1>);
    static constexpr Function functions[MOST_TOGETHER] = {
        tall_tokens<GROUP, OFFSETS, 1>, tall_tokens<GROUP, OFFSETS, 2>, tall_tokens<GROUP, OFFSETS, 3>,
        tall_tokens<GROUP, OFFSETS, 4>, tall_tokens<GROUP, OFFSETS, 5>, tall_tokens<GROUP, OFFSETS, 6>,
    };
    for (int64_t t = 0, groups = (tokens + MOST_TOGETHER - 1) / MOST_TOGETHER; groups > 0; groups--) {
        const int64_t together = (tokens - t + groups - 1) / groups;
        functions[together - 1](tile, columns, zero, x + t * x_stride, x_stride, out + t * out_stride, out_stride, there, add);
        t += together;
    }
}

// Unpacks 16 rows. Where the matrix has fewer, what is there is copied first, and the rest is zero.
template <int kind>
inline void unpack_half(const uint8_t* p, Rows& from, int64_t rows, int blocks, Tall<Format<kind>::GROUP>& out, int half) {
    constexpr int SPAN = Format<kind>::SPAN;
    if (rows >= 16) return unpack_tall<kind>(p, from, blocks, out, half);
    alignas(64) uint8_t copy[16 * SPAN] = {};
    const size_t bytes = layout_of(kind).elements == 32 ? size_t(blocks) * layout_of(kind).bytes : size_t(SPAN);
    for (int64_t r = 0; r < rows; r++) std::memcpy(copy + r * SPAN, p + r * from.row_bytes, bytes);
    Rows copied{SPAN, nullptr, nullptr};
    unpack_tall<kind>(copy, copied, blocks, out, half);
}

template <int kind>
void tall_product(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const Activations* x, size_t x_stride,
                  int64_t tokens, float* out, size_t out_stride, bool add) {
    using F = Format<kind>;
    Tall<F::GROUP> tile[TALL_BLOCKS];
    const int64_t blocks = activation_blocks(columns), runs = (blocks + TALL_BLOCKS - 1) / TALL_BLOCKS;
    for (int64_t r = 0; r < rows; r += TALL_ROWS) {
        const int64_t here = rows - r < TALL_ROWS ? rows - r : TALL_ROWS;
        const auto there = __mmask32((uint64_t(1) << here) - 1);
        const int64_t next = rows - r - here < TALL_ROWS ? rows - r - here : TALL_ROWS;
        Rows from{row_bytes, weight + size_t(r + here) * row_bytes, weight + size_t(r + here + next) * row_bytes};
        for (int64_t run = 0, first = 0; run < runs; run++) {
            const int64_t end = blocks * (run + 1) / runs, last_column = end == blocks ? columns : 256 * end;
            for (int64_t b = first; b < end; b++) {
                const uint8_t* p = weight + size_t(r) * row_bytes + size_t(b) * F::SPAN;
                const int groups = columns - 256 * b < 256 ? int((columns - 256 * b) / 32) : 8;
                unpack_half<kind>(p, from, here, groups, tile[b - first], 0);
                unpack_half<kind>(p + 16 * row_bytes, from, here - 16, groups, tile[b - first], 1);
            }
            tall_tile<F::GROUP, F::OFFSETS>(tile, last_column - 256 * first, F::ZERO, x + first, x_stride, tokens, out + r,
                                            out_stride, there, add || run > 0);
            first = end;
        }
    }
}

#endif

}  // namespace
}  // namespace ktopt
