#include "gemm.h"

#include <algorithm>

#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t TILE_ROWS = 32, TILE_TOKENS = 6;  // what kernels for many tokens work on at once
constexpr int64_t LEAST_PRODUCTS = 1 << 20;         // what a part multiplies at least: some 4 microseconds
constexpr int64_t LONG_PRODUCTS = 32 << 20;         // from about 100 microseconds on it is worth waking threads
constexpr int64_t PARTS_A_THREAD = 6;
constexpr int64_t LEAST_TOKENS = 96;                // a part with fewer unpacks its weights for too little
constexpr size_t BLOCK_BYTES = 1 << 20;             // activations that are quantised before they are used: they stay in the cache

thread_local Scratch activations_scratch;

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

size_t token_bytes(int kind, size_t x_stride) { return x_stride * (is_float(kind) ? sizeof(float) : sizeof(Activations)); }

// A product that adds, of kernels that don't.
void add_rows(RowsFunction rows_function, const uint8_t* weight, size_t bytes, int64_t rows, int64_t columns, const void* x,
              size_t x_bytes, size_t x_stride, int64_t tokens, float* out, size_t out_stride) {
    constexpr int64_t ROWS = 32, TOKENS = 32;
    float made[ROWS * TOKENS];
    for (int64_t r = 0; r < rows; r += ROWS)
        for (int64_t t = 0; t < tokens; t += TOKENS) {
            const int64_t some_rows = std::min(ROWS, rows - r), some = std::min(TOKENS, tokens - t);
            const uint8_t* from = static_cast<const uint8_t*>(x) + size_t(t) * x_bytes;
            rows_function(weight + size_t(r) * bytes, bytes, some_rows, columns, from, x_stride, some, made, ROWS);
            for (int64_t i = 0; i < some; i++)
                for (int64_t j = 0; j < some_rows; j++) out[size_t(t + i) * out_stride + r + j] += made[i * ROWS + j];
        }
}

}  // namespace

bool has_product(int kind) { return kernels().product[kind] != nullptr; }

void quantize_tokens(const void* x, bool bfloat16, int64_t tokens, int64_t columns, Activations* out, int threads) {
    const Kernels& isa = kernels();
    const int64_t blocks = activation_blocks(columns), together = std::max<int64_t>(1, (16 << 10) / columns);
    share_out((tokens + together - 1) / together, threads, tokens * columns >= LONG_PRODUCTS / 64, [&](int64_t part) {
        for (int64_t t = part * together; t < std::min(tokens, (part + 1) * together); t++) {
            if (!bfloat16) {
                isa.quantize(static_cast<const float*>(x) + t * columns, columns, out + t * blocks);
                continue;
            }
            float wide[1024];
            for (int64_t c = 0; c < columns; c += 1024) {
                const int64_t some = std::min<int64_t>(1024, columns - c);
                isa.widen(static_cast<const uint16_t*>(x) + t * columns + c, some, wide);
                isa.quantize(wide, some, out + t * blocks + c / 256);
            }
        }
    });
}

void product(const Matrix& weight, const void* x, size_t x_stride, int64_t tokens, float* out, size_t out_stride, bool add,
             int64_t first_row, int64_t rows, int64_t many) {
    const Kernels& isa = kernels();
    const auto bytes = size_t(row_bytes(weight));
    const uint8_t* data = weight.data + size_t(first_row) * bytes;
    if (tokens >= many && isa.product[weight.kind] != nullptr)
        isa.product[weight.kind](data, bytes, rows, weight.columns, static_cast<const Activations*>(x), x_stride, tokens,
                                 out + first_row, out_stride, add);
    else if (add)
        add_rows(isa.rows[weight.kind], data, bytes, rows, weight.columns, x, token_bytes(weight.kind, x_stride), x_stride, tokens,
                 out + first_row, out_stride);
    else
        isa.rows[weight.kind](data, bytes, rows, weight.columns, x, x_stride, tokens, out + first_row, out_stride);
}

void shared_product(const Matrix& weight, const void* x, size_t x_stride, int64_t tokens, float* out, size_t out_stride, bool add,
                    int threads) {
    const int64_t work = weight.rows * weight.columns * tokens, most = std::max<int64_t>(1, work / LEAST_PRODUCTS);
    const int64_t wanted = threads <= 1 ? 1 : std::min(threads * PARTS_A_THREAD, most);
    const int64_t step = up_to((weight.rows + wanted - 1) / wanted, TILE_ROWS), row_parts = (weight.rows + step - 1) / step;
    // where there are too few rows for all threads, tokens are divided too
    const int64_t token_parts = std::clamp<int64_t>(wanted / row_parts, 1, std::max<int64_t>(1, tokens / LEAST_TOKENS));
    const int64_t together = up_to((tokens + token_parts - 1) / token_parts, TILE_TOKENS);
    const size_t x_bytes = token_bytes(weight.kind, x_stride);
    share_out(row_parts * ((tokens + together - 1) / together), threads, work >= LONG_PRODUCTS, [&](int64_t part) {
        const int64_t row = part % row_parts * step, token = part / row_parts * together;
        product(weight, static_cast<const uint8_t*>(x) + size_t(token) * x_bytes, x_stride, std::min(together, tokens - token),
                out + size_t(token) * out_stride, out_stride, add, row, std::min(step, weight.rows - row));
    });
}

bool linear_many(const Matrix& weight, const void* x, bool bfloat16, int64_t tokens, float* out, int64_t out_stride, int threads) {
    const auto stride = size_t(activation_blocks(weight.columns));
    const auto fitting = int64_t(BLOCK_BYTES / (stride * sizeof(Activations))) / TILE_TOKENS * TILE_TOKENS;
    const int64_t at_most = std::max(LEAST_TOKENS, fitting), blocks = (tokens + at_most - 1) / at_most;
    const int64_t step = up_to((tokens + blocks - 1) / blocks, TILE_TOKENS);
    const size_t count = size_t(std::min(tokens, step)) * stride;
    if (!activations_scratch.reset(Scratch::room<Activations>(count))) return false;
    auto* quantized = activations_scratch.take<Activations>(count);
    for (int64_t t = 0; t < tokens; t += step) {
        const int64_t some = std::min(step, tokens - t);
        const auto* from = static_cast<const uint8_t*>(x) + size_t(t * weight.columns) * (bfloat16 ? 2 : 4);
        quantize_tokens(from, bfloat16, some, weight.columns, quantized, threads);
        shared_product(weight, quantized, stride, some, out + t * out_stride, size_t(out_stride), false, threads);
    }
    return true;
}

}  // namespace ktopt
