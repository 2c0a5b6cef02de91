#include "block_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "formats.h"
#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t LONG_NUMBERS = 1 << 18;  // a job of so many takes some 100 microseconds: worth waking threads for
constexpr int64_t LARGEST_DIM = 1 << 16;
constexpr int GROUP = 32;
constexpr float SMALLEST = 0x1p-126f;  // the inverse of a smaller scale is infinite, and float16 has no such scale

thread_local Scratch numbers_scratch;

int64_t row_bytes(int kind, int64_t dim) {
    const Layout layout = layout_of(kind);
    return dim / layout.elements * layout.bytes;
}

// The largest magnitude's bits, which order as magnitudes do: 0x7f800000 and more for inf and NaN.
int32_t largest_bits(const float* x) {
    int32_t largest = 0;
    for (int i = 0; i < GROUP; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, 4);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    return largest;
}

float inverse_of(float scale) { return std::fabs(scale) < SMALLEST ? 0.0f : 1.0f / scale; }

// Stores the scale in float16, which it must fit.
bool put_scale(float scale, uint8_t* out) {
    const uint16_t half = float_to_half(scale);
    std::memcpy(out, &half, 2);
    return (half & 0x7c00) != 0x7c00;
}

// Products and sums are rounded one by one, as ggml's are: no contraction to fused ones.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

// To the nearest, halves away from zero.
void round_q8_0(const float* x, float inverse, uint8_t* out) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    for (int i = 0; i < GROUP; i++) {
        const float scaled = x[i] * inverse;
        const int whole = int(scaled);
        const float rest = scaled - float(whole);
        out[i] = uint8_t(int8_t(whole + int(rest >= 0.5f) - int(rest <= -0.5f)));
    }
}

void round_q4_0(const float* x, float inverse, uint8_t* out) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    uint8_t steps[GROUP];
    for (int i = 0; i < GROUP; i++) {
        const float scaled = x[i] * inverse;
        steps[i] = uint8_t(std::min(int(scaled + 8.5f), 15));
    }
    for (int i = 0; i < GROUP / 2; i++) out[i] = uint8_t(steps[i] | steps[i + GROUP / 2] << 4);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

// One row of float32 as Q8_0 or Q4_0. False for numbers that it can't hold.
bool quantize_row(int kind, const float* x, int64_t dim, uint8_t* out) {
    bool fits = true;
    for (int64_t i = 0; i < dim; i += GROUP, x += GROUP, out += layout_of(kind).bytes) {
        const int32_t bits = largest_bits(x);
        if (bits >= 0x7f800000) return false;
        float largest;
        std::memcpy(&largest, &bits, 4);
        if (kind == Q8_0) {
            const float scale = largest / 127.0f;
            fits &= put_scale(scale, out);
            round_q8_0(x, inverse_of(scale), out + 2);
            continue;
        }
        const float* most = std::find_if(x, x + GROUP, [&](float y) { return std::fabs(y) == largest; });
        const float scale = *most / -8.0f;
        fits &= put_scale(scale, out);
        round_q4_0(x, inverse_of(scale), out + 2);
    }
    return fits;
}

// One token's numbers of one kind as another; `wide` has room for them in float32.
bool convert(int from_kind, const uint8_t* from, int64_t dim, int to_kind, uint8_t* to, float* wide) {
    if (from_kind == to_kind) {
        std::memcpy(to, from, size_t(row_bytes(to_kind, dim)));
        return true;
    }
    if (to_kind == F32) {
        kernels().dequantize[from_kind](from, dim, to, false);
        return true;
    }
    const auto* numbers = reinterpret_cast<const float*>(from);
    if (from_kind != F32) {
        kernels().dequantize[from_kind](from, dim, wide, false);
        numbers = wide;
    }
    return is_float(to_kind) ? kernels().narrow(to_kind, numbers, dim, to) : quantize_row(to_kind, numbers, dim, to);
}

float* room_for(int64_t numbers) {
    return numbers_scratch.reset(Scratch::room<float>(size_t(numbers))) ? numbers_scratch.take<float>(size_t(numbers)) : nullptr;
}

}  // namespace

const char* refuses(const BlockShape& s) {
    if (!is_float(s.kind) && s.kind != Q8_0 && s.kind != Q4_0) return "blocks are of F32, F16, BF16, Q8_0 or Q4_0";
    const int64_t together = layout_of(s.kind).elements;
    for (const int64_t dim : {s.key_dim, s.value_dim})
        if (dim < 1 || dim % together != 0 || dim > LARGEST_DIM) return "dimensions must be whole groups of numbers";
    if (s.tokens < 1 || s.tokens > 1 << 20) return "a block has too few or too many tokens";
    const int64_t keys = s.tokens * row_bytes(s.kind, s.key_dim), values = s.tokens * row_bytes(s.kind, s.value_dim);
    if (s.shared ? s.value_dim > s.key_dim || s.value_offset != 0 : s.value_offset < keys) return "keys and values overlap";
    if (s.nbytes < (s.shared ? keys : s.value_offset + values)) return "a block is too small for its keys and values";
    return nullptr;
}

Packed pack_blocks(const BlockShape& s, int64_t rows, const TokenRows& keys, const TokenRows& values, uint8_t* out,
                   int64_t out_stride, int threads) {
    std::atomic<bool> fits{true}, memory{true};
    const int64_t key_bytes = row_bytes(s.kind, s.key_dim), value_bytes = row_bytes(s.kind, s.value_dim);
    const auto pack = [&](int64_t row) {
        float* wide = room_for(std::max(s.key_dim, s.value_dim));
        if (wide == nullptr) {
            memory = false;
            return;
        }
        uint8_t* block = out + row * out_stride;
        const auto convert_all = [&](const TokenRows& from, int64_t dim, int64_t bytes, uint8_t* to) {
            for (int64_t t = 0; t < s.tokens; t++)
                if (!convert(from.kind, from.data + row * from.row_stride + t * from.token_stride, dim, s.kind, to + t * bytes, wide))
                    fits = false;
            return to + s.tokens * bytes;
        };
        uint8_t* end = convert_all(keys, s.key_dim, key_bytes, block);
        if (!s.shared) {
            std::memset(end, 0, size_t(block + s.value_offset - end));
            end = convert_all(values, s.value_dim, value_bytes, block + s.value_offset);
        }
        std::memset(end, 0, size_t(block + s.nbytes - end));
    };
    const int64_t numbers = rows * s.tokens * (s.key_dim + (s.shared ? 0 : s.value_dim));
    share_out(rows, threads, numbers >= LONG_NUMBERS, pack);
    return !memory ? Packed::NO_MEMORY : fits ? Packed::DONE : Packed::TOO_LARGE;
}

bool unpack_blocks(const BlockShape& s, int64_t rows, int64_t count, const int64_t* addresses, int64_t address_stride,
                   int out_kind, uint8_t* keys, int64_t key_row_bytes, uint8_t* values, int64_t value_row_bytes, int threads) {
    std::atomic<bool> memory{true};
    const int64_t key_bytes = row_bytes(s.kind, s.key_dim);
    const int64_t value_bytes = s.shared ? key_bytes : row_bytes(s.kind, s.value_dim), item = layout_of(out_kind).bytes;
    const auto unpack = [&](int64_t part) {
        float* wide = room_for(std::max(s.key_dim, s.value_dim));
        if (wide == nullptr) {
            memory = false;
            return;
        }
        const int64_t row = part / count, k = part % count;
        const auto* block = reinterpret_cast<const uint8_t*>(uintptr_t(addresses[row * address_stride + k]));
        uint8_t* to_keys = keys + row * key_row_bytes + k * s.tokens * s.key_dim * item;
        uint8_t* to_values = values + row * value_row_bytes + k * s.tokens * s.value_dim * item;
        for (int64_t t = 0; t < s.tokens; t++)
            convert(s.kind, block + t * key_bytes, s.key_dim, out_kind, to_keys + t * s.key_dim * item, wide);
        for (int64_t t = 0; t < s.tokens; t++)
            convert(s.kind, block + s.value_offset + t * value_bytes, s.value_dim, out_kind, to_values + t * s.value_dim * item, wide);
    };
    share_out(rows * count, threads, rows * count * s.tokens * (s.key_dim + s.value_dim) >= LONG_NUMBERS, unpack);
    return memory;
}

}  // namespace ktopt
