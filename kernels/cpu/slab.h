// Some tokens on their way through a decoder layer: those of one sequence, or one of each.
#pragma once

#include <algorithm>
#include <vector>

#include "layer.h"
#include "pool.h"

namespace ktopt {

constexpr int64_t SERIAL_TOKENS = 4;  // so few are normed and rotated on the calling thread: handing over takes longer
constexpr int64_t TOKENS_A_PART = 8;

// f(token) for all tokens, shared out where it pays.
template <class Function>
void each_token(int64_t tokens, int threads, Function f) {
    if (tokens <= SERIAL_TOKENS || threads <= 1) {
        for (int64_t t = 0; t < tokens; t++) f(t);
        return;
    }
    share_out((tokens + TOKENS_A_PART - 1) / TOKENS_A_PART, threads, tokens >= 8 * TOKENS_A_PART, [&](int64_t part) {
        const int64_t end = std::min(tokens, (part + 1) * TOKENS_A_PART);
        for (int64_t t = part * TOKENS_A_PART; t < end; t++) f(t);
    });
}

// Rows of a slab that are one sequence's: row `row` of the slab is its token `position`. `whole` is how many new tokens the
// sequence has in the run.
struct Span {
    int64_t sequence, row, count, position, whole;
};

class Slab {
public:
    // `count` tokens from `token` on of one sequence; or where the run has one token of each, `count` sequences from `sequence` on.
    Slab(const Layer& layer, const Run& run, int64_t sequence, int64_t token, int64_t count);

    Outcome go();

private:
    bool reserve();
    void grouped_attention();   // slab_grouped.cpp
    void add_attended(const float* attended, int64_t width);
    void latent_attention();    // slab_latent.cpp
    void dense_mlp();
    void routed_mlp();

    Input input(const float* x, int64_t width) const { return {x, width, quantized_, activation_blocks(width)}; }
    Input normed(const Norm& norm, const Bundle& bundle);
    // What `bundle` reads of token t's x, of `width` numbers.
    void prepare(const Bundle& bundle, const float* x, int64_t width, int64_t t) {
        if (bundle.quantized()) isa_.quantize(x + t * width, width, quantized_ + t * activation_blocks(width));
    }
    int64_t many() const { return run_.ragged != nullptr && run_.ragged->steady ? ANY_TOKENS : MANY_TOKENS; }
    // x += bundle(in), normed first where there is a norm.
    void residual(const Bundle& bundle, const Input& in, const Norm& norm);
    void add_normed(const Norm& norm);

    // The slab's first token among all of the run.
    int64_t row() const { return sequence_ * run_.tokens + token_; }
    int64_t sequence_of(int64_t t) const { return run_.tokens == 1 ? sequence_ + t : sequence_; }
    int64_t token_of(int64_t t) const { return run_.tokens == 1 ? 0 : token_ + t; }
    // Where token t's cos and sin begin.
    int64_t rotation(int64_t t, int64_t numbers) const {
        return ((run_.one_rotation ? 0 : sequence_of(t) * run_.tokens) + token_of(t)) * numbers;
    }

    // slab_paged.cpp: the slab's rows of each sequence, where they go, and their attention
    void find_spans();
    int64_t slot(int64_t t) const;
    bool attend_paged(const float* q, float* out);
    bool decode_paged(const Span* spans, int64_t count, const float* q, float* out);

    int cache_kind() const { return run_.ragged != nullptr ? run_.pages->kind : run_.cache->kind; }
    int64_t head_bytes() const;
    int64_t place(int64_t t) const;
    bool remember(float* qkv, int64_t t);
    void rotated(float* head, const Norm& norm, int64_t t);
    struct Sight sight(int64_t t) const;
    bool attend(const float* q, float* out);
    bool remember_latent(float* made, int64_t t);

    const Layer& layer_;
    const Run& run_;
    const Kernels& isa_;
    const int64_t sequence_, token_, count_;
    float* x_;
    float *normed_ = nullptr, *made_ = nullptr, *results_ = nullptr;
    Activations* quantized_ = nullptr;
    Outcome outcome_ = Outcome::done;
    std::vector<Span> spans_;  // of a ragged run
    std::vector<int32_t> piece_of_;
};

}  // namespace ktopt
