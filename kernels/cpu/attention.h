// Attention of many queries to a cache of keys and values, as a prefill needs it: blocks of queries times blocks of keys, with the
// softmax kept up as the keys go by (FlashAttention), so that no more than a tile of scores is ever in memory.
#pragma once

#include "types.h"

namespace ktopt {

// Where tokens stand that don't lie together: token t of a head at place t % page_tokens of page pages[t / page_tokens], and a page's
// keys, of all heads, `key_bytes` after those of the page before it. Pages have an even number of tokens. Without `pages` all tokens
// lie one after another.
struct Paging {
    const int32_t* pages = nullptr;
    int64_t page_tokens = 0, key_bytes = 0, value_bytes = 0;
};

// Keys and values as a cache holds them: for each KV head its tokens, each token's numbers one after the other, of kind F32, F16 or
// BF16. The next head's tokens stand so many bytes on.
struct KeyValues {
    int kind;
    const uint8_t *keys, *values;
    int64_t key_head_bytes, value_head_bytes;
    Paging paging{};
};

constexpr int64_t CAUSAL = -1;

// Query head h reads KV head h / (heads / kv_heads).
struct AttentionShape {
    int64_t heads, kv_heads, key_dim, value_dim;
    float scale;     // of the scores
    int64_t window;  // how many keys a query sees at most, its own included; 0 for all
    int64_t end = CAUSAL;  // every query sees keys [start, end); or CAUSAL: up to its own
};

// Why queries at positions first to first + tokens - 1 can't be computed, or null.
const char* refuses(const AttentionShape& shape, int64_t kind, int64_t tokens, int64_t first, int64_t start);

// Query t stands at position first + t and sees the keys from max(start, first + t - window + 1) to first + t, or where the shape has
// an `end` those from start to end. One that sees none gives zeros. q[t * q_stride + h * key_dim + d], out[t * out_stride + h *
// value_dim + d]; log_sum[t * heads + h], unless null, is the natural logarithm of the softmax's sum, -inf for one that sees none.
//
// Where the CPU multiplies bfloat16, and the cache isn't float32, queries, keys and the weights of values are rounded to it; sums are
// float32 everywhere. The result doesn't depend on the number of threads. Answers false where there is no memory for a thread's tiles.
bool prefill_attention(const AttentionShape& shape, const KeyValues& cache, const float* q, int64_t q_stride, int64_t tokens,
                       int64_t first, int64_t start, float* out, int64_t out_stride, int threads, float* log_sum = nullptr);

constexpr int TILE_VECTORS = 3;  // registers that a tile's queries fill
constexpr int MOST_TILES = 4;    // of a part: its keys and values are laid out once for all of them
constexpr int KEY_BLOCK = 128;   // keys that a tile meets at a time

// One thread's work: rows [begin, end) of the queries of one KV head. Row r is the head r % group of the query r / group.
struct PrefillPart {
    const AttentionShape* shape;
    int kind;
    const uint8_t *keys, *values;  // of this KV head
    const float* q;                // of this KV head's first query head, at query 0
    float* out;
    int64_t q_stride, out_stride, group, first, start, begin, end;
    uint8_t* scratch;  // prefill_scratch bytes at a multiple of 64
    float* log_sum;    // of this KV head's first query head, at query 0; or null
    Paging paging;
};

// Bytes that a part of so many tiles works in. A tile is `rows` queries.
constexpr size_t prefill_scratch(int64_t key_dim, int64_t value_dim, int64_t rows, int64_t tiles) {
    const int64_t wider = key_dim > value_dim ? key_dim : value_dim;
    const int64_t both = key_dim + value_dim;
    return size_t(4 * (tiles * rows * (both + 4) + rows * (wider + KEY_BLOCK + 1) + KEY_BLOCK * both));
}

}  // namespace ktopt
