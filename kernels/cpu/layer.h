// A whole decoder layer in one call: norms, products, rotation, the cache, attention, and a dense or a routed MLP.
#pragma once

#include <memory>

#include "bundle.h"
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

// down(activation(gate) * up). `gate_up` gives the gate's numbers, then up's.
struct Mlp {
    int activation = 0;
    int64_t intermediate = 0;
    Bundle gate_up, down;
};

// x + after_attention(attention(before_attention(x))), and the same with the MLP.
struct Layer {
    int64_t hidden = 0;
    Norm before_attention, after_attention, before_mlp, after_mlp;
    Attention attention;
    Mlp mlp;
};

// A cache of keys and values: (batch, kv_heads, capacity, head_dim) of kind F32, F16 or BF16, where `past` tokens of each sequence
// stand already.
struct KeyValueCache {
    int kind;
    uint8_t *keys, *values;
    int64_t capacity, past;
};

// What a layer is run on. x (batch, tokens, hidden) is read and written. cos and sin (batch or 1, tokens, rotary_dim).
// starts (batch): the first token of each sequence that is no padding, or null.
struct Run {
    float* x;
    int64_t batch, tokens;
    const float *cos, *sin;
    bool one_rotation;  // cos and sin are the same for each sequence
    KeyValueCache cache;
    const int64_t* starts;
    int threads;
};

enum class Outcome { done, no_memory, beyond_float16 };

// Runs the layer and leaves the tokens' keys and values in the cache, from `past` on. After anything but `done` x is spoiled.
Outcome run(const Layer& layer, const Run& run);

}  // namespace ktopt
