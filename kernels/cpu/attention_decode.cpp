#include "attention_decode.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t PART_BYTES = 128 << 10;  // of keys and values that a part reads at least
constexpr int PARTS_A_THREAD = 8;          // enough that threads finish together
constexpr int64_t TOKENS_TOGETHER = 16;    // segments are cut at multiples of so many
constexpr int64_t LONG_NUMBERS = 1 << 17;  // of partial results: worth merging by several threads

thread_local Scratch job_scratch, segment_scratch, unpack_scratch;

// Segments [begin, end) of one row.
struct RowPart {
    int64_t row, begin, end;
};

int64_t row_bytes(int kind, int64_t dim) {
    const Layout layout = layout_of(kind);
    return dim / layout.elements * layout.bytes;
}

// What a token's key and value take, in bytes to the next token's.
struct Steps {
    int64_t key, value, both;

    Steps(const RowsShape& shape, const Segment& s)
        : key(row_bytes(s.kind, shape.key_dim)),
          value(s.values == s.keys ? key : row_bytes(s.kind, shape.value_dim)),
          both(s.values == s.keys ? key : key + value) {}
};

// The rows' segments cut so that parts are made of whole pieces. But for the last of a row, a part has `part_bytes` or a little more.
struct Cutting {
    const RowsShape& shape;
    int64_t part_bytes;
    Segment* pieces;
    RowPart* parts;
    int64_t piece_count = 0, part_count = 0;

    void row(int64_t number, const Segment* segments, int64_t count) {
        int64_t begin = piece_count, room = part_bytes;
        for (int64_t i = 0; i < count; i++) {
            Segment left = segments[i];
            const Steps steps(shape, left);
            while (left.tokens > 0) {
                const int64_t together = steps.both * TOKENS_TOGETHER;
                int64_t taken = (room + together - 1) / together * TOKENS_TOGETHER;
                if (left.tokens - taken < TOKENS_TOGETHER) taken = left.tokens;
                pieces[piece_count++] = {left.kind, left.keys, left.values, taken};
                left.keys += taken * steps.key;
                left.values += taken * steps.value;
                left.tokens -= taken;
                room -= taken * steps.both;
                if (room > 0) continue;
                parts[part_count++] = {number, begin, piece_count};
                begin = piece_count;
                room = part_bytes;
            }
        }
        if (begin < piece_count) parts[part_count++] = {number, begin, piece_count};
    }
};

struct Job {
    const RowsShape& shape;
    const Segment* pieces;
    const RowPart* parts;
    const float* q;
    int64_t q_stride, number_count;  // number_count: of one head's partial result
    float* partial;                  // (part, head of the group, number_count)
    std::atomic<bool> done{true};

    void part(int64_t number) {
        const RowsShape& s = shape;
        const RowPart& p = parts[number];
        const auto numbers = size_t(run_scratch(s.group, s.key_dim, s.value_dim));
        if (numbers != 0 && !unpack_scratch.reset(Scratch::room<float>(numbers))) {
            done = false;
            return;
        }
        const SegmentRun run = {pieces + p.begin, p.end - p.begin, s.key_dim, s.value_dim, s.scale,
                         numbers == 0 ? nullptr : unpack_scratch.take<float>(numbers)};
        const float* query = q + p.row / s.rows_together * q_stride + p.row % s.rows_together * s.group * s.key_dim;
        kernels().attend(run, query, s.group, partial + number * s.group * number_count);
    }
};

// One head's result from those of its parts, `apart` numbers from one to the next. Answers the logarithm of its sum.
float merge(const float* partial, int64_t parts, int64_t apart, int64_t dim, float* out) {
    float largest = -INFINITY, sum = 0;
    for (int64_t p = 0; p < parts; p++) largest = std::fmax(largest, partial[p * apart + dim]);
    std::fill_n(out, dim, 0.0f);
    if (parts == 0) return -INFINITY;
    for (int64_t p = 0; p < parts; p++) {
        const float* from = partial + p * apart;
        if (from[dim + 1] == 0) continue;
        const float weight = std::exp(from[dim] - largest);
        sum += from[dim + 1] * weight;
        for (int64_t d = 0; d < dim; d++) out[d] += from[d] * weight;
    }
    const float inverse = 1.0f / sum;
    for (int64_t d = 0; d < dim; d++) out[d] *= inverse;
    return largest + std::log(sum);
}

}  // namespace

bool attend_segments(const RowsShape& s, const Segment* segments, const int64_t* first, const float* q, int64_t q_stride,
                     float* out, int64_t out_stride, float* log_sum, int threads) {
    int64_t bytes = 0;
    for (int64_t i = first[0]; i < first[s.rows]; i++) bytes += segments[i].tokens * Steps(s, segments[i]).both;
    const int64_t share = bytes / (int64_t(std::max(threads, 1)) * PARTS_A_THREAD) + 1;
    const int64_t part_bytes = s.alone ? PART_BYTES : threads <= 1 ? bytes + 1 : std::max(share, PART_BYTES);
    const int64_t most = s.rows + bytes / part_bytes + 1, numbers = s.value_dim + 2;
    const auto pieces = size_t(first[s.rows] - first[0] + most), results = size_t(most * s.group * numbers);
    if (!job_scratch.reset(Scratch::room<Segment>(pieces) + Scratch::room<RowPart>(size_t(most)) +
                           Scratch::room<int64_t>(size_t(s.rows + 1)) + Scratch::room<float>(results)))
        return false;
    Cutting cut = {s, part_bytes, job_scratch.take<Segment>(pieces), job_scratch.take<RowPart>(size_t(most))};
    auto* row_parts = job_scratch.take<int64_t>(size_t(s.rows + 1));
    row_parts[0] = 0;
    for (int64_t r = 0; r < s.rows; r++) {
        cut.row(r, segments + first[r], first[r + 1] - first[r]);
        row_parts[r + 1] = cut.part_count;
    }
    Job job = {s, cut.pieces, cut.parts, q, q_stride, numbers, job_scratch.take<float>(results)};
    share_out(cut.part_count, bytes < PART_BYTES ? 1 : threads, bytes >= LONG_BYTES, [&](int64_t part) { job.part(part); });
    const auto finish = [&](int64_t i) {
        const int64_t r = i / s.group, h = i % s.group, begin = row_parts[r];
        float* to = out + r / s.rows_together * out_stride + (r % s.rows_together * s.group + h) * s.value_dim;
        const float sum = merge(job.partial + (begin * s.group + h) * numbers, row_parts[r + 1] - begin, s.group * numbers,
                                s.value_dim, to);
        if (log_sum != nullptr) log_sum[i] = sum;
    };
    const int64_t merged = cut.part_count * s.group * numbers;
    share_out(s.rows * s.group, merged < LONG_NUMBERS ? 1 : threads, false, finish);
    return job.done;
}

bool decode_attention(const DecodeShape& s, const Sight* sights, int64_t count, const float* q, int64_t q_stride, float* out,
                      int64_t out_stride, int threads) {
    const int64_t rows = count * s.kv_heads;
    if (!segment_scratch.reset(Scratch::room<Segment>(size_t(rows)) + Scratch::room<int64_t>(size_t(rows + 1)))) return false;
    auto* segments = segment_scratch.take<Segment>(size_t(rows));
    auto* first = segment_scratch.take<int64_t>(size_t(rows + 1));
    for (int64_t r = 0; r <= rows; r++) first[r] = r;
    for (int64_t r = 0; r < rows; r++) {
        const Sight& sight = sights[r / s.kv_heads];
        const int64_t head = r % s.kv_heads;
        segments[r] = {s.kind, sight.keys + head * s.key_head_bytes, sight.values + head * s.value_head_bytes, sight.tokens};
    }
    const RowsShape shape = {rows, s.kv_heads, s.heads / s.kv_heads, s.key_dim, s.value_dim, s.scale};
    return attend_segments(shape, segments, first, q, q_stride, out, out_stride, nullptr, threads);
}

}  // namespace ktopt
