#include "mla.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t LEAST_TOKENS = 128;  // what a part of a sequence has at least
constexpr int PARTS_A_THREAD = 2;
constexpr int64_t HEADS_TOGETHER = 128;  // heads of the rows that a part takes through a block: their sums stay in the L2 cache
constexpr int64_t LONG_NUMBERS = 1 << 20;  // reading so many takes about 100 microseconds: worth waking threads
constexpr float LOWEST = -3e38f;

int64_t bytes_of(int kind, int64_t numbers) {
    const Layout layout = layout_of(kind);
    return numbers / layout.elements * layout.bytes;
}

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// So many numbers of a scratch, or null.
template <class T>
T* take(Scratch& scratch, int64_t count) {
    const size_t bytes = Scratch::room<T>(size_t(count));
    return scratch.reset(bytes) ? scratch.take<T>(size_t(count)) : nullptr;
}

thread_local Scratch query_scratch, sums_scratch, packed_scratch, block_scratch, matrix_scratch;

// The softmax so far of one row and one part of its tokens: sums (heads rounded up to 16, latent), then highest and sum of each.
struct Sums {
    float *out, *highest, *sum;

    static int64_t floats(const LatentShape& s) { return rounded_up(s.heads, LATENT_HEADS) * (s.latent + 2); }

    Sums(const LatentShape& s, float* memory) : out(memory) {
        const int64_t heads = rounded_up(s.heads, LATENT_HEADS);
        highest = out + heads * s.latent;
        sum = highest + heads;
    }

    void clear(const LatentShape& s) {
        std::memset(out, 0, size_t(floats(s)) * sizeof(float));
        std::fill(highest, sum, LOWEST);
    }
};

// Rows [first, first + count) and which of their tokens a part takes.
struct Share {
    int64_t first, count, begin, end;
};

// The work in parts: groups of rows that share their pages, each group's tokens split into `splits` ranges of whole blocks.
class Work {
public:
    Work(const LatentShape& shape, const LatentRow* rows, int64_t count, int threads) : rows_(rows), count_(count) {
        together_ = std::max<int64_t>(1, HEADS_TOGETHER / shape.heads);
        int64_t groups = 0, longest = 0;
        for (int64_t r = 0; r < count; r += size(r), groups++)
            for (int64_t i = r; i < r + size(r); i++) {
                longest = std::max(longest, rows[i].end - rows[i].start);
                tokens += rows[i].end - rows[i].start;
            }
        const int64_t wanted = threads <= 1 ? 1 : (int64_t(threads) * PARTS_A_THREAD + groups - 1) / groups;
        splits = std::clamp<int64_t>(longest / LEAST_TOKENS, 1, wanted);
        parts = groups * splits;
    }

    Share share(int64_t part) const {
        int64_t r = 0;
        for (int64_t group = part / splits; group > 0; group--) r += size(r);
        Share found = {r, size(r), INT64_MAX, 0};
        for (int64_t i = r; i < r + found.count; i++) {
            found.begin = std::min(found.begin, rows_[i].start);
            found.end = std::max(found.end, rows_[i].end);
        }
        const int64_t step = rounded_up((found.end - found.begin + splits - 1) / splits, LATENT_BLOCK);
        const int64_t from = found.begin + part % splits * step;
        found.end = std::min(found.end, from + step);
        found.begin = std::min(from, found.end);
        return found;
    }

    int64_t splits, parts, tokens = 0;

private:
    int64_t size(int64_t row) const {
        int64_t n = 1;
        while (n < together_ && row + n < count_ && rows_[row + n].pages == rows_[row].pages) n++;
        return n;
    }

    const LatentRow* rows_;
    int64_t count_, together_;
};

// One call of the attention.
struct Attending {
    const LatentShape& shape;
    const LatentCache& cache;
    const LatentRow* rows;
    const float* query;
    float scale;
    float* sums;  // Sums of each row and split
    int64_t splits;
    const Kernels& isa = kernels();
    bool pairs = (cache.kind == BF16 || cache.kind == Q8_0) && isa.latent_bfloat16.attend != nullptr;
    const LatentKernels& inner = pairs ? isa.latent_bfloat16 : isa.latent;
    bool as_stored = cache.kind == (pairs ? BF16 : F32);
    int64_t row_bytes = bytes_of(cache.kind, shape.width());
    int64_t number_bytes = pairs ? 2 : 4;
    int64_t groups = (shape.heads + LATENT_HEADS - 1) / LATENT_HEADS;

    Sums sums_of(int64_t row, int64_t split) const { return Sums(shape, sums + (row * splits + split) * Sums::floats(shape)); }

    const uint8_t* token(const LatentRow& row, int64_t t) const {
        const int64_t page = t / cache.page_tokens;
        return cache.data + ((row.pages ? row.pages[page] : page) * cache.page_tokens + t % cache.page_tokens) * row_bytes;
    }

    // How many tokens from `t` on lie together, a block at most.
    int block_at(int64_t t, int64_t end) const {
        return int(std::min({int64_t(LATENT_BLOCK), end - t, cache.page_tokens - t % cache.page_tokens}));
    }

    bool attend(const Share& share, int64_t split) const {
        const int64_t packed_bytes = LATENT_HEADS * shape.width() * number_bytes, block_bytes = shape.width() * number_bytes;
        auto* packed = take<uint8_t>(packed_scratch, share.count * groups * packed_bytes);
        auto* numbers = take<uint8_t>(block_scratch, LATENT_BLOCK * block_bytes);
        if (packed == nullptr || numbers == nullptr) return false;
        for (int64_t r = 0; r < share.count; r++) {
            sums_of(share.first + r, split).clear(shape);
            for (int64_t g = 0; g < groups; g++) {
                const int64_t head = g * LATENT_HEADS;
                inner.pack(query + ((share.first + r) * shape.heads + head) * shape.width(), size_t(shape.width()),
                           int(std::min<int64_t>(LATENT_HEADS, shape.heads - head)), shape.width(), scale,
                           packed + (r * groups + g) * packed_bytes);
            }
        }
        const LatentRow& pages = rows[share.first];
        LatentBlock block = {};
        block.row_bytes = size_t(as_stored ? row_bytes : block_bytes);
        block.width = shape.width();
        block.latent = shape.latent;
        for (int64_t t = share.begin; t < share.end; t += block.tokens) {
            const int tokens = block_at(t, share.end);
            const uint8_t* stored = token(pages, t);
            const int64_t after = t + tokens;
            block.next = after < share.end ? token(pages, after) : nullptr;
            block.next_bytes = after < share.end ? size_t(block_at(after, share.end) * row_bytes) : 0;
            if (!as_stored)
                for (int i = 0; i < tokens; i++)
                    isa.dequantize[cache.kind](stored + i * row_bytes, shape.width(), numbers + i * block_bytes, pairs);
            for (int64_t r = 0; r < share.count; r++) {
                const LatentRow& row = rows[share.first + r];
                const int64_t begin = std::max(t, row.start), end = std::min(after, row.end);
                if (begin >= end) continue;
                block.rows = (as_stored ? stored : numbers) + size_t(begin - t) * block.row_bytes;
                block.tokens = int(end - begin);
                const Sums so_far = sums_of(share.first + r, split);
                for (int64_t g = 0; g < groups; g++) {
                    block.query = packed + (r * groups + g) * packed_bytes;
                    block.highest = so_far.highest + g * LATENT_HEADS;
                    block.sum = so_far.sum + g * LATENT_HEADS;
                    block.out = so_far.out + g * LATENT_HEADS * shape.latent;
                    inner.attend(block);
                    block.next_bytes = 0;  // asked for already
                }
            }
            block.tokens = tokens;
        }
        return true;
    }

    // Joins the splits of one head of a row: its weighted mean of latents into `out` (latent), and the logarithm of the sum.
    float join(int64_t row, int64_t head, float* out) const {
        float highest = LOWEST, sum = 0;
        for (int64_t s = 0; s < splits; s++) highest = std::max(highest, sums_of(row, s).highest[head]);
        std::fill(out, out + shape.latent, 0.0f);
        for (int64_t s = 0; s < splits; s++) sum += sums_of(row, s).sum[head] * std::exp(sums_of(row, s).highest[head] - highest);
        for (int64_t s = 0; s < splits && sum != 0; s++) {
            const Sums part = sums_of(row, s);
            isa.add_scaled(part.out + head * shape.latent, shape.latent, std::exp(part.highest[head] - highest) / sum, out);
        }
        return sum == 0 ? -std::numeric_limits<float>::infinity() : highest + std::log(sum);
    }
};

// out[r * out_stride + i] = row i of the head's matrix times x[r * x_stride], for each of `count` rows.
bool times_rows(const Kernels& isa, const HeadMatrices& m, int64_t head, const float* x, int64_t x_stride, int64_t count, float* out,
                int64_t out_stride) {
    const void* operand = x;
    if (!is_float(m.kind)) {
        const int64_t blocks = activation_blocks(m.columns);
        auto* quantized = take<Activations>(matrix_scratch, count * blocks);
        if (quantized == nullptr) return false;
        for (int64_t r = 0; r < count; r++) isa.quantize(x + r * x_stride, m.columns, quantized + r * blocks);
        operand = quantized;
        x_stride = blocks;
    }
    isa.rows[m.kind](m.data + head * m.head_bytes, size_t(bytes_of(m.kind, m.columns)), m.rows, m.columns, operand,
                     size_t(x_stride), count, out, size_t(out_stride));
    return true;
}

// out[r * out_stride + i] = column i of the head's matrix times x[r * x_stride].
bool times_columns(const Kernels& isa, const HeadMatrices& m, int64_t head, const float* x, int64_t x_stride, int64_t count,
                   float* out, int64_t out_stride) {
    auto* numbers = take<float>(matrix_scratch, m.columns);
    if (numbers == nullptr) return false;
    for (int64_t r = 0; r < count; r++) std::fill(out + r * out_stride, out + r * out_stride + m.columns, 0.0f);
    for (int64_t i = 0; i < m.rows; i++) {
        isa.dequantize[m.kind](m.data + head * m.head_bytes + i * bytes_of(m.kind, m.columns), m.columns, numbers, false);
        for (int64_t r = 0; r < count; r++) isa.add_scaled(numbers, m.columns, x[r * x_stride + i], out + r * out_stride);
    }
    return true;
}

// Runs the attention itself; join() then has the results. False: no memory.
bool attend_all(Attending& attention, const Work& work, int threads) {
    std::atomic<bool> done{true};
    share_out(work.parts, threads, work.tokens * attention.shape.width() >= LONG_NUMBERS, [&](int64_t part) {
        if (!attention.attend(work.share(part), part % work.splits)) done = false;
    });
    return done;
}

float* take_sums(const LatentShape& shape, int64_t count, const Work& work) {
    return take<float>(sums_scratch, count * work.splits * Sums::floats(shape));
}

}  // namespace

const char* refuses(const LatentShape& shape, const LatentCache& cache, const LatentRow* rows, int64_t count) {
    constexpr int64_t MOST = 1 << 20;
    for (int64_t n : {shape.heads, shape.nope, shape.rope, shape.latent, shape.value, cache.page_tokens, cache.pages, count})
        if (n < 1) return "every size must be at least 1";
    for (int64_t n : {shape.heads, shape.nope, shape.rope, shape.latent, shape.value, count})
        if (n > MOST) return "a size is beyond a million";
    if (shape.latent % 16 != 0 || shape.rope % 2 != 0) return "the latent must be a multiple of 16 numbers, the rotated part of 2";
    if (cache.kind < 0 || cache.kind >= KINDS || layout_of(cache.kind).bytes == 0) return "there is no kernel for the cache's type";
    if (shape.width() % layout_of(cache.kind).elements != 0) return "a token of the cache must be whole blocks";
    if (cache.data == nullptr) return "the cache has no address";
    for (int64_t r = 0; r < count; r++) {
        if (rows[r].start < 0 || rows[r].start > rows[r].end) return "a row's tokens end before they begin";
        const int64_t pages = (rows[r].end + cache.page_tokens - 1) / cache.page_tokens;
        if (rows[r].pages == nullptr && pages > cache.pages) return "a row's tokens reach beyond the cache";
        for (int64_t p = rows[r].start / cache.page_tokens; rows[r].pages != nullptr && p < pages; p++)
            if (rows[r].pages[p] < 0 || rows[r].pages[p] >= cache.pages) return "a page number lies beyond the cache";
    }
    return nullptr;
}

bool attend_latents(const LatentShape& shape, const LatentCache& cache, const LatentRow* rows, int64_t count, const float* query,
                      float scale, float* out, float* log_sum, int threads) {
    const Work work(shape, rows, count, threads);
    float* sums = take_sums(shape, count, work);
    if (sums == nullptr) return false;
    Attending attention{shape, cache, rows, query, scale, sums, work.splits};
    if (!attend_all(attention, work, threads)) return false;
    for (int64_t i = 0; i < count * shape.heads; i++) {
        const float log = attention.join(i / shape.heads, i % shape.heads, out + i * shape.latent);
        if (log_sum != nullptr) log_sum[i] = log;
    }
    return true;
}

bool attend_absorbed(const LatentShape& shape, const LatentCache& cache, const LatentRow* rows, int64_t count,
                        const float* query, const HeadMatrices& keys, const HeadMatrices& values, float scale, float* out,
                        int threads) {
    const Work work(shape, rows, count, threads);
    const int64_t width = shape.width(), head_numbers = shape.nope + shape.rope, in = shape.heads * head_numbers;
    auto* absorbed = take<float>(query_scratch, count * shape.heads * width);
    float* sums = take_sums(shape, count, work);
    if (absorbed == nullptr || sums == nullptr) return false;
    const Kernels& isa = kernels();
    const bool is_long = count * shape.heads * shape.nope * shape.latent >= LONG_NUMBERS;
    std::atomic<bool> done{true};
    share_out(shape.heads, threads, is_long, [&](int64_t head) {
        const float* x = query + head * head_numbers;
        float* to = absorbed + head * width;
        const auto times = keys.transposed ? times_columns : times_rows;
        if (!times(isa, keys, head, x, in, count, to, shape.heads * width)) done = false;
        for (int64_t r = 0; r < count; r++)
            std::memcpy(to + r * shape.heads * width + shape.latent, x + r * in + shape.nope, size_t(shape.rope) * sizeof(float));
    });
    Attending attention{shape, cache, rows, absorbed, scale, sums, work.splits};
    if (!done || !attend_all(attention, work, threads)) return false;
    share_out(shape.heads, threads, is_long, [&](int64_t head) {
        auto* joined = take<float>(block_scratch, count * shape.latent);
        if (joined == nullptr) {
            done = false;
            return;
        }
        for (int64_t r = 0; r < count; r++) attention.join(r, head, joined + r * shape.latent);
        if (!times_rows(isa, values, head, joined, shape.latent, count, out + head * shape.value, shape.heads * shape.value))
            done = false;
    });
    return done;
}

}  // namespace ktopt
