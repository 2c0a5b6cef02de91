// Matrices that multiply the same input, such as a layer's q, k and v: one pass over all their rows, shared out to threads.
#pragma once

#include <vector>

#include "gemm.h"

namespace ktopt {

// One matrix of a bundle: row r gives number `at + r` of the result.
struct Product {
    Matrix weight;
    int64_t at;
    const float* bias;  // or null
};

// Vectors of floats, `stride` apart, and the same quantised, `quantized_stride` blocks apart. Bundles read what their types want.
struct Input {
    const float* x;
    int64_t stride;
    const Activations* quantized;
    int64_t quantized_stride;
};

class Bundle {
public:
    static constexpr size_t MOST_PRODUCTS = 16;

    void add(const Product& product);
    bool empty() const { return products_.empty(); }
    // Numbers of a result.
    int64_t width() const { return width_; }
    int64_t columns() const { return products_.front().weight.columns; }
    bool quantized() const { return quantized_; }
    const std::vector<Product>& products() const { return products_; }

    // out[t * out_stride + i] = result i of input t, or += where `sum`. `many` is as gemm.h's product takes it.
    void run(const Input& in, int64_t tokens, float* out, int64_t out_stride, bool sum, int threads,
             int64_t many = MANY_TOKENS) const;

private:
    struct Split;
    void part(const Split& split, int64_t number, const Input& in, int64_t tokens, float* out, int64_t out_stride, bool sum,
              int64_t many) const;

    std::vector<Product> products_;
    int64_t width_ = 0, bytes_ = 0;
    bool quantized_ = false;
};

}  // namespace ktopt
