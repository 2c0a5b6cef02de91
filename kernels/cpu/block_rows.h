// Blocks of tokens: what one KV head of a sequence keeps of so many tokens, keys first, then values, in rows of one storage type. See
// ktopt/cache/blocks/layout.py.
#pragma once

#include "types.h"

namespace ktopt {

struct BlockShape {
    int kind;  // F32, F16, BF16, Q8_0 or Q4_0
    int64_t tokens, key_dim, value_dim;
    int64_t value_offset, nbytes;  // of a block; where values are shared the offset is 0, and they are the first numbers of keys
    bool shared;
};

// Numbers of a tensor (rows, tokens, dim) of kind F32, F16 or BF16, a token's one after another. Strides are bytes.
struct TokenRows {
    int kind;
    const uint8_t* data;
    int64_t row_stride, token_stride;
};

// Why there are no such blocks, or null.
const char* refuses(const BlockShape& shape);

enum class Packed { DONE, NO_MEMORY, TOO_LARGE };

// A block of each row at out + row * out_stride, rounded as ggml's own quantisers round; bytes that fill it up become zero. TOO_LARGE
// where float16, or with it a scale, can't hold a number, and for numbers that Q8_0 and Q4_0 haven't (inf, NaN): the row's block is
// undefined then. `values` isn't read where they are shared.
Packed pack_blocks(const BlockShape& shape, int64_t rows, const TokenRows& keys, const TokenRows& values, uint8_t* out,
                   int64_t out_stride, int threads);

// The blocks at addresses[row * address_stride + k], `count` a row, as numbers of kind F32, F16 or BF16: keys (rows, count * tokens,
// key_dim) and values, rows that many bytes apart. False where there is no memory.
bool unpack_blocks(const BlockShape& shape, int64_t rows, int64_t count, const int64_t* addresses, int64_t address_stride,
                   int out_kind, uint8_t* keys, int64_t key_row_bytes, uint8_t* values, int64_t value_row_bytes, int threads);

}  // namespace ktopt
