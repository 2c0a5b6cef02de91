// Multi-head latent attention of a few query rows over a latent cache, with kv_b_proj absorbed: what decoding takes.
//
// The cache holds for each token `latent` numbers c (normed) and after them `rope` numbers k_pe (rotated). A head's query
// [q_nope, q_pe] meets it as q' = q_nope W_UK; score = (q' c + q_pe k_pe) * scale; result = (softmax(scores) c) W_UV^T.
// Each latent is read once for all heads, and for all rows that share their pages.
#pragma once

#include "types.h"

namespace ktopt {

struct LatentShape {
    int64_t heads, nope, rope, latent, value;
    int64_t width() const { return latent + rope; }
};

// Where the latents are: `pages` pages of `page_tokens` tokens each, one token after another, in numbers of `kind`.
struct LatentCache {
    int kind;
    const uint8_t* data;
    int64_t pages, page_tokens;
};

// One query: token t of its sequence is in page pages[t / page_tokens] (page t / page_tokens itself where `pages` is null), and it
// attends to tokens [start, end). Rows one after another whose `pages` are the same pointer share their reads.
struct LatentRow {
    const int32_t* pages;
    int64_t start, end;
};

// A matrix for each head: `rows` x `columns` each, head_bytes apart, in blocks of `kind`. Vectors meet its rows, or where it is
// `transposed` its columns.
struct HeadMatrices {
    int kind;
    const uint8_t* data;
    int64_t rows, columns, head_bytes;
    bool transposed = false;
};

// Why this can't be computed, or null. The cache's numbers must be whole blocks, its page numbers must lie in the cache.
const char* refuses(const LatentShape& shape, const LatentCache& cache, const LatentRow* rows, int64_t count);

// The attention alone: query (count, heads, latent + rope) to out (count, heads, latent) and, unless null, log_sum (count, heads),
// the natural logarithm of the sum of exp(score * scale), -inf for a row without tokens, whose result is zero. False: no memory.
bool attend_latents(const LatentShape& shape, const LatentCache& cache, const LatentRow* rows, int64_t count, const float* query,
                    float scale, float* out, float* log_sum, int threads);

// Everything between the projections: query (count, heads, nope + rope), rotated, to out (count, heads, value). `keys` is W_UK, a
// head's (latent, nope), or (nope, latent) and transposed, as kv_b_proj has it; `values` is W_UV, (value, latent). False: no memory.
bool attend_absorbed(const LatentShape& shape, const LatentCache& cache, const LatentRow* rows, int64_t count,
                        const float* query, const HeadMatrices& keys, const HeadMatrices& values, float scale, float* out,
                        int threads);

}  // namespace ktopt
