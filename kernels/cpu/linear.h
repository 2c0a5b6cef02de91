// What the kernels are called through: checked sizes, quantised activations, rows shared out to threads.
#pragma once

#include "types.h"

namespace ktopt {

// A matrix of `rows` x `columns` in blocks of `kind`, row after row.
struct Matrix {
    int kind;
    const uint8_t* data;
    int64_t rows, columns;
};

// From a row to the next.
int64_t row_bytes(const Matrix& weight);

// Why a matrix of these sizes can't be `nbytes` long, or null.
const char* refuses(int64_t kind, int64_t rows, int64_t columns, int64_t nbytes);

// out[t * out_stride + r] = row r times x[t], for t < tokens. x lies (tokens, columns), float32 or bfloat16; out is float32.
// Quantised kinds quantise x to 8 bits in groups of 32 first. Answers false where there is no memory for that.
bool linear(const Matrix& weight, const void* x, bool bfloat16, int64_t tokens, float* out, int64_t out_stride, int threads);

// The whole matrix as float32, or rounded to bfloat16: (rows, columns).
void dequantize(const Matrix& weight, void* out, bool bfloat16, int threads);

// The rows that `ids` names, in their order, as float32 or rounded to bfloat16: (count, columns). Answers -1, or the place of the
// first id that is no row; nothing is written then.
int64_t rows(const Matrix& weight, const int64_t* ids, int64_t count, void* out, bool bfloat16, int threads);

// The first row with a scale that is inf or NaN, or -1. Plain floats have no scales.
int64_t first_bad_row(const Matrix& weight, int threads);

}  // namespace ktopt
