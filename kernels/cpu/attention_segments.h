// Attention of a few queries to a run of segments, which may be of different kinds: keys and values are read once, in place, at the
// memory's speed, and numbers are made of them in registers. Written on simd.h's vectors; each instruction set compiles its own.
#pragma once

#include <cmath>

#include "generic.h"
#include "simd.h"

namespace ktopt {
namespace {
namespace segments {

constexpr int W = Vector::WIDTH;
constexpr int BLOCK = 128;  // tokens whose scores are held together
constexpr int64_t CACHE_AHEAD = 12 << 10;  // bytes: the CPU's own prefetching stops at each page of 4 KiB, and at a segment's end
constexpr int64_t LINE = 64;

constexpr int64_t row_bytes(int kind, int64_t dim) { return dim / layout_of(kind).elements * layout_of(kind).bytes; }

// Numbers that share a scale are made together: so many vectors.
template <int kind>
constexpr int VECTORS = is_float(kind) ? 1 : 32 / W;

// Numbers [i, i + VECTORS * W) of a row.
template <int kind>
inline void load(const uint8_t* row, int64_t i, Vector (&out)[VECTORS<kind>]) {
    if constexpr (kind == F32) {
        out[0] = Vector::load(reinterpret_cast<const float*>(row) + i);
    } else if constexpr (kind == F16) {
        out[0] = Vector::load_float16(reinterpret_cast<const uint16_t*>(row) + i);
    } else if constexpr (kind == BF16) {
        out[0] = Vector::load_bfloat16(reinterpret_cast<const uint16_t*>(row) + i);
    } else {
        const uint8_t* p = row + i / 32 * layout_of(kind).bytes;
        const Vector scale = Vector::all_float16(p);
#if defined(__AVX512F__)
        if constexpr (kind == Q4_0) {
            const __m512 steps = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
            const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2)));
            out[0] = Vector{_mm512_permutexvar_ps(both, steps)} * scale;
            out[1] = Vector{_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), steps)} * scale;
            return;
        }
#endif
        int8_t numbers[32];
        const auto* from = reinterpret_cast<const int8_t*>(p + 2);
        if constexpr (kind == Q4_0) {
            for (int j = 0; j < 16; j++) {
                numbers[j] = int8_t((p[2 + j] & 15) - 8);
                numbers[j + 16] = int8_t((p[2 + j] >> 4) - 8);
            }
            from = numbers;
        }
        for (int v = 0; v < VECTORS<kind>; v++) out[v] = Vector::load_int8(from + v * W) * scale;
    }
}

// Asks for memory in the order in which it will be read, CACHE_AHEAD bytes before.
class Ahead {
public:
    explicit Ahead(const SegmentRun& run, int64_t chunk) : run_(run), chunk_(chunk) {
        begin(false);
        passed(CACHE_AHEAD);
    }

    // So many bytes more have been read.
    void passed(int64_t bytes) {
        owed_ += bytes;
        while (owed_ > 0 && at_ != nullptr) {
            const int64_t now = owed_ < left_ ? owed_ : left_;
            int64_t asked = 0;
            for (; asked < now; asked += LINE) __builtin_prefetch(at_ + asked);
            at_ += asked;
            left_ -= asked;
            owed_ -= asked;
            if (left_ <= 0) next();
        }
    }

private:
    // The keys or values of the chunk.
    void begin(bool values) {
        if (segment_ == run_.count) {
            at_ = nullptr;
            return;
        }
        const Segment& s = run_.segments[segment_];
        const int64_t bytes = row_bytes(s.kind, values ? run_.value_dim : run_.key_dim), rest = s.tokens - token_;
        at_ = (values ? s.values : s.keys) + token_ * bytes;
        left_ = (rest < chunk_ ? rest : chunk_) * bytes;
        values_ = values;
    }

    void next() {
        const Segment& s = run_.segments[segment_];
        if (!values_ && s.values != s.keys) return begin(true);
        token_ += chunk_;
        if (token_ >= s.tokens) {
            segment_++;
            token_ = 0;
        }
        begin(false);
    }

    const SegmentRun& run_;
    const int64_t chunk_;
    const uint8_t* at_ = nullptr;
    int64_t left_ = 0, owed_ = 0, segment_ = 0, token_ = 0;
    bool values_ = false;
};

// Products of H queries with T keys; those of a query lie BLOCK apart from the next one's.
template <int kind, int H, int T>
inline void dots(const uint8_t* keys, int64_t bytes, const float* q, int64_t dim, float* out) {
    constexpr int N = VECTORS<kind>;
    Vector total[H][4];
    for (int h = 0; h < H; h++)
        for (int t = 0; t < 4; t++) total[h][t] = Vector::zero();
    for (int64_t i = 0; i < dim; i += N * W)
        for (int t = 0; t < T; t++) {
            Vector k[N];
            load<kind>(keys + t * bytes, i, k);
            for (int h = 0; h < H; h++)
                for (int n = 0; n < N; n++) total[h][t] = Vector::load(q + h * dim + i + n * W).times_plus(k[n], total[h][t]);
        }
    for (int h = 0; h < H; h++) {
        if constexpr (T == 4) {
            Vector::sums(total[h], out + h * BLOCK);
        } else {
            out[h * BLOCK] = total[h][0].sum();
        }
    }
}

// C * VECTORS vectors of `out` += weights times values, for H heads. weights lie BLOCK apart, results `stride`.
template <int kind, int H, int C>
inline void weighted(const uint8_t* values, int64_t first, int64_t bytes, int64_t tokens, const float* weights, float* out,
                     int64_t stride, Ahead* ahead) {
    constexpr int N = VECTORS<kind>, ALL = C * N;
    constexpr int64_t TOGETHER = 8;
    Vector total[H][ALL];
    for (int h = 0; h < H; h++)
        for (int c = 0; c < ALL; c++) total[h][c] = Vector::load(out + h * stride + first + c * W);
    for (int64_t start = 0; start < tokens; start += TOGETHER) {
        const int64_t end = start + TOGETHER < tokens ? start + TOGETHER : tokens;
        if (ahead != nullptr) ahead->passed((end - start) * row_bytes(kind, ALL * W));
        for (int64_t t = start; t < end; t++, values += bytes)
            for (int c = 0; c < C; c++) {
                Vector v[N];
                load<kind>(values, first + c * N * W, v);
                for (int h = 0; h < H; h++)
                    for (int n = 0; n < N; n++)
                        total[h][c * N + n] = Vector::all(weights[h * BLOCK + t]).times_plus(v[n], total[h][c * N + n]);
            }
    }
    for (int h = 0; h < H; h++)
        for (int c = 0; c < ALL; c++) total[h][c].store(out + h * stride + first + c * W);
}

// The softmax of one head's block of scores joins what stands in `state`: [0] the largest score, [1] the sum of weights. Scores
// become weights; earlier results are scaled.
inline void join(float* scores, int64_t tokens, float scale, float* state, float* out, int64_t dim) {
    for (int64_t t = tokens; t % W != 0; t++) scores[t] = -INFINITY;
    Vector most = Vector::all(-INFINITY);
    for (int64_t t = 0; t < tokens; t += W) {
        const Vector s = Vector::load(scores + t) * Vector::all(scale);
        s.store(scores + t);
        most = most.max(s);
    }
    const float largest = std::fmax(state[0], most.largest());
    const float before = state[0] == -INFINITY ? 0.0f : std::exp(state[0] - largest);
    Vector sum = Vector::zero();
    for (int64_t t = 0; t < tokens; t += W) {
        const Vector weight = exponential(Vector::load(scores + t) - Vector::all(largest));
        weight.store(scores + t);
        sum = sum + weight;
    }
    state[0] = largest;
    state[1] = state[1] * before + sum.sum();
    for (int64_t i = 0; i < dim; i += W) (Vector::load(out + i) * Vector::all(before)).store(out + i);
}

// Up to BLOCK tokens. `ahead` is null where their memory has been read before.
struct Chunk {
    const uint8_t *keys, *values;
    int64_t tokens, key_bytes, value_bytes;
    bool shared;
    Ahead* ahead;
};

// H heads and a chunk of tokens.
template <int kind, int H>
void meet(const SegmentRun& run, const Chunk& chunk, const float* q, float* out) {
    constexpr int MOST = is_float(kind) ? 4 : 64 / (VECTORS<kind> * W), STEP = VECTORS<kind> * W;
    const int64_t stride = run.value_dim + 2;
    alignas(64) float scores[H * BLOCK];
    int64_t t = 0;
    for (; t + 4 <= chunk.tokens; t += 4) {
        if (chunk.ahead != nullptr) chunk.ahead->passed(4 * chunk.key_bytes);
        dots<kind, H, 4>(chunk.keys + t * chunk.key_bytes, chunk.key_bytes, q, run.key_dim, scores + t);
    }
    for (; t < chunk.tokens; t++) dots<kind, H, 1>(chunk.keys + t * chunk.key_bytes, chunk.key_bytes, q, run.key_dim, scores + t);
    for (int h = 0; h < H; h++)
        join(scores + h * BLOCK, chunk.tokens, run.scale, out + h * stride + run.value_dim, out + h * stride, run.value_dim);
    Ahead* ahead = chunk.shared ? nullptr : chunk.ahead;
    int64_t i = 0;
    for (; i + MOST * STEP <= run.value_dim; i += MOST * STEP)
        weighted<kind, H, MOST>(chunk.values, i, chunk.value_bytes, chunk.tokens, scores, out, stride, ahead);
    for (; i < run.value_dim; i += STEP)
        weighted<kind, H, 1>(chunk.values, i, chunk.value_bytes, chunk.tokens, scores, out, stride, ahead);
}

// All heads and a chunk, SEGMENT_HEADS at a time.
template <int kind>
void meet_all(const SegmentRun& run, Chunk chunk, const float* q, int64_t heads, float* out) {
    in_groups(heads, [&](auto count, int64_t h) {
        meet<kind, decltype(count)::value>(run, chunk, q + h * run.key_dim, out + h * (run.value_dim + 2));
        chunk.ahead = nullptr;
    });
}

template <int kind>
void unpack(const uint8_t* from, int64_t bytes, int64_t rows, int64_t dim, Ahead& ahead, float* out) {
    constexpr int N = VECTORS<kind>;
    for (int64_t row = 0; row < rows; row++, from += bytes, out += dim) {
        ahead.passed(bytes);
        for (int64_t i = 0; i < dim; i += N * W) {
            Vector v[N];
            load<kind>(from, i, v);
            for (int n = 0; n < N; n++) v[n].store(out + i + n * W);
        }
    }
}

// One segment, in chunks that start where Ahead's do. For many heads the numbers of a chunk are made once, in the run's scratch.
template <int kind>
void meet_segment(const SegmentRun& run, const Segment& s, int64_t step, const float* q, int64_t heads, float* out, Ahead& ahead) {
    const int64_t key_bytes = row_bytes(kind, run.key_dim);
    const bool shared = s.values == s.keys;
    const int64_t value_bytes = shared ? key_bytes : row_bytes(kind, run.value_dim);
    for (int64_t start = 0; start < s.tokens; start += step) {
        const int64_t count = s.tokens - start < step ? s.tokens - start : step;
        const uint8_t *keys = s.keys + start * key_bytes, *values = s.values + start * value_bytes;
        if (kind == F32 || heads <= SEGMENT_HEADS) {
            meet_all<kind>(run, {keys, values, count, key_bytes, value_bytes, shared, &ahead}, q, heads, out);
            continue;
        }
        float *wide = run.scratch, *wide_values = shared ? wide : wide + count * run.key_dim;
        unpack<kind>(keys, key_bytes, count, run.key_dim, ahead, wide);
        if (!shared) unpack<kind>(values, value_bytes, count, run.value_dim, ahead, wide_values);
        const int64_t wide_value_bytes = row_bytes(F32, shared ? run.key_dim : run.value_dim);
        const Chunk chunk = {reinterpret_cast<const uint8_t*>(wide), reinterpret_cast<const uint8_t*>(wide_values), count,
                             row_bytes(F32, run.key_dim), wide_value_bytes, shared, nullptr};
        meet_all<F32>(run, chunk, q, heads, out);
    }
}

// Tokens that many heads meet at a time: what run_scratch has room for.
inline int64_t chunk_tokens(const SegmentRun& run, int64_t heads) {
    if (heads <= SEGMENT_HEADS) return BLOCK;
    const int64_t fit = run_scratch(heads, run.key_dim, run.value_dim) / (run.key_dim + run.value_dim) / 4 * 4;
    return fit < BLOCK ? fit : BLOCK;
}

}  // namespace segments

// Attention of `heads` queries that share keys and values. A head's row of `out` is its unnormalised result, the largest score, and
// the sum of weights.
void attend(const SegmentRun& run, const float* q, int64_t heads, float* out) {
    using namespace segments;
    const int64_t stride = run.value_dim + 2, step = chunk_tokens(run, heads);
    for (int64_t h = 0; h < heads; h++) {
        std::memset(out + h * stride, 0, size_t(run.value_dim) * sizeof(float));
        out[h * stride + run.value_dim] = -INFINITY;
        out[h * stride + run.value_dim + 1] = 0;
    }
    Ahead ahead(run, step);
    for (int64_t i = 0; i < run.count; i++) {
        const Segment& s = run.segments[i];
        switch (s.kind) {
        case F32: meet_segment<F32>(run, s, step, q, heads, out, ahead); break;
        case F16: meet_segment<F16>(run, s, step, q, heads, out, ahead); break;
        case Q8_0: meet_segment<Q8_0>(run, s, step, q, heads, out, ahead); break;
        case Q4_0: meet_segment<Q4_0>(run, s, step, q, heads, out, ahead); break;
        default: meet_segment<BF16>(run, s, step, q, heads, out, ahead); break;
        }
    }
}

}  // namespace
}  // namespace ktopt
