// Fills the table of functions of one instruction set: the last thing that its file does.
#pragma once

#include "anchor_table.h"
#include "attention_segments.h"
#include "attention_tiles.h"
#include "fused.h"
#include "latent.h"

namespace ktopt {
namespace {

template <int kind>
constexpr ProductFunction no_product = nullptr;

// The table of one instruction set, from what it has for each kind. A constant: code that runs when the library is loaded must not
// use the instruction set.
#define KTOPT_KERNELS(table, isa, QUANTIZE, QUANTIZED, FLOATS, NUMBERS, PRODUCT)                         \
    constexpr Kernels table = [] {                                                                      \
        Kernels k = {isa, QUANTIZE, widen, {}, {}, {}, rms_norm, gated, rotate, narrow, add, attend,    \
                     add_scaled, latent_floats, latent_pairs, prefill_part, prefill::ROWS, {}};         \
        KTOPT_EACH_QUANTIZED(KTOPT_FILL, QUANTIZED, NUMBERS, PRODUCT)                                   \
        KTOPT_EACH_FLOAT(KTOPT_FILL, FLOATS, dequantize, no_product)                                    \
        k.anchors = anchor_kernels;                                                                     \
        return k;                                                                                       \
    }()
#define KTOPT_FILL(kind, rows_function, numbers_function, product_function) \
    k.rows[kind] = rows_function<kind>;                                     \
    k.dequantize[kind] = numbers_function<kind>;                            \
    k.product[kind] = product_function<kind>;
#define KTOPT_EACH_QUANTIZED(what, ...)                                                                     \
    what(Q4_0, __VA_ARGS__) what(Q4_1, __VA_ARGS__) what(Q5_0, __VA_ARGS__) what(Q5_1, __VA_ARGS__)         \
    what(Q8_0, __VA_ARGS__) what(Q2_K, __VA_ARGS__) what(Q3_K, __VA_ARGS__) what(Q4_K, __VA_ARGS__)         \
    what(Q5_K, __VA_ARGS__) what(Q6_K, __VA_ARGS__) what(IQ4_NL, __VA_ARGS__) what(IQ4_XS, __VA_ARGS__)
#define KTOPT_EACH_FLOAT(what, ...) what(F32, __VA_ARGS__) what(F16, __VA_ARGS__) what(BF16, __VA_ARGS__)

}  // namespace
}  // namespace ktopt
