// Scores of blocks and the choice of the best (anchors.h). A scan meets every block: with its vectors, and of KEY_INT4 with its signs.
// Keys in 4 bits are then met for a shortlist. What a block scores doesn't depend on where it stands or on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "anchors.h"
#include "pool.h"
#include "scratch.h"
#include "types.h"

namespace ktopt {
namespace {

constexpr int64_t QUEST_TIMES = 3, SIGN_TIMES = 2;  // the shortlist, in times of what is asked for
constexpr int64_t LEAST_ASKED = 16;                 // and as if so many were asked for at least
constexpr int64_t PARTS_A_THREAD = 8;
constexpr float NOTHING = -INFINITY;

thread_local Scratch caller_scratch, part_scratch;

struct Job {
    const AnchorIndex& x;
    const Choice& c;
    const AnchorKernels& run;
    int64_t together, sequences, query_heads;  // rows that choose together; heads that `q` has of each row
    const float* q = nullptr;                  // (rows, query_heads, numbers), times the scale
    float* scores = nullptr;                   // (rows, blocks)
    uint8_t *allowed = nullptr, *listed = nullptr;  // (sequences, blocks)
    int32_t* keys = nullptr;                   // (sequences, blocks)
    // KEY_INT4's
    const float* heads = nullptr;  // (rows, heads, dim), times the scale
    float* turned = nullptr;       // the same, turned
    uint8_t* tables = nullptr;
    SignScale* signs = nullptr;
    int8_t* codes = nullptr;
    CodeScale* code_scales = nullptr;
    float *means = nullptr, *largest = nullptr, *sums = nullptr;  // (rows, heads, blocks); products with the mean keys first
    int32_t *list = nullptr, *listing = nullptr;                  // (sequences, blocks), and how many
    bool lacking = false;

    int64_t row_head(int64_t row, int64_t head) const { return row * c.heads + head; }
    float rest(int64_t row_head) const { return c.rest && std::isfinite(c.rest[row_head]) ? c.rest[row_head] : NOTHING; }
    bool short_list() const { return x.type == KEY_INT4; }
    int64_t numbers() const { return x.type == QUEST || x.type == KEY_INT4 ? 2 * x.dim : x.dim; }
};

// Whether a block's vectors are several that each head meets alone.
bool by_head(const AnchorIndex& x) { return (x.type == FIXED || x.type == DYNAMIC) && x.each > 1; }

// What the vectors of a row meet: each head where a block has several; QUEST's smallest numbers meet the sum of the heads' negative
// numbers and its largest that of the positive ones; else the sum of the heads.
void prepare_vectors(const AnchorIndex& x, const Choice& c, const float* q, float* out) {
    const int64_t numbers = c.heads * x.dim;
    if (by_head(x)) {
        for (int64_t i = 0; i < numbers; i++) out[i] = q[i] * c.scale;
        return;
    }
    const bool sides = x.type == QUEST || x.type == KEY_INT4;
    std::fill_n(out, sides ? 2 * x.dim : x.dim, 0.0f);
    for (int64_t h = 0; h < c.heads; h++)
        for (int64_t d = 0; d < x.dim; d++) {
            const float number = q[h * x.dim + d] * c.scale;
            if (!sides) out[d] += number;
            else out[number > 0 ? x.dim + d : d] += number;
        }
}

void prepare(Job& j, float* q, float* heads) {
    const AnchorIndex& x = j.x;
    const Choice& c = j.c;
    const int64_t size = j.query_heads * j.numbers(), numbers = c.heads * x.dim;
    for (int64_t row = 0; row < x.rows; row++) prepare_vectors(x, c, c.q + row * numbers, q + row * size);
    if (!j.short_list()) return;
    share_out(x.rows * c.heads, numbers * x.rows < 1 << 14 ? 1 : c.threads, false, [&](int64_t i) {
        float* head = heads + i * x.dim;
        float* turned = j.turned + i * x.dim;
        for (int64_t d = 0; d < x.dim; d++) head[d] = turned[d] = c.q[i * x.dim + d] * c.scale;
        j.run.turn(turned, x.dim);
        j.signs[i] = j.run.sign_table(turned, x.dim, j.tables + size_t(i) * table_bytes(x.dim));
        j.code_scales[i] = j.run.query_codes(turned, x.dim, j.codes + i * x.dim);
    });
}

void find_allowed(Job& j) {
    std::fill_n(j.allowed, j.sequences * j.c.blocks, uint8_t(1));
    if (j.c.allowed == nullptr) return;
    for (int64_t row = 0; row < j.x.rows; row++)
        for (int64_t b = 0; b < j.c.blocks; b++)
            if (!j.c.allowed[row * j.c.blocks + b]) j.allowed[row / j.together * j.c.blocks + b] = 0;
}

int64_t fewest_allowed(const Job& j) {
    int64_t fewest = j.c.blocks;
    for (int64_t s = 0; s < j.sequences; s++)
        fewest = std::min<int64_t>(fewest, std::count(j.allowed + s * j.c.blocks, j.allowed + (s + 1) * j.c.blocks, uint8_t(1)));
    return fewest;
}

// A row's blocks `first` to `first` + count by their vectors.
void scan_vectors(const Job& j, int64_t row, int64_t first, int64_t count) {
    const AnchorIndex& x = j.x;
    const float* q = j.q + row * j.query_heads * j.numbers();
    const uint16_t* vectors = x.anchors + (row * x.max_blocks + first) * x.each * x.dim;
    float* out = j.scores + row * j.c.blocks + first;
    if (!by_head(x)) return j.run.dots(vectors, count, j.numbers(), q, 1, out, size_t(count));
    float found[HEAD_BATCH][64];
    std::fill_n(out, count, 0.0f);
    for (int64_t b = 0; b < count; b++)
        for (int64_t h = 0; h < j.c.heads; h += HEAD_BATCH) {
            const int64_t heads = std::min<int64_t>(HEAD_BATCH, j.c.heads - h);
            float best[HEAD_BATCH] = {NOTHING, NOTHING, NOTHING, NOTHING};
            for (int64_t a = 0; a < x.each; a += 64) {
                const int64_t few = std::min<int64_t>(64, x.each - a);
                j.run.dots(vectors + (b * x.each + a) * x.dim, few, x.dim, q + h * x.dim, heads, found[0], 64);
                for (int64_t i = 0; i < heads; i++) best[i] = std::max(best[i], *std::max_element(found[i], found[i] + few));
            }
            for (int64_t i = 0; i < heads; i++) out[b] += best[i];
        }
}

// The same by their mean keys, for each head.
void scan_means(const Job& j, int64_t row, int64_t first, int64_t count) {
    const AnchorIndex& x = j.x;
    const int64_t head = j.row_head(row, 0);
    j.run.dots(x.mean + (row * x.max_blocks + first) * x.dim, count, x.dim, j.heads + head * x.dim, j.c.heads,
               j.means + head * j.c.blocks + first, size_t(j.c.blocks));
}

// The same by their signs, after the means: the largest score of a token, for each head.
void scan_signs(const Job& j, int64_t row, int64_t first, int64_t count) {
    const AnchorIndex& x = j.x;
    const uint8_t* allowed = j.allowed + row / j.together * j.c.blocks;
    const int64_t padded = x.padded();
    for (int64_t h = 0; h < j.c.heads; h += HEAD_BATCH) {
        const int heads = int(std::min<int64_t>(HEAD_BATCH, j.c.heads - h));
        const int64_t head = j.row_head(row, h);
        float centre[HEAD_BATCH], best[HEAD_BATCH];
        for (int i = 0; i < heads; i++) centre[i] = j.signs[head + i].centre;
        for (int64_t b = first; b < first + count; b++) {
            const int64_t at = row * x.max_blocks + b;
            if (allowed[b])
                j.run.signs({x.signs + at * padded * x.dim / 8, x.magnitude + at * padded, x.groups(), x.dim,
                             j.tables + size_t(head) * table_bytes(x.dim), centre, heads, best});
            for (int i = 0; i < heads; i++) {
                const int64_t to = (head + i) * j.c.blocks + b;
                j.largest[to] = allowed[b] ? j.means[to] + best[i] * j.signs[head + i].step : NOTHING;
            }
        }
    }
}

// Blocks `from` to `to` of a row's shortlist by their keys in 4 bits.
void scan_codes(Job& j, int64_t row, int64_t from, int64_t to) {
    const AnchorIndex& x = j.x;
    const int64_t padded = x.padded(), sequence = row / j.together;
    const int32_t* list = j.list + sequence * j.c.blocks;
    const auto codes = [&](int64_t i) { return x.codes + (row * x.max_blocks + list[i]) * padded * x.dim / 2; };
    const auto steps = [&](int64_t i) { return x.steps + (row * x.max_blocks + list[i]) * 2 * padded; };
    if (!part_scratch.reset(Scratch::room<float>(size_t(HEAD_BATCH * padded)))) {
        __atomic_store_n(&j.lacking, true, __ATOMIC_RELAXED);
        return;
    }
    float* room = part_scratch.take<float>(size_t(HEAD_BATCH * padded));
    for (int64_t h = 0; h < j.c.heads; h += HEAD_BATCH) {
        const int heads = int(std::min<int64_t>(HEAD_BATCH, j.c.heads - h));
        const int64_t head = j.row_head(row, h);
        for (int64_t i = from; i < to; i++) {
            float base[HEAD_BATCH], largest[HEAD_BATCH], sums[HEAD_BATCH];
            const bool more = i + 1 < to;
            for (int k = 0; k < heads; k++) base[k] = j.means[(head + k) * j.c.blocks + list[i]];
            j.run.codes({codes(i), steps(i), x.tokens, x.groups(), x.dim, j.codes + head * x.dim, j.code_scales + head, base, heads, room,
                         more ? codes(i + 1) : nullptr, more ? steps(i + 1) : nullptr, largest,
                         sums});
            for (int k = 0; k < heads; k++) {
                j.largest[(head + k) * j.c.blocks + i] = largest[k];
                j.sums[(head + k) * j.c.blocks + i] = sums[k];
            }
        }
    }
}

// What rows that choose together score, to the first of them.
void add_up(const Job& j, int64_t sequence, int64_t count) {
    float* first = j.scores + sequence * j.together * j.c.blocks;
    for (int64_t row = 1; row < j.together; row++)
        for (int64_t i = 0; i < count; i++) first[i] += first[row * j.c.blocks + i];
}

// Marks the `count` best of a sequence's allowed blocks, the later one where two are equal. There are as many.
void mark_best(const Job& j, int64_t sequence, const float* scores, int64_t count, uint8_t* marks) {
    const int64_t n = j.c.blocks;
    const uint8_t* allowed = j.allowed + sequence * n;
    int32_t* keys = j.keys + sequence * n;
    if (count < 1) return;
    for (int64_t i = 0; i < n; i++) {  // whole numbers in the order of the scores
        const float score = scores[i] + 0.0f;  // no -0
        int32_t bits;
        std::memcpy(&bits, &score, 4);
        keys[i] = allowed[i] ? std::max(bits ^ int32_t(uint32_t(bits >> 31) >> 1), INT32_MIN + 1) : INT32_MIN;
    }
    const int32_t least = j.run.reached(keys, n, count);
    int64_t left = count;
    for (int64_t i = 0; i < n; i++)
        if (keys[i] > least) {
            marks[i] = 1;
            left--;
        }
    for (int64_t i = n - 1; left > 0; i--)
        if (keys[i] == least) {
            marks[i] = 1;
            left--;
        }
}

// The blocks that are to be scored by keys in 4 bits: the best by QUEST, and the best by signs.
void shortlist(Job& j, int64_t sequence) {
    const int64_t n = j.c.blocks, first = sequence * j.together;
    uint8_t *allowed = j.allowed + sequence * n, *listed = j.listed + sequence * n;
    const int64_t there = std::count(allowed, allowed + n, uint8_t(1)), asked = std::max(j.c.count, LEAST_ASKED);
    if (j.c.count < 0 || QUEST_TIMES * asked >= there) {
        std::memcpy(listed, allowed, size_t(n));
    } else {
        std::fill_n(listed, n, uint8_t(0));
        add_up(j, sequence, n);
        mark_best(j, sequence, j.scores + first * n, QUEST_TIMES * asked, listed);
        std::fill_n(j.scores + first * n, n, 0.0f);
        for (int64_t row = first; row < first + j.together; row++)
            for (int64_t h = 0; h < j.c.heads; h++)
                j.run.add_shares(j.largest + j.row_head(row, h) * n, nullptr, n, j.rest(j.row_head(row, h)), j.scores + first * n);
        mark_best(j, sequence, j.scores + first * n, SIGN_TIMES * asked, listed);
    }
    int32_t *list = j.list + sequence * n, count = 0;
    for (int32_t b = 0; b < n; b++)
        if (listed[b]) list[count++] = b;
    j.listing[sequence] = count;
}

// A sequence's scores from those of its shortlist, to its first row.
void spread(const Job& j, int64_t sequence) {
    const int64_t n = j.c.blocks, first = sequence * j.together, count = j.listing[sequence];
    float* scores = j.scores + first * n;
    std::fill_n(scores, n, 0.0f);
    for (int64_t row = first; row < first + j.together; row++)
        for (int64_t h = 0; h < j.c.heads; h++) {
            const int64_t at = j.row_head(row, h) * n;
            j.run.add_shares(j.largest + at, j.sums + at, count, j.rest(j.row_head(row, h)), scores);
        }
    const int32_t* list = j.list + sequence * n;
    int64_t i = count - 1;  // from the end: a block's place is never before its place in the list
    for (int64_t b = n - 1; b >= 0; b--) scores[b] = i >= 0 && list[i] == b ? scores[i--] : NOTHING;
}

// Parts of [0, total) for each of `rows`, in steps of `step`; f(row, first, count).
template <class Function>
void in_parts(int64_t rows, int64_t total, int64_t step, int threads, bool long_job, Function f) {
    const int64_t wanted = threads <= 1 ? 1 : (threads * PARTS_A_THREAD + rows - 1) / rows;
    const int64_t size = std::max<int64_t>(1, (total + wanted * step - 1) / (wanted * step)) * step;
    const int64_t each = (total + size - 1) / size;
    share_out(rows * each, threads, long_job, [&](int64_t part) {
        const int64_t first = part % each * size;
        f(part / each, first, std::min(size, total - first));
    });
}

// By keys in 4 bits, the shortlist first.
void score_codes(Job& j) {
    const AnchorIndex& x = j.x;
    const int64_t n = j.c.blocks, token_bytes = x.dim / 2 + 4, block_bytes = x.tokens * token_bytes;
    int64_t most = 0;
    for (int64_t s = 0; s < j.sequences; s++) most = std::max<int64_t>(most, std::count(j.allowed + s * n, j.allowed + s * n + n, 1));
    const bool all = j.c.count < 0 || QUEST_TIMES * std::max(j.c.count, LEAST_ASKED) >= most;  // are scored by their keys
    in_parts(x.rows, n, 16, j.c.threads, x.rows * n * block_bytes / 4 >= LONG_BYTES, [&](int64_t row, int64_t first, int64_t count) {
        scan_means(j, row, first, count);
        if (all) return;
        scan_vectors(j, row, first, count);
        scan_signs(j, row, first, count);
    });
    share_out(j.sequences, j.sequences < 4 ? 1 : j.c.threads, false, [&](int64_t s) { shortlist(j, s); });
    const int64_t longest = *std::max_element(j.listing, j.listing + j.sequences);
    in_parts(x.rows, longest, 4, j.c.threads, x.rows * longest * block_bytes >= LONG_BYTES, [&](int64_t row, int64_t first, int64_t count) {
        scan_codes(j, row, first, std::min<int64_t>(first + count, j.listing[row / j.together]));
    });
    share_out(j.sequences, j.sequences < 4 ? 1 : j.c.threads, false, [&](int64_t s) { spread(j, s); });
}

// Scores of each sequence, to its first row.
void score(Job& j) {
    if (j.short_list()) return score_codes(j);
    const int64_t n = j.c.blocks, bytes = j.x.rows * n * j.x.each * j.x.dim * 2;
    in_parts(j.x.rows, n, 16, bytes < 1 << 16 ? 1 : j.c.threads, bytes >= LONG_BYTES,
             [&](int64_t row, int64_t first, int64_t count) { scan_vectors(j, row, first, count); });
    for (int64_t s = 0; s < j.sequences; s++) {
        add_up(j, s, n);
        float* scores = j.scores + s * j.together * n;
        for (int64_t b = 0; b < n; b++)
            if (!j.allowed[s * n + b]) scores[b] = NOTHING;
    }
}

// Pieces of one memory: asked for twice, first to add up what they take.
struct Pieces {
    Scratch& from;
    bool counting;
    size_t bytes = 0;

    template <class T>
    T* take(int64_t count) {
        bytes += Scratch::room<T>(size_t(count));
        return counting ? nullptr : from.take<T>(size_t(count));
    }
};

// Runs f(job) with memory for everything, scores in `out` or, where that is null, in some of it; false where memory is lacking.
template <class Function>
bool with_job(const AnchorIndex& x, const Choice& c, float* out, Function f) {
    const bool codes = x.type == KEY_INT4;
    const int64_t heads = codes ? x.rows * c.heads : 0, n = c.blocks;
    const int64_t together = c.shared > 0 ? c.shared : 1;
    Job j{x, c, kernels().anchors, together, x.rows / together, by_head(x) ? c.heads : 1};
    float *q = nullptr, *scaled = nullptr;
    for (const bool counting : {true, false}) {
        Pieces pieces{caller_scratch, counting};
        q = pieces.take<float>(x.rows * j.query_heads * j.numbers());
        j.scores = out;
        if (out == nullptr) j.scores = pieces.take<float>(x.rows * n);
        j.allowed = pieces.take<uint8_t>(j.sequences * n);
        j.listed = pieces.take<uint8_t>(j.sequences * n);
        j.keys = pieces.take<int32_t>(j.sequences * n);
        scaled = pieces.take<float>(heads * x.dim);
        j.turned = pieces.take<float>(heads * x.dim);
        j.tables = pieces.take<uint8_t>(heads * int64_t(table_bytes(x.dim)));
        j.signs = pieces.take<SignScale>(heads);
        j.codes = pieces.take<int8_t>(heads * x.dim);
        j.code_scales = pieces.take<CodeScale>(heads);
        j.means = pieces.take<float>(heads * n);
        j.largest = pieces.take<float>(heads * n);
        j.sums = pieces.take<float>(heads * n);
        j.list = pieces.take<int32_t>(codes ? j.sequences * n : 0);
        j.listing = pieces.take<int32_t>(codes ? j.sequences : 0);
        if (counting && !caller_scratch.reset(pieces.bytes)) return false;
    }
    j.q = q;
    j.heads = scaled;
    find_allowed(j);
    prepare(j, q, scaled);
    f(j);
    return !j.lacking;
}

}  // namespace

bool score_blocks(const AnchorIndex& x, const Choice& c, float* out) {
    return with_job(x, c, out, [&](Job& j) {
        score(j);
        for (int64_t row = 0; row < x.rows; row++)
            if (const int64_t first = row / j.together * j.together; first != row)
                std::memcpy(out + row * c.blocks, out + first * c.blocks, size_t(c.blocks) * sizeof(float));
    });
}

int64_t choose_blocks(const AnchorIndex& x, const Choice& c, int32_t* out) {
    int64_t count = 0;
    const bool done = with_job(x, c, nullptr, [&](Job& j) {
        const int64_t n = c.blocks;
        count = std::min(c.count, fewest_allowed(j));
        std::fill_n(j.listed, j.sequences * n, uint8_t(count == n));
        if (count < n && count > 0) {
            score(j);
            std::fill_n(j.listed, j.sequences * n, uint8_t(0));
            for (int64_t s = 0; s < j.sequences; s++) mark_best(j, s, j.scores + s * j.together * n, count, j.listed + s * n);
        }
        for (int64_t row = 0; row < x.rows; row++) {
            const uint8_t* marks = j.listed + row / j.together * n;
            for (int32_t b = 0; b < n; b++)
                if (marks[b]) *out++ = b;
        }
    });
    return done ? count : -1;
}

}  // namespace ktopt
