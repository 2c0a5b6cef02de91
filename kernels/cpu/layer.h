// A whole decoder layer in one call: norms, products, rotation, the cache, attention, and a dense or a routed MLP.
#pragma once

#include <memory>

#include "bundle.h"
#include "experts.h"
#include "mla.h"
#include "router.h"

namespace ktopt {

// x / rms(x) * weight; no norm where there is no weight.
struct Norm {
    const float* weight = nullptr;
    float eps = 0;
};

// Grouped-query attention. `qkv` gives the query heads, then the key heads, then the value heads.
struct Attention {
    int64_t heads = 0, kv_heads = 0, head_dim = 0, rotary_dim = 0, window = 0;
    float scale = 0;
    Norm q_norm, k_norm;  // of each head
    Bundle qkv, output;
};

// How the rotary numbers of a head are paired: the first half with the second; neighbours, of which the firsts come to stand before
// the seconds (DeepSeek-V3); neighbours that stay where they are (DeepSeek-V2).
enum Pairing : int { HALVES = 0, NEIGHBOURS_APART = 1, NEIGHBOURS = 2 };

// Multi-head latent attention, absorbed. `first` gives a low-rank query of `q_rank` numbers, to be normed and put through `second`,
// or the query itself where q_rank is 0; and after it the latent, to be normed, and the shared rotary key.
struct LatentAttention {
    LatentShape shape{};
    int64_t q_rank = 0;
    int pairing = HALVES;
    float scale = 0;
    Norm q_norm, latent_norm;
    Bundle first, second, output;
    HeadMatrices keys{}, values{};
};

// down(activation(gate) * up). `gate_up` gives the gate's numbers, then up's.
struct Mlp {
    int activation = 0;
    int64_t intermediate = 0;
    Bundle gate_up, down;
};

// Routed experts, and a shared one where `experts` has it. `products` gives a number for each expert to choose by, and after them,
// where `gated`, one whose sigmoid weights the shared expert.
struct RoutedMlp {
    Routing routing{};
    Bundle products;
    const Experts* experts = nullptr;  // null where the MLP is dense
    bool gated = false;
};

// x + after_attention(attention(before_attention(x))), and the same with the MLP. One of both attentions has heads.
struct Layer {
    int64_t hidden = 0;
    Norm before_attention, after_attention, before_mlp, after_mlp;
    Attention attention;
    LatentAttention latent;
    Mlp mlp;
    RoutedMlp routed;
};

// A cache of keys and values: (batch, kv_heads, capacity, head_dim) of kind F32, F16 or BF16, where `past` tokens of each sequence
// stand already.
struct KeyValueCache {
    int kind;
    uint8_t *keys, *values;
    int64_t capacity, past;
};

// A paged cache of latents: page pages[s * table_columns + i] holds the tokens from i * page_tokens on of sequence s, of which `past`
// stand already; the pages of the tokens to come are there, and no other sequence reads them.
struct PagedLatents {
    LatentCache cache;
    const int32_t* table;
    int64_t table_columns, past;
};

// Rows that are the new tokens of several sequences, one sequence's after another's: those of sequence s are rows [firsts[s],
// firsts[s + 1]), and `pasts[s]` tokens of it stand in the cache already. Page tables[s][i] holds its tokens from i * page_tokens on;
// the pages of the new ones are there, and no other sequence reads them. Where `steady`, a row's result has the same bits whatever
// other rows there are, and one or two rows take longer.
struct Ragged {
    int64_t sequences;
    const int64_t *firsts, *pasts;
    const int32_t* const* tables;
    int64_t page_tokens;
    bool steady;
};

// A paged cache of keys and values, each (pages, kv_heads, page_tokens, head_dim) of kind F32, F16 or BF16.
struct PagedKeyValues {
    int kind;
    uint8_t *keys, *values;
    int64_t pages;
};

// What a layer is run on. x (batch, tokens, hidden) is read and written. cos and sin (batch or 1, tokens, rotary numbers).
// starts (batch): the first token of each sequence that is no padding, or null. One of both caches is there; where neither is, the
// layer's MLP runs alone.
//
// With `ragged` the batch is 1, its tokens are the rows of several sequences, cos and sin are those rows', and the cache is paged:
// `pages`, or `latents`, whose own table and past don't count then.
//
// Grouped-query attention may be computed elsewhere: with `queries` (batch, tokens, heads * head_dim) a run writes them, normed and
// rotated, and the cache, and ends there; x stays as it was. With `attended`, of the same shape, a run begins with what came of it.
struct Run {
    float* x;
    int64_t batch, tokens;
    const float *cos, *sin;
    bool one_rotation;  // cos and sin are the same for each sequence
    const KeyValueCache* cache;
    const PagedLatents* latents;
    const int64_t* starts;
    int threads;
    float* queries = nullptr;
    const float* attended = nullptr;
    const Ragged* ragged = nullptr;
    const PagedKeyValues* pages = nullptr;
};

enum class Outcome { done, no_memory, beyond_float16 };

// Runs the layer and leaves the tokens' keys and values, or latents, in the cache, from `past` on. After anything but `done` x is
// spoiled.
Outcome run(const Layer& layer, const Run& run);

}  // namespace ktopt
