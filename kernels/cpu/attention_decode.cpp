#include "attention_decode.h"

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t STRETCH_BYTES = 64 << 10;  // of keys that a part reads at least
constexpr int PARTS_A_THREAD = 8;  // enough that threads finish together

thread_local Scratch partial_scratch;

struct Job {
    const DecodeShape* shape;
    const Sight* sights;
    const float* q;
    int64_t q_stride, group, stretches, row;  // row: numbers of one head's partial result
    float* partial;  // (query, kv head, stretch, head of the group, row)
};

int64_t stretch_tokens(const Sight& sight, int64_t stretches) {
    return ((sight.tokens + stretches - 1) / stretches + 15) / 16 * 16;
}

void part(void* given, int64_t number) {
    const Job& j = *static_cast<Job*>(given);
    const DecodeShape& s = *j.shape;
    const int64_t stretch = number % j.stretches, head = number / j.stretches % s.kv_heads, i = number / j.stretches / s.kv_heads;
    const Sight& sight = j.sights[i];
    const int64_t step = stretch_tokens(sight, j.stretches), first = std::min(stretch * step, sight.tokens);
    const int64_t item = layout_of(s.kind).bytes;
    const Stretch piece{s.kind,
                        sight.keys + head * s.key_head_bytes + first * s.key_dim * item,
                        sight.values + head * s.value_head_bytes + first * s.value_dim * item,
                        std::min(step, sight.tokens - first),
                        s.key_dim,
                        s.value_dim,
                        s.scale};
    kernels().attend(piece, j.q + i * j.q_stride + head * j.group * s.key_dim, j.group, j.partial + number * j.group * j.row);
}

// One head's result from those of its stretches, `apart` numbers from one to the next.
void merge(const float* partial, int64_t stretches, int64_t apart, int64_t dim, float* out) {
    float largest = -INFINITY, sum = 0;
    for (int64_t s = 0; s < stretches; s++) largest = std::fmax(largest, partial[s * apart + dim]);
    std::fill_n(out, dim, 0.0f);
    for (int64_t s = 0; s < stretches; s++) {
        const float* from = partial + s * apart;
        if (from[dim + 1] == 0) continue;
        const float weight = std::exp(from[dim] - largest);
        sum += from[dim + 1] * weight;
        for (int64_t d = 0; d < dim; d++) out[d] += from[d] * weight;
    }
    const float inverse = 1.0f / sum;
    for (int64_t d = 0; d < dim; d++) out[d] *= inverse;
}

}  // namespace

bool decode_attention(const DecodeShape& s, const Sight* sights, int64_t count, const float* q, int64_t q_stride, float* out,
                      int64_t out_stride, int threads) {
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++) longest = std::max(longest, sights[i].tokens);
    const int64_t bytes = longest * s.key_dim * layout_of(s.kind).bytes;
    const int64_t enough = (int64_t(threads) * PARTS_A_THREAD + count * s.kv_heads - 1) / (count * s.kv_heads);
    const int64_t stretches = threads <= 1 ? 1 : std::clamp<int64_t>(bytes / STRETCH_BYTES, 1, enough);
    const int64_t group = s.heads / s.kv_heads, row = s.value_dim + 2, parts = count * s.kv_heads * stretches;
    if (!partial_scratch.reset(Scratch::room<float>(size_t(parts * group * row)))) return false;
    Job job{&s, sights, q, q_stride, group, stretches, row, partial_scratch.take<float>(size_t(parts * group * row))};
    run_parts(part, &job, parts, bytes * s.kv_heads * count < STRETCH_BYTES ? 1 : threads,
              2 * bytes * s.kv_heads * count >= LONG_BYTES);
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < s.heads; h++)
            merge(job.partial + ((i * s.kv_heads + h / group) * stretches * group + h % group) * row, stretches, group * row,
                  s.value_dim, out + i * out_stride + h * s.value_dim);
    return true;
}

}  // namespace ktopt
