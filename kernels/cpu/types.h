// GGML's storage types by their numbers in GGUF files, and the layout that activations are quantised to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anchors.h"

namespace ktopt {

enum Kind : int {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, BF16 = 30,
};
constexpr int KINDS = 31;

// Numbers in a block, and its bytes; 0 and 0 for a type without a kernel.
struct Layout {
    int elements, bytes;
};

constexpr Layout layout_of(int kind) {
    switch (kind) {
    case F32: return {1, 4};
    case F16: case BF16: return {1, 2};
    case Q4_0: case IQ4_NL: return {32, 18};
    case Q4_1: return {32, 20};
    case Q5_0: return {32, 22};
    case Q5_1: return {32, 24};
    case Q8_0: return {32, 34};
    case Q2_K: return {256, 84};
    case Q3_K: return {256, 110};
    case Q4_K: return {256, 144};
    case Q5_K: return {256, 176};
    case Q6_K: return {256, 210};
    case IQ4_XS: return {256, 136};
    default: return {0, 0};
    }
}

constexpr bool is_float(int kind) { return kind == F32 || kind == F16 || kind == BF16; }

// 256 activations. Each 32 of them share a scale: x is about q * d8. Past the end of a row all is zero.
// s8 and s16 are the sums of q * d8 over 32 and 16 numbers: what a weight's offset is multiplied by.
struct alignas(64) Activations {
    int8_t q[256];
    float d8[8];
    float s8[8];
    float s16[16];
};

constexpr int64_t activation_blocks(int64_t columns) { return (columns + 255) / 256; }

// Rows [0, rows) of a matrix, `row_bytes` apart, times `tokens` vectors: out[t * out_stride + r]. `x` is Activations for quantised
// kinds and float for the others, x_stride elements of it from a token to the next.
using RowsFunction = void (*)(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const void* x,
                              size_t x_stride, int64_t tokens, float* out, size_t out_stride);

// The same for many tokens: a tile of weights is unpacked once for all of them. `x` is Activations; with `add`, out += the product.
using ProductFunction = void (*)(const uint8_t* weight, size_t row_bytes, int64_t rows, int64_t columns, const Activations* x,
                                 size_t x_stride, int64_t tokens, float* out, size_t out_stride, bool add);

// One row as float32, or rounded to bfloat16.
using DequantizeFunction = void (*)(const uint8_t* row, int64_t columns, void* out, bool bfloat16);

// What follows a gate's product in a gated MLP, as transformers names them: gelu is by the error function, quick_gelu is
// x * sigmoid(1.702 x), relu2 is relu's square.
enum Activation : int { SILU = 0, GELU_TANH = 1, RELU = 2, GELU = 3, QUICK_GELU = 4, RELU2 = 5, ACTIVATIONS = 6 };

// Consecutive tokens of one head's keys and values, each token's numbers one after the other, of kind F32, F16, BF16, Q8_0 or Q4_0.
// Where `values` are `keys`, a value is the first numbers of its token's key.
struct Segment {
    int kind;
    const uint8_t *keys, *values;
    int64_t tokens;
};

// What queries attend to, in any order. Dimensions are multiples of 16, and of 32 where there is Q8_0 or Q4_0.
struct SegmentRun {
    const Segment* segments;
    int64_t count, key_dim, value_dim;
    float scale;     // of the scores
    float* scratch;  // run_scratch numbers at a multiple of 64 bytes, or null where a run needs none
};

constexpr int64_t SEGMENT_HEADS = 4;           // queries that go through keys and values together
constexpr int64_t SEGMENT_SCRATCH = 128 << 10;  // bytes of tokens that are unpacked for more queries than that: half of an L2 cache

// Numbers that a run needs to unpack tokens.
constexpr int64_t run_scratch(int64_t heads, int64_t key_dim, int64_t value_dim) {
    const int64_t least = 4 * (key_dim + value_dim), most = SEGMENT_SCRATCH / 4;
    return heads <= SEGMENT_HEADS ? 0 : least > most ? least : most;
}

// One block of a latent cache and 16 heads of one query (see mla.h): up to LATENT_BLOCK tokens, their numbers `row_bytes` apart.
// A token's first `latent` numbers are what is summed up, all `width` meet the query. highest, sum (16) and out (16, latent) are
// the softmax so far: its largest score, its sum, and the sum of latents times weights, neither divided yet.
constexpr int LATENT_BLOCK = 64, LATENT_HEADS = 16;
struct LatentBlock {
    const uint8_t* rows;
    size_t row_bytes;
    int tokens;
    int64_t width, latent;
    const void* query;
    const uint8_t* next;  // where `next_bytes` of the block to come lie, to be fetched early
    size_t next_bytes;
    float *highest, *sum, *out;
};

// Latent attention on numbers of one type. `pack` takes `heads` (at most 16) queries of `width` numbers, query_stride apart, times
// `scale`, to the form that `attend` reads: 16 * width numbers of that type.
struct LatentKernels {
    void (*pack)(const float* query, size_t query_stride, int heads, int64_t width, float scale, void* out);
    void (*attend)(const LatentBlock& block);
};

// attention.h
struct PrefillPart;
using PrefillFunction = void (*)(const PrefillPart& part);

// What one instruction set has.
struct Kernels {
    const char* name;
    void (*quantize)(const float* x, int64_t columns, Activations* out);
    void (*widen)(const uint16_t* bfloat16, int64_t count, float* out);
    RowsFunction rows[KINDS];
    DequantizeFunction dequantize[KINDS];
    ProductFunction product[KINDS];  // null where nothing is faster than `rows`
    // fused.h says what these compute.
    void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
    void (*gated)(int activation, const float* gate, const float* up, int64_t n, float* out);
    void (*rotate)(float* x, const float* cos, const float* sin, int64_t dim);
    bool (*narrow)(int kind, const float* x, int64_t n, void* out);
    void (*add)(const float* x, int64_t n, float* to);
    void (*attend)(const SegmentRun& run, const float* q, int64_t heads, float* out);  // attention_segments.h
    void (*add_scaled)(const float* x, int64_t n, float scale, float* to);  // to += scale * x
    LatentKernels latent, latent_bfloat16;  // on float32; and on bfloat16 where the CPU multiplies it, null elsewhere
    PrefillFunction prefill;
    int prefill_rows;  // queries of a tile
    AnchorKernels anchors;
};

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, avx512vnni_kernels, avx512bf16_kernels;
#endif

// The kernels that run. `set_isa` answers false for a name that this CPU can't run; null takes the best.
const Kernels& kernels();
bool set_isa(const char* name);
bool has_isa(const char* name);

}  // namespace ktopt
