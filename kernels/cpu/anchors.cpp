#include "anchors.h"

#include <atomic>

#include "pool.h"
#include "scratch.h"
#include "types.h"

namespace ktopt {
namespace {

thread_local Scratch room_scratch;

// Where the anchors of one block of one row go.
NewBlock place(const AnchorIndex& x, const NewKeys& keys, int64_t row, int64_t block) {
    const int64_t at = row * x.max_blocks + keys.first + block, bytes = layout_of(keys.kind).bytes;
    NewBlock made{};
    made.kind = keys.kind;
    made.keys = keys.keys + (row * keys.row_stride + block * keys.block_stride) * bytes;
    made.token_stride = keys.token_stride;
    made.tokens = x.tokens;
    made.groups = x.groups();
    made.dim = x.dim;
    made.limit = keys.limit;
    uint16_t* vectors = x.anchors + at * x.each * x.dim;
    if (x.type == BLOCK_MEAN) made.mean = vectors;
    if (x.type == BLOCK_MAX) made.high = vectors;
    if (x.type == QUEST || x.type == KEY_INT4) {
        made.low = vectors;
        made.high = vectors + x.dim;
    }
    if (x.type == KEY_INT4) {
        made.mean = x.mean + at * x.dim;
        made.codes = x.codes + at * x.padded() * x.dim / 2;
        made.steps = x.steps + at * 2 * x.padded();
        made.signs = x.signs + at * x.padded() * x.dim / 8;
        made.magnitude = x.magnitude + at * x.padded();
    }
    return made;
}

}  // namespace

const char* refuses(const AnchorIndex& x) {
    if (x.type < 0 || x.type >= ANCHOR_TYPES) return "there are no such anchors";
    if (x.rows < 1 || x.max_blocks < 1 || x.tokens < 1 || x.dim < 16 || x.each < 1) return "anchors must have a size";
    if (x.dim % 16 != 0 || x.dim > 1024 || x.tokens > 1 << 16) return "anchors of keys whose numbers are no multiple of 16, or too many";
    if (x.rows > INT32_MAX || x.max_blocks > INT32_MAX || x.each > x.tokens + 1) return "anchors have too large a size";
    if ((x.type == QUEST || x.type == KEY_INT4) != (x.each == 2) && x.type != FIXED && x.type != DYNAMIC)
        return "a block has another number of anchors";
    if (!x.anchors) return "anchors have no address";
    if (x.type == KEY_INT4 && !(x.mean && x.codes && x.steps && x.signs && x.magnitude)) return "anchors have no address";
    return nullptr;
}

int64_t add_anchors(const AnchorIndex& x, const NewKeys& keys, int threads) {
    const AnchorKernels& run = kernels().anchors;
    const int64_t parts = x.rows * keys.count;
    std::atomic<int64_t> bad{INT64_MAX};
    std::atomic<bool> lacking{false};
    share_out(parts, threads, parts * x.tokens * x.dim * 4 >= LONG_BYTES, [&](int64_t part) {
        NewBlock block = place(x, keys, part / keys.count, part % keys.count);
        if (!room_scratch.reset(Scratch::room<float>(size_t(2 * x.dim)))) {
            lacking = true;
            return;
        }
        block.room = room_scratch.take<float>(size_t(2 * x.dim));
        if (run.add(block)) return;
        int64_t first = bad.load();
        while (part < first && !bad.compare_exchange_weak(first, part)) {
        }
    });
    if (lacking) return -2;
    return bad == INT64_MAX ? -1 : bad.load();
}

}  // namespace ktopt
