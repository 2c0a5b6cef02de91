// Attention of one query a sequence to its cache: long caches are shared out to threads in stretches, whose results are merged.
#pragma once

#include "types.h"

namespace ktopt {

// A query's place: its sequence's keys and values, for each of kv_heads a stretch of tokens `key_head_bytes` after the last head's.
struct Sight {
    const uint8_t *keys, *values;
    int64_t tokens;  // that it sees
};

struct DecodeShape {
    int kind;
    int64_t heads, kv_heads, key_dim, value_dim;
    int64_t key_head_bytes, value_head_bytes;
    float scale;
};

// out[i * out_stride + h * value_dim + d] for `count` queries q[i * q_stride + h * key_dim + d]. False where there is no memory.
bool decode_attention(const DecodeShape& shape, const Sight* sights, int64_t count, const float* q, int64_t q_stride, float* out,
                      int64_t out_stride, int threads);

}  // namespace ktopt
