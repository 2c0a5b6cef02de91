// Products with many tokens: weights are unpacked once for all of them. Callers share work out by `product`, or let
// `shared_product` do it; either takes any number of tokens, any type and any instruction set, and does what is fastest there.
#pragma once

#include "linear.h"

namespace ktopt {

// From so many tokens on, unpacking a tile is worth it (AVX512 VNNI on Zen 5, all types alike: at 2 tokens some types gain, at 3
// all do).
constexpr int64_t MANY_TOKENS = 3;
constexpr int64_t ANY_TOKENS = 1;  // unpacking always: a token's result has the same bits whatever others there are

// Whether many tokens of this type have a kernel of their own here. Where not, `product` goes token by token, and for hundreds of
// tokens a caller who can should dequantise and use a library.
bool has_product(int kind);

// Activations for `tokens` vectors of `columns`, float32 or bfloat16, one after the other: token t's at out + t *
// activation_blocks(columns).
void quantize_tokens(const void* x, bool bfloat16, int64_t tokens, int64_t columns, Activations* out, int threads);

// For r in [first_row, first_row + rows) and t < tokens: out[t * out_stride + r] = row r times x[t], or += with `add`. On the
// calling thread, without allocating. x is Activations for quantised types and float for the others, x_stride of them from a token
// to the next. A result doesn't depend on how rows and tokens are shared out, as long as all calls have `many` tokens or none has:
// with ANY_TOKENS it never does. Rows in multiples of 32 and 12 tokens or more go fastest.
void product(const Matrix& weight, const void* x, size_t x_stride, int64_t tokens, float* out, size_t out_stride, bool add,
             int64_t first_row, int64_t rows, int64_t many = MANY_TOKENS);

// All rows, shared out to threads.
void shared_product(const Matrix& weight, const void* x, size_t x_stride, int64_t tokens, float* out, size_t out_stride, bool add,
                    int threads);

// linear(), through blocks of tokens so that its memory doesn't grow with them. False where there is no memory.
bool linear_many(const Matrix& weight, const void* x, bool bfloat16, int64_t tokens, float* out, int64_t out_stride, int threads);

}  // namespace ktopt
