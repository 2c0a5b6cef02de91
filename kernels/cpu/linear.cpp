#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gemm.h"
#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t LEAST_BYTES = 24 << 10;  // what a part reads at least: less takes about as long as handing it over

constexpr int PARTS_A_THREAD = 4;
constexpr int64_t ROWS_TOGETHER = 16;  // a cache line of results

thread_local Scratch floats_scratch, activations_scratch;

// Rows in equal parts.
struct Split {
    int64_t rows, step, parts;
    bool is_long;

    Split(int64_t rows, int64_t work_bytes, int threads)
        : rows(rows), step(rows), parts(1), is_long(work_bytes >= LONG_BYTES) {
        const int64_t wanted = std::min<int64_t>(int64_t(threads) * PARTS_A_THREAD, work_bytes / LEAST_BYTES);
        if (threads <= 1 || wanted <= 1) return;
        step = (rows / wanted + ROWS_TOGETHER) / ROWS_TOGETHER * ROWS_TOGETHER;
        parts = (rows + step - 1) / step;
    }

    int64_t begin(int64_t part) const { return part * step; }
    int64_t count(int64_t part) const { return std::min(step, rows - part * step); }
};

template <class Function>
void run(const Split& split, int threads, Function function) {
    share_out(split.parts, threads, split.is_long, function);
}

constexpr uint16_t EXPONENT = 0x7c00;

// Where a block keeps its one or two float16 scales.
struct ScalePlaces {
    int count, at[2];
};

constexpr ScalePlaces scale_places(int kind) {
    switch (kind) {
    case Q4_0: case Q5_0: case Q8_0: case IQ4_NL: case IQ4_XS: return {1, {0, 0}};
    case Q4_1: case Q5_1: case Q4_K: case Q5_K: return {2, {0, 2}};
    case Q2_K: return {2, {80, 82}};
    case Q3_K: return {1, {108, 0}};
    case Q6_K: return {1, {208, 0}};
    default: return {0, {0, 0}};
    }
}

bool all_finite(const uint8_t* row, int64_t blocks, int bytes, ScalePlaces places) {
    for (int64_t b = 0; b < blocks; b++, row += bytes)
        for (int i = 0; i < places.count; i++) {
            uint16_t half;
            std::memcpy(&half, row + places.at[i], 2);
            if ((half & EXPONENT) == EXPONENT) return false;
        }
    return true;
}

}  // namespace

int64_t row_bytes(const Matrix& w) {
    const Layout layout = layout_of(w.kind);
    return w.columns / layout.elements * layout.bytes;
}

const char* refuses(int64_t kind, int64_t rows, int64_t columns, int64_t nbytes) {
    if (kind < 0 || kind >= KINDS || layout_of(int(kind)).bytes == 0) return "there is no kernel for this storage type";
    const Layout layout = layout_of(int(kind));
    if (rows <= 0 || columns <= 0 || columns % layout.elements != 0) return "rows must be whole blocks, and at least one";
    const int64_t blocks = columns / layout.elements;
    if (blocks > INT64_MAX / layout.bytes / rows) return "the matrix is too large";
    if (rows * blocks * layout.bytes != nbytes) return "the buffer's size isn't that of the matrix";
    return nullptr;
}

bool linear(const Matrix& weight, const void* x, bool bfloat16, int64_t tokens, float* out, int64_t out_stride, int threads) {
    if (tokens >= MANY_TOKENS && has_product(weight.kind))
        return linear_many(weight, x, bfloat16, tokens, out, out_stride, threads);
    const Kernels& isa = kernels();
    const size_t bytes = size_t(row_bytes(weight));
    const auto* floats = static_cast<const float*>(x);
    if (bfloat16) {
        const auto count = size_t(tokens * weight.columns);
        if (!floats_scratch.reset(Scratch::room<float>(count))) return false;
        auto* wide = floats_scratch.take<float>(count);
        isa.widen(static_cast<const uint16_t*>(x), tokens * weight.columns, wide);
        floats = wide;
    }
    const void* operand = floats;
    size_t stride = size_t(weight.columns);
    if (!is_float(weight.kind)) {
        stride = size_t(activation_blocks(weight.columns));
        if (!activations_scratch.reset(Scratch::room<Activations>(size_t(tokens) * stride))) return false;
        auto* quantized = activations_scratch.take<Activations>(size_t(tokens) * stride);
        for (int64_t t = 0; t < tokens; t++)
            isa.quantize(floats + t * weight.columns, weight.columns, quantized + size_t(t) * stride);
        operand = quantized;
    }
    const Split split(weight.rows, weight.rows * int64_t(bytes) * (1 + tokens / 2), threads);
    run(split, threads, [&](int64_t part) {
        const int64_t begin = split.begin(part);
        isa.rows[weight.kind](weight.data + size_t(begin) * bytes, bytes, split.count(part), weight.columns, operand, stride,
                              tokens, out + begin, size_t(out_stride));
    });
    return true;
}

namespace {

// One row as numbers, at `out`.
void one_row(const Matrix& weight, DequantizeFunction dequantize, int64_t row, uint8_t* out, bool bfloat16) {
    const int64_t bytes = row_bytes(weight);
    if (weight.kind == (bfloat16 ? BF16 : F32)) {
        std::memcpy(out, weight.data + row * bytes, size_t(bytes));
    } else {
        dequantize(weight.data + row * bytes, weight.columns, out, bfloat16);
    }
}

}  // namespace

void dequantize(const Matrix& weight, void* out, bool bfloat16, int threads) {
    const DequantizeFunction one = kernels().dequantize[weight.kind];
    const int64_t out_bytes = weight.columns * (bfloat16 ? 2 : 4);
    const Split split(weight.rows, weight.rows * weight.columns, threads);
    run(split, threads, [&](int64_t part) {
        for (int64_t r = split.begin(part); r < split.begin(part) + split.count(part); r++)
            one_row(weight, one, r, static_cast<uint8_t*>(out) + r * out_bytes, bfloat16);
    });
}

int64_t rows(const Matrix& weight, const int64_t* ids, int64_t count, void* out, bool bfloat16, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= weight.rows) return i;
    const DequantizeFunction one = kernels().dequantize[weight.kind];
    const int64_t out_bytes = weight.columns * (bfloat16 ? 2 : 4);
    const Split split(count, count * weight.columns, threads);
    run(split, threads, [&](int64_t part) {
        for (int64_t i = split.begin(part); i < split.begin(part) + split.count(part); i++)
            one_row(weight, one, ids[i], static_cast<uint8_t*>(out) + i * out_bytes, bfloat16);
    });
    return -1;
}

int64_t first_bad_row(const Matrix& weight, int threads) {
    const Layout layout = layout_of(weight.kind);
    const ScalePlaces places = scale_places(weight.kind);
    if (places.count == 0) return -1;
    const int64_t bytes = row_bytes(weight);
    std::atomic<int64_t> first{weight.rows};
    const Split split(weight.rows, weight.rows * bytes, threads);
    run(split, threads, [&](int64_t part) {
        for (int64_t r = split.begin(part); r < split.begin(part) + split.count(part); r++)
            if (!all_finite(weight.data + r * bytes, weight.columns / layout.elements, layout.bytes, places)) {
                for (int64_t known = first; r < known && !first.compare_exchange_weak(known, r);) {}
                return;
            }
    });
    return first == weight.rows ? -1 : first.load();
}

}  // namespace ktopt
