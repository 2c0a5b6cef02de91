// The inner code of a prefill's attention, which each instruction set compiles for itself. A tile is a few registers of queries,
// one a lane, so that a softmax over keys never crosses lanes: scores lie (key, query) and sums of values (dimension, query).
//
// Both products, of keys with queries and of values with the weights that the scores became, are one loop: STEPS rows, an element
// of each in all lanes, times the tile's lanes.
#pragma once

#include <cmath>
#include <iterator>

#include "attention.h"
#include "attention_operands.h"

namespace ktopt {
namespace {
namespace prefill {

using Floats = Lanes::Floats;
constexpr int STEPS = Lanes::STEPS, ROWS = TILE_VECTORS * Lanes::COUNT, DEPTH = Operand::DEPTH;
constexpr float LOG2_E = 1.44269504f;

// Scratch memory, handed out piece by piece.
struct Memory {
    float* next;
    float* take(int64_t count) {
        float* piece = next;
        next += count;
        return piece;
    }
};

// ROWS queries and what is known of them so far.
struct Tile {
    float *query;    // (key_dim / DEPTH, ROWS) elements, times scale and log2(e): weights are powers of 2
    float *sums;     // (value_dim, ROWS)
    float *largest, *total;  // of scores, and of weights
    int32_t *low, *high;     // the first and last key that a query sees
    int32_t first_low, last_low, first_high, last_high;
    int vectors;     // that hold queries
};

// A block of keys and values as elements.
struct Block {
    int64_t begin, count;  // keys of the cache
    const uint8_t* keys;
    int64_t key_bytes;  // from a key to the next
    const float* values;
};

// sums[i][v] += the sum over e < count of element e of row i times vector v of x[e]. A row's elements are `step` bytes apart.
template <int V>
__attribute__((always_inline)) inline void products(const uint8_t* const (&rows)[STEPS], size_t step, const float* x, int64_t count,
                                                    Floats (&sums)[STEPS][V]) {
    size_t at = 0;
    for (int64_t e = 0; e < count; e++, at += step, x += ROWS) {
        Floats lanes[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) lanes[v] = Lanes::load(x + v * Lanes::COUNT);
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[i][v] = Operand::dot(sums[i][v], lanes[v], rows[i] + at);
    }
}

// Scores of the block's keys [from, to), `from` a multiple of STEPS, and their maxima. Keys that a query doesn't see score -inf,
// and so do those that fill up the last STEPS.
template <int V>
inline void score(const Tile& tile, const Block& block, int64_t elements, int64_t from, int64_t to, float* scores, float* maxima) {
    Floats best[V];
    for (int v = 0; v < V; v++) best[v] = Lanes::load(tile.largest + v * Lanes::COUNT);
    for (int64_t j = from; j < to; j += STEPS) {
        const uint8_t* rows[STEPS];
        Floats sums[STEPS][V];
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++) {
            const int64_t key = j + i < block.count ? j + i : block.count - 1;
            rows[i] = block.keys + key * block.key_bytes;
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[i][v] = Lanes::zero();
        }
        products<V>(rows, sizeof(float), tile.query, elements, sums);
        const auto key = int32_t(block.begin + j);
        if (key < tile.last_low || key + STEPS - 1 > tile.first_high) {
#pragma GCC unroll 8
            for (int i = 0; i < STEPS; i++)
#pragma GCC unroll 4
                for (int v = 0; v < V; v++)
                    sums[i][v] = Lanes::masked(sums[i][v], key + i, tile.low + v * Lanes::COUNT, tile.high + v * Lanes::COUNT);
        }
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                best[v] = Lanes::larger(sums[i][v], best[v]);
                Lanes::store(scores + (j + i) * ROWS + v * Lanes::COUNT, sums[i][v]);
            }
    }
    for (int v = 0; v < V; v++) Lanes::store(maxima + v * Lanes::COUNT, best[v]);
}

// 2^(score - largest), 1 of equal ones and 0 of what lies 127 apart or more, both exactly. NaN stays NaN.
inline Floats weight(Floats score, Floats largest) {
    const Floats x = Lanes::larger(Lanes::all(-127.0f), Lanes::subtract(score, largest)), shift = Lanes::all(12582912.0f);
    const Floats n = Lanes::add(x, shift), rest = Lanes::subtract(x, Lanes::subtract(n, shift));  // n's low bits: x rounded
    Floats power = Lanes::all(Operand::POWER[0]);
#pragma GCC unroll 8
    for (size_t i = 1; i < std::size(Operand::POWER); i++) power = Lanes::multiply_add(power, rest, Lanes::all(Operand::POWER[i]));
    return Lanes::scaled(power, n);
}

// Scores of keys [from, to) become weights, in place, DEPTH keys to an element at row key / DEPTH. `maxima` become what the sums so
// far are to be multiplied by.
template <int V>
inline void soften(const Tile& tile, int64_t from, int64_t to, float* scores, float* maxima) {
    for (int v = 0; v < V; v++) {
        const int at = v * Lanes::COUNT;
        const Floats largest = Lanes::load(maxima + at), shrink = weight(Lanes::load(tile.largest + at), largest);
        Floats total = Lanes::multiply(Lanes::load(tile.total + at), shrink);
        for (int64_t j = from; j < to; j += DEPTH) {
            Floats weights[DEPTH];
#pragma GCC unroll 2
            for (int i = 0; i < DEPTH; i++) {
                weights[i] = weight(Lanes::load(scores + (j + i) * ROWS + at), largest);
                total = Lanes::add(total, weights[i]);
            }
            Lanes::store(scores + j / DEPTH * ROWS + at, Operand::joined(weights));
        }
        Lanes::store(tile.total + at, total);
        Lanes::store(tile.largest + at, largest);
        Lanes::store(maxima + at, shrink);
    }
}

// sums = sums * shrink + values of keys [from, to) times their weights.
template <int V>
inline void gather(const Tile& tile, const Block& block, int64_t dim, int64_t from, int64_t to, const float* weights,
                   const float* shrink) {
    const int64_t element = from / DEPTH, count = (to + DEPTH - 1) / DEPTH - element;
    for (int64_t d = 0; d < dim; d += STEPS) {
        const uint8_t* rows[STEPS];
        Floats sums[STEPS][V];
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++) {
            rows[i] = reinterpret_cast<const uint8_t*>(block.values + element * dim + d + i);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++)
                sums[i][v] = Lanes::multiply(Lanes::load(tile.sums + (d + i) * ROWS + v * Lanes::COUNT),
                                             Lanes::load(shrink + v * Lanes::COUNT));
        }
        products<V>(rows, size_t(dim) * sizeof(float), weights + element * ROWS, count, sums);
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) Lanes::store(tile.sums + (d + i) * ROWS + v * Lanes::COUNT, sums[i][v]);
    }
}

template <int V>
void meet(const Tile& tile, const Block& block, const AttentionShape& shape, int64_t from, int64_t to, float* scores,
          float* maxima) {
    score<V>(tile, block, shape.key_dim / DEPTH, from, to, scores, maxima);
    soften<V>(tile, from, to, scores, maxima);
    gather<V>(tile, block, shape.value_dim, from, to, scores, maxima);
}

// Rows of numbers or elements to columns: in (rows, in_stride) to out (columns, out_stride).
inline void transpose(const float* in, int64_t in_stride, int64_t rows, int64_t columns, float* out, int64_t out_stride) {
    constexpr int N = Lanes::COUNT;
    int64_t c = 0;
    for (; c + N <= columns; c += N)
        for (int64_t r = 0; r < rows; r += N)
            Lanes::transpose(in + r * in_stride + c, size_t(in_stride), out + c * out_stride + r, size_t(out_stride));
    for (; c < columns; c++)
        for (int64_t r = 0; r < rows; r++) out[c * out_stride + r] = in[r * in_stride + c];
}

// The tile of rows from `begin` on; rows past the part's end are the last once more.
inline Tile begin_tile(const PrefillPart& part, int64_t begin, Memory& memory, float* rows) {
    const AttentionShape& shape = *part.shape;
    const int64_t elements = shape.key_dim / DEPTH;
    Tile tile = {memory.take(ROWS * shape.key_dim), memory.take(ROWS * shape.value_dim), memory.take(ROWS), memory.take(ROWS),
                 reinterpret_cast<int32_t*>(memory.take(ROWS)), reinterpret_cast<int32_t*>(memory.take(ROWS)), 0, 0, 0, 0, 0};
    for (int64_t i = 0; i < ROWS; i++) {
        const int64_t r = begin + i < part.end ? begin + i : part.end - 1, t = r / part.group, position = part.first + t;
        const bool causal = shape.end == CAUSAL;
        const int64_t oldest = !causal || shape.window == 0 || shape.window > position ? 0 : position - shape.window + 1;
        tile.low[i] = int32_t(oldest > part.start ? oldest : part.start);
        tile.high[i] = int32_t(causal ? position : shape.end - 1);
        tile.largest[i] = -FLT_MAX;
        tile.total[i] = 0;
        Operand::query(part.q + t * part.q_stride + r % part.group * shape.key_dim, shape.key_dim, shape.scale * LOG2_E,
                       rows + i * elements);
    }
    transpose(rows, elements, ROWS, elements, tile.query, ROWS);
    std::memset(tile.sums, 0, size_t(ROWS * shape.value_dim) * sizeof(float));
    tile.first_low = tile.low[0];
    tile.last_low = tile.low[ROWS - 1];
    tile.first_high = tile.high[0];
    tile.last_high = tile.high[ROWS - 1];
    const int64_t left = part.end - begin;
    tile.vectors = left < ROWS ? int((left + Lanes::COUNT - 1) / Lanes::COUNT) : TILE_VECTORS;
    return tile;
}

// The natural logarithm of each query's sum of exponentials; its weights are powers of 2.
inline void write_log_sums(const PrefillPart& part, int64_t begin, const Tile& tile) {
    constexpr float LN_2 = 0.693147181f;
    for (int64_t i = 0; i < ROWS && begin + i < part.end; i++) {
        const int64_t t = (begin + i) / part.group, head = (begin + i) % part.group;
        const float sum = tile.largest[i] * LN_2 + std::log(tile.total[i]);
        part.log_sum[t * part.shape->heads + head] = tile.low[i] > tile.high[i] ? -INFINITY : sum;
    }
}

// Divides by the weights' sum and puts the results where they belong. A query that sees no key gets zeros.
inline void finish(const PrefillPart& part, int64_t begin, const Tile& tile, float* rows) {
    const int64_t dim = part.shape->value_dim;
    if (part.log_sum != nullptr) write_log_sums(part, begin, tile);
    for (int i = 0; i < ROWS; i++) tile.total[i] = tile.low[i] > tile.high[i] ? 0.0f : 1.0f / tile.total[i];
    for (int64_t d = 0; d < dim; d++)
        for (int v = 0; v < tile.vectors; v++) {
            float* at = tile.sums + d * ROWS + v * Lanes::COUNT;
            Lanes::store(at, Lanes::multiply(Lanes::load(at), Lanes::load(tile.total + v * Lanes::COUNT)));
        }
    transpose(tile.sums, ROWS, dim / Lanes::COUNT * Lanes::COUNT, tile.vectors * Lanes::COUNT, rows, dim);
    for (int64_t i = 0; i < ROWS && begin + i < part.end; i++) {
        for (int64_t d = dim / Lanes::COUNT * Lanes::COUNT; d < dim; d++) rows[i * dim + d] = tile.sums[d * ROWS + i];
        const int64_t t = (begin + i) / part.group, head = (begin + i) % part.group;
        std::memcpy(part.out + t * part.out_stride + head * dim, rows + i * dim, size_t(dim) * sizeof(float));
    }
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Keys [begin + from, begin + count) and their values; those before are left out.
inline Block block_of(const PrefillPart& part, int64_t begin, int64_t from, int64_t count, float* keys, float* values) {
    const AttentionShape& shape = *part.shape;
    const int64_t bytes = layout_of(part.kind).bytes, key_bytes = shape.key_dim * bytes, value_bytes = shape.value_dim * bytes;
    const Paging& paging = part.paging;
    Block block = {begin, count, part.keys + begin * key_bytes, key_bytes, values};
    const bool native = part.kind == Operand::NATIVE, laid_out = !native || paging.pages != nullptr;
    if (laid_out) {
        block.keys = reinterpret_cast<const uint8_t*>(keys);
        block.key_bytes = shape.key_dim / DEPTH * int64_t(sizeof(float));
    }
    for (int64_t at = from, rows; at < count; at += rows) {  // tokens that lie together
        const int64_t token = begin + at;
        rows = count - at;
        const uint8_t *from_keys = part.keys + token * key_bytes, *from_values = part.values + token * value_bytes;
        if (paging.pages != nullptr) {
            const int64_t page = paging.pages[token / paging.page_tokens], place = token % paging.page_tokens;
            rows = smaller(rows, paging.page_tokens - place);
            from_keys = part.keys + page * paging.key_bytes + place * key_bytes;
            from_values = part.values + page * paging.value_bytes + place * value_bytes;
        }
        float* to = keys + at / DEPTH * shape.key_dim;
        if (laid_out && native) std::memcpy(to, from_keys, size_t(rows * key_bytes));
        if (!native) Operand::keys(part.kind, from_keys, rows, shape.key_dim, to);
        Operand::values(part.kind, from_values, rows, shape.value_dim, values + at / DEPTH * shape.value_dim);
    }
    return block;
}

// Keys of the block that are before `low`, down to a multiple of STEPS and of 2.
inline int64_t skipped(int64_t begin, int64_t low) { return low > begin ? (low - begin) / STEPS * STEPS : 0; }

}  // namespace prefill

// Blocks begin at multiples of KEY_BLOCK after `start`, and a tile takes of them what it sees, whichever part it is in: so the
// result doesn't depend on how the work is shared out.
void prefill_part(const PrefillPart& part) {
    using namespace prefill;
    const AttentionShape& shape = *part.shape;
    const int64_t wider = shape.key_dim > shape.value_dim ? shape.key_dim : shape.value_dim;
    Memory memory = {reinterpret_cast<float*>(part.scratch)};
    float *rows = memory.take(ROWS * wider), *scores = memory.take(ROWS * KEY_BLOCK), *maxima = memory.take(ROWS);
    float *keys = memory.take(KEY_BLOCK * shape.key_dim), *values = memory.take(KEY_BLOCK * shape.value_dim);
    Tile tiles[MOST_TILES];
    int count = 0;
    for (int64_t begin = part.begin; begin < part.end; begin += ROWS) tiles[count++] = begin_tile(part, begin, memory, rows);
    const int64_t low = tiles[0].first_low, high = tiles[count - 1].last_high + 1;
    for (int64_t begin = low - (low - part.start) % KEY_BLOCK; begin < high; begin += KEY_BLOCK) {
        const Block block = block_of(part, begin, skipped(begin, low), smaller(KEY_BLOCK, high - begin), keys, values);
        for (int i = 0; i < count; i++) {
            const int64_t from = skipped(begin, tiles[i].first_low), to = smaller(KEY_BLOCK, tiles[i].last_high + 1 - begin);
            if (from >= to) continue;
            const auto function = tiles[i].vectors == 1 ? meet<1> : tiles[i].vectors == 2 ? meet<2> : meet<3>;
            function(tiles[i], block, shape, from, to, scores, maxima);
        }
    }
    for (int i = 0; i < count; i++) finish(part, part.begin + i * ROWS, tiles[i], rows);
}

}  // namespace
}  // namespace ktopt
