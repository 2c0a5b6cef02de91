// Attention of few queries to long caches: of one query a sequence to its cache, or of rows of queries to segments anywhere in
// memory. What is long is shared out to threads in parts, whose results are merged.
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

// `group` query heads that share keys and values are a row, and `rows_together` rows lie one after another, the next ones a stride on.
// A row's segments are cut into parts by how much there is to share out; where `alone`, by the row's own alone, so that its result
// is the same whatever else is computed with it.
struct RowsShape {
    int64_t rows, rows_together, group, key_dim, value_dim;
    float scale;
    bool alone = false;
};

// Row r attends to segments [first[r], first[r + 1]). Its query h is at q + r / rows_together * q_stride + (r % rows_together *
// group + h) * key_dim, and so is its result; log_sum[r * group + h], unless null, is the natural logarithm of its softmax's sum. A
// row that sees no token gives zeros and -inf. False where there is no memory.
bool attend_segments(const RowsShape& shape, const Segment* segments, const int64_t* first, const float* q, int64_t q_stride,
                     float* out, int64_t out_stride, float* log_sum, int threads);

}  // namespace ktopt
