// Shares the queries of a prefill out to threads, the ones that see most keys first.
#include <algorithm>
#include <atomic>

#include "attention.h"
#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t PARTS_A_THREAD = 8;  // enough that threads finish together
constexpr double LONG_WORK = 1 << 20;  // products, above which it is worth waking threads
constexpr int64_t LARGEST_DIM = 1 << 12;

int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

thread_local Scratch tiles_scratch;

// A cache in float32 asks for products in float32.
const Kernels& kernels_for(int kind) {
#if defined(__x86_64__)
    if (kind == F32 && &kernels() == &avx512bf16_kernels) return avx512vnni_kernels;
#endif
    static_cast<void>(kind);
    return kernels();
}

struct Job {
    PrefillPart all;  // of the first KV head, with all rows
    const KeyValues* cache;
    int64_t blocks, block_rows, tile_rows, tiles;
    PrefillFunction run;
    std::atomic<bool> done{true};

    void part(int64_t number) {
        const AttentionShape& shape = *all.shape;
        const int64_t head = number % shape.kv_heads, block = blocks - 1 - number / shape.kv_heads;
        PrefillPart part = all;
        part.keys += head * cache->key_head_bytes;
        part.values += head * cache->value_head_bytes;
        part.q += head * all.group * shape.key_dim;
        part.out += head * all.group * shape.value_dim;
        if (part.log_sum != nullptr) part.log_sum += head * all.group;
        part.begin = block * block_rows;
        part.end = std::min(part.begin + block_rows, all.end);
        const size_t bytes = prefill_scratch(shape.key_dim, shape.value_dim, tile_rows, tiles);
        if (!tiles_scratch.reset(bytes)) {
            done = false;
            return;
        }
        part.scratch = tiles_scratch.take<uint8_t>(bytes);
        run(part);
    }
};

}  // namespace

const char* refuses(const AttentionShape& shape, int64_t kind, int64_t tokens, int64_t first, int64_t start) {
    if (kind != F32 && kind != F16 && kind != BF16) return "keys and values must be float32, float16 or bfloat16";
    if (shape.heads < 1 || shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0)
        return "the query heads must be a multiple of the key and value heads";
    if (shape.heads > 1 << 16) return "there are too many heads";
    for (const int64_t dim : {shape.key_dim, shape.value_dim})
        if (dim < 8 || dim % 8 != 0 || dim > LARGEST_DIM) return "a head's dimensions must be multiples of 8, 4096 at most";
    if (tokens < 1 || first < 0 || start < 0 || shape.window < 0) return "tokens must be at least 1, and no position less than 0";
    if (shape.end != CAUSAL && (shape.end < 0 || shape.end > (1 << 30) || shape.window != 0))
        return "an end is a position, and no window goes with it";
    if (first > (1 << 30) || tokens > (1 << 30) || start > (1 << 30)) return "the positions are too large";
    return nullptr;
}

bool prefill_attention(const AttentionShape& shape, const KeyValues& cache, const float* q, int64_t q_stride, int64_t tokens,
                       int64_t first, int64_t start, float* out, int64_t out_stride, int threads, float* log_sum) {
    const Kernels& isa = kernels_for(cache.kind);
    const int64_t group = shape.heads / shape.kv_heads, rows = tokens * group;
    const int64_t tiles = divided(rows, isa.prefill_rows);
    Job job;
    job.tiles = std::clamp<int64_t>(tiles * shape.kv_heads / (std::max(threads, 1) * PARTS_A_THREAD), 1, MOST_TILES);
    job.tile_rows = isa.prefill_rows;
    job.block_rows = job.tiles * job.tile_rows;
    job.blocks = divided(tiles, job.tiles);
    job.cache = &cache;
    job.run = isa.prefill;
    job.all = {&shape, cache.kind, cache.keys, cache.values, q, out, q_stride, out_stride, group, first, start, 0, rows, nullptr, log_sum, cache.paging};
    const int64_t last = shape.end == CAUSAL ? first + tokens : shape.end, seen = shape.window == 0 ? last : std::min(last, shape.window);
    const bool is_long = double(rows * shape.kv_heads) * double(seen * (shape.key_dim + shape.value_dim)) > LONG_WORK;
    share_out(job.blocks * shape.kv_heads, threads, is_long, [&](int64_t part) { job.part(part); });
    return job.done;
}

}  // namespace ktopt
