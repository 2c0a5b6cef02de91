// Fills the table of functions of one instruction set: the last thing that its file does.
#pragma once

#include "fused.h"

namespace ktopt {
namespace {

// The table of one instruction set, from what it has for each kind. A constant: code that runs when the library is loaded must not
// use the instruction set.
#define KTOPT_KERNELS(table, isa, QUANTIZED, FLOATS, NUMBERS)                                   \
    constexpr Kernels table = [] {                                                              \
        Kernels k = {isa, quantize, widen, {}, {}, rms_norm, gated, rotate, narrow, add, attend}; \
        KTOPT_EACH_QUANTIZED(KTOPT_FILL, QUANTIZED, NUMBERS)         \
        KTOPT_EACH_FLOAT(KTOPT_FILL, FLOATS, dequantize)             \
        return k;                                                    \
    }()
#define KTOPT_FILL(kind, rows_function, numbers_function) \
    k.rows[kind] = rows_function<kind>;                   \
    k.dequantize[kind] = numbers_function<kind>;
#define KTOPT_EACH_QUANTIZED(what, f, n)                                                                            \
    what(Q4_0, f, n) what(Q4_1, f, n) what(Q5_0, f, n) what(Q5_1, f, n) what(Q8_0, f, n) what(Q2_K, f, n)           \
    what(Q3_K, f, n) what(Q4_K, f, n) what(Q5_K, f, n) what(Q6_K, f, n) what(IQ4_NL, f, n) what(IQ4_XS, f, n)
#define KTOPT_EACH_FLOAT(what, f, n) what(F32, f, n) what(F16, f, n) what(BF16, f, n)

}  // namespace
}  // namespace ktopt
