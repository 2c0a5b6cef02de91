#include "bundle.h"

#include <algorithm>

#include "pool.h"

namespace ktopt {
namespace {

constexpr int64_t LEAST_BYTES = 24 << 10;  // what a part reads at least: less takes about as long as handing it over
constexpr int PARTS_A_THREAD = 4;
constexpr int64_t ROWS_TOGETHER = 32;  // a tile of gemm.h, and two cache lines of results

}  // namespace

// The rows of all products in parts of about one size.
struct Bundle::Split {
    int64_t step[MOST_PRODUCTS], parts[MOST_PRODUCTS], all = 0;

    Split(const std::vector<Product>& products, int64_t bytes, int threads) {
        const int64_t wanted = threads <= 1 ? 1 : std::min<int64_t>(int64_t(threads) * PARTS_A_THREAD, bytes / LEAST_BYTES);
        for (size_t i = 0; i < products.size(); i++) {
            const Matrix& w = products[i].weight;
            step[i] = w.rows;
            if (wanted > 1) step[i] = (bytes / wanted / row_bytes(w) + ROWS_TOGETHER) / ROWS_TOGETHER * ROWS_TOGETHER;
            parts[i] = (w.rows + step[i] - 1) / step[i];
            all += parts[i];
        }
    }
};

void Bundle::add(const Product& product) {
    products_.push_back(product);
    width_ = std::max(width_, product.at + product.weight.rows);
    bytes_ += product.weight.rows * row_bytes(product.weight);
    quantized_ = quantized_ || !is_float(product.weight.kind);
}

void Bundle::run(const Input& in, int64_t tokens, float* out, int64_t out_stride, bool sum, int threads, int64_t many) const {
    const int64_t work = bytes_ * (1 + tokens / 2);
    const Split split(products_, work, threads);
    share_out(split.all, threads, work >= LONG_BYTES,
              [&](int64_t number) { part(split, number, in, tokens, out, out_stride, sum, many); });
}

void Bundle::part(const Split& split, int64_t number, const Input& in, int64_t tokens, float* out, int64_t out_stride,
                  bool sum, int64_t many) const {
    size_t i = 0;
    for (; number >= split.parts[i]; i++) number -= split.parts[i];
    const Product& product = products_[i];
    const Matrix& w = product.weight;
    const int64_t first = number * split.step[i], rows = std::min(split.step[i], w.rows - first);
    const bool plain = is_float(w.kind);
    const void* operand = plain ? static_cast<const void*>(in.x) : in.quantized;
    ktopt::product(w, operand, size_t(plain ? in.stride : in.quantized_stride), tokens, out + product.at, size_t(out_stride), sum,
                   first, rows, many);
    if (product.bias == nullptr) return;
    for (int64_t t = 0; t < tokens; t++) kernels().add(product.bias + first, rows, out + product.at + first + t * out_stride);
}

}  // namespace ktopt
