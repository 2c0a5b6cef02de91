// What blocks of a long cache are known by, and the choice of blocks (kernels/anchors.py says what is computed, and
// kernels/anchors_reference.py how it lies in memory).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktopt {

// The parts that need an instruction set, each of a few blocks: anchor_vectors.h, anchor_signs.h, anchor_int4.h, anchor_add.h,
// anchor_turn.h.
// Heads come in batches.
constexpr int HEAD_BATCH = 4;
constexpr int TOKEN_GROUP = 32;  // tokens that lie together

// One block of the sign index. tables are those of `heads` heads (at most HEAD_BATCH), table_bytes(dim) each. best: for each head
// the largest magnitude * (sum - centre) of a token, where sum is that of the table's numbers for its signs.
struct SignBlock {
    const uint8_t* signs;
    const uint16_t* magnitude;
    int64_t groups, dim;
    const uint8_t* tables;
    const float* centre;
    int heads;
    float* best;
};
constexpr size_t table_bytes(int64_t dim) { return size_t(dim) * 8; }

// One query head as the sign index meets it, turned: q.signs is about step * (sum - centre).
struct SignScale {
    float step, centre;
};

// One query head in 8 bits, turned: about codes * step; sum is that of its numbers as they were.
struct CodeScale {
    float step, sum;
};

// One block of keys in 4 bits, and `heads` query heads (at most HEAD_BATCH) in 8, each `dim` bytes. base is q.mean of each.
// For each head: the largest score of its tokens, and the sum of e^(score - largest). `room` is for heads * 32 groups floats.
struct CodeBlock {
    const uint8_t* codes;
    const uint16_t* steps;
    int64_t tokens, groups, dim;
    const int8_t* q;
    const CodeScale* scales;
    const float* base;
    int heads;
    float* room;
    const uint8_t* next_codes;  // where the next block lies, to be fetched early
    const uint16_t* next_steps;
    float *largest, *sum;
};

// One block of one row's keys, numbers of a kind F32, F16 or BF16, and where its anchors go; those that aren't wanted are null.
struct NewBlock {
    int kind;
    const uint8_t* keys;
    int64_t token_stride;  // in numbers
    int64_t tokens, groups, dim;
    float limit;  // of a number's magnitude
    uint16_t *mean, *low, *high, *steps, *magnitude;
    uint8_t *codes, *signs;
    float* room;  // 2 * dim
};

struct AnchorKernels {
    // Rows of `dim` float16 numbers times each head's q: out[h * out_stride + r].
    void (*dots)(const uint16_t* rows, int64_t count, int64_t dim, const float* q, int64_t heads, float* out, size_t out_stride);
    SignScale (*sign_table)(const float* q, int64_t dim, uint8_t* table);
    CodeScale (*query_codes)(const float* q, int64_t dim, int8_t* out);
    void (*signs)(const SignBlock& block);
    void (*codes)(const CodeBlock& block);
    // Adds each block's share of a softmax to `shares`: sum e^largest over all of that and e^rest; no sums are ones. Blocks of -inf have
    // none.
    void (*add_shares)(const float* largest, const float* sums, int64_t blocks, float rest, float* shares);
    // The largest number that at least `count` of the numbers reach, 1 <= count <= n.
    int32_t (*reached)(const int32_t* numbers, int64_t n, int64_t count);
    bool (*add)(const NewBlock& block);  // false where a number is beyond the limit, or is none
    void (*turn)(float* x, int64_t dim);  // multiplies by an orthonormal matrix, its own inverse
};

enum AnchorType : int { BLOCK_MEAN = 0, BLOCK_MAX = 1, QUEST = 2, FIXED = 3, DYNAMIC = 4, KEY_INT4 = 5, ANCHOR_TYPES = 6 };

// A layer's anchors, in memory that Python keeps: for each row, max_blocks blocks after one another. The last five are KEY_INT4's.
struct AnchorIndex {
    int type;
    int64_t each, rows, max_blocks, tokens, dim;  // each: vectors of a block in `anchors`
    uint16_t* anchors;
    uint16_t* mean;
    uint8_t* codes;
    uint16_t* steps;
    uint8_t* signs;
    uint16_t* magnitude;

    int64_t groups() const { return (tokens + TOKEN_GROUP - 1) / TOKEN_GROUP; }
    int64_t padded() const { return groups() * TOKEN_GROUP; }
};

// Why there can't be such an index, or null.
const char* refuses(const AnchorIndex& index);

// Keys of `count` new blocks in every row, as numbers of a kind; strides in numbers.
struct NewKeys {
    int kind;
    const uint8_t* keys;
    int64_t row_stride, block_stride, token_stride, first, count;
    float limit;
};

// Puts the anchors of new blocks in, of all types but FIXED and DYNAMIC. The first (row * count + block) with a number beyond the limit, -1
// where there is none, and -2 where memory is lacking.
int64_t add_anchors(const AnchorIndex& index, const NewKeys& keys, int threads);

// What blocks are chosen by: `heads` query heads of each row, (rows, heads, dim) float32. Rows choose together in groups of `shared`,
// 0 for each alone. allowed: (rows, blocks) of 0 or 1, or null. count: blocks that are wanted, negative for scores of all blocks without a
// shortlist. rest: of each head the logarithm of what its softmax sums over keys in no block (rows, heads), or null for nothing; of
// KEY_INT4 alone.
struct Choice {
    int64_t blocks;
    const float* q;
    int64_t heads;
    float scale;
    int64_t count, shared;
    const uint8_t* allowed;
    const float* rest;
    int threads;
};

// Scores of all blocks (rows, blocks), -inf where a block isn't allowed or scored. False where memory is lacking.
bool score_blocks(const AnchorIndex& index, const Choice& choice, float* out);

// The best `count` blocks of each row, ascending, into out (rows, result). The result is at most `count` and the fewest allowed blocks that a
// row has; -1 where memory is lacking.
int64_t choose_blocks(const AnchorIndex& index, const Choice& choice, int32_t* out);

}  // namespace ktopt
