// Runs every CPU kernel on buffers that are exactly as large as they must be, under sanitizers: `make sanitize` builds and starts
// it. Blocks are random bits, scales included, so results may be anything; reading past a buffer, or a race, ends the program.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "attention_decode.h"
#include "block_rows.h"
#include "experts.h"
#include "gemm.h"
#include "layer.h"
#include "mla.h"

using namespace ktopt;

bool check_anchors();  // sanitize_anchors.cpp

namespace {

std::mt19937 generator(1);

std::unique_ptr<uint8_t[]> random_bytes(size_t count) {
    std::unique_ptr<uint8_t[]> bytes(new uint8_t[count]);
    for (size_t i = 0; i < count; i++) bytes[i] = uint8_t(generator());
    return bytes;
}

// Whether both are about the same, or neither is finite.
bool alike(float a, float b, float scale) {
    if (!std::isfinite(a) || !std::isfinite(b)) return std::isfinite(a) == std::isfinite(b);
    return std::fabs(a - b) <= scale * 1e-4f;
}

// `result` with the product added once more. Empty where several threads find something else than one.
std::vector<float> doubled(const Matrix& weight, const float* x, int64_t tokens, const std::vector<float>& result, int threads) {
    const auto stride = size_t(is_float(weight.kind) ? weight.columns : activation_blocks(weight.columns));
    std::vector<Activations> quantized(size_t(tokens) * stride);
    const void* operand = x;
    if (!is_float(weight.kind)) {
        quantize_tokens(x, false, tokens, weight.columns, quantized.data(), threads);
        operand = quantized.data();
    }
    std::vector<float> alone(result), shared(result);
    product(weight, operand, stride, tokens, alone.data(), size_t(weight.rows), true, 0, weight.rows);
    shared_product(weight, operand, stride, tokens, shared.data(), size_t(weight.rows), true, threads);
    const bool same = std::memcmp(alone.data(), shared.data(), alone.size() * sizeof(float)) == 0;
    return same ? alone : std::vector<float>();
}

// One matrix: products with bfloat16 and float32, weights as numbers, the look at its scales. Results are the scalar kernels'.
bool check(int kind, int64_t rows, int64_t columns, int64_t tokens, int threads) {
    const Layout layout = layout_of(kind);
    const size_t bytes = size_t(rows * (columns / layout.elements) * layout.bytes);
    const auto data = random_bytes(bytes);
    const Matrix weight{kind, data.get(), rows, columns};
    if (refuses(kind, rows, columns, int64_t(bytes)) != nullptr) return false;
    first_bad_row(weight, threads);
    std::vector<float> x(size_t(tokens * columns)), numbers(size_t(rows * columns)), out(size_t(tokens * rows)), expected(out);
    std::vector<uint16_t> halves(x.size(), 0x3f80), narrow(numbers.size());
    std::normal_distribution<float> normal;
    for (float& value : x) value = normal(generator);
    dequantize(weight, numbers.data(), false, threads);
    dequantize(weight, narrow.data(), true, threads);
    const int64_t ids[] = {rows - 1, 0, 0}, outside[] = {0, rows};
    std::vector<float> chosen(size_t(3 * columns));
    if (ktopt::rows(weight, ids, 3, chosen.data(), false, threads) != -1 || ktopt::rows(weight, outside, 2, chosen.data(), false, 1) != 1)
        return false;
    bool fine = linear(weight, halves.data(), true, tokens, out.data(), rows, threads) &&
                linear(weight, x.data(), false, tokens, out.data(), rows, threads);
    const std::vector<float> twice = doubled(weight, x.data(), tokens, out, threads);
    if (!fine || twice.empty()) return false;
    const char* isa = kernels().name;
    fine = fine && set_isa("scalar") && linear(weight, x.data(), false, tokens, expected.data(), rows, 1) && set_isa(isa);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) {
            float scale = 0;
            for (int64_t c = 0; c < columns; c++) scale += std::fabs(numbers[size_t(r * columns + c)] * x[size_t(t * columns + c)]);
            const float found = out[size_t(t * rows + r)], wanted = expected[size_t(t * rows + r)];
            fine = fine && (!std::isfinite(scale) || alike(found, wanted, scale + 1e-20f));
            fine = fine && (!std::isfinite(2 * scale) || alike(twice[size_t(t * rows + r)], 2 * found, scale + 1e-20f));
        }
    return fine;
}

bool check_all() {
    for (int kind = 0; kind < KINDS; kind++) {
        const Layout layout = layout_of(kind);
        if (layout.bytes == 0) continue;
        for (int64_t blocks : {1, 2, 3, 5, 7, 8, 9, 19})
            for (int64_t tokens : {1, 2, 3, 6})
                if (!check(kind, 1 + blocks % 5, blocks * (layout.elements == 1 ? 7 : layout.elements), tokens, 1)) {
                    std::printf("%s: type %d differs, %d blocks, %d tokens\n", kernels().name, kind, int(blocks), int(tokens));
                    return false;
                }
        const int64_t columns = 9 * (layout.elements == 1 ? 7 : layout.elements);
        if (!check(kind, 45, columns, 13, 3)) {
            std::printf("%s: type %d differs, 45 rows, 13 tokens\n", kernels().name, kind);
            return false;
        }
    }
    return true;
}

// Latent attention on a cache of scattered pages and its matrices, in buffers that end where they must.
bool check_latents(int kind, int64_t page_tokens, int64_t latent, int64_t rope, int64_t heads, int threads) {
    const LatentShape shape = {heads, 32, rope, latent, 48};
    const int64_t pages = 300 / page_tokens + 1, width = shape.width(), per_head = shape.nope + shape.value;
    const Layout layout = layout_of(kind);
    const auto data = random_bytes(size_t(pages * page_tokens * (width / layout.elements) * layout.bytes));
    std::vector<int32_t> table;
    for (int64_t page = pages; page-- > 0;) table.push_back(int32_t(page));
    const LatentRow rows[] = {{table.data(), 0, 300}, {table.data(), 5, 299}, {nullptr, 290, 300}, {table.data() + 1, 7, 7}};
    const LatentCache cache = {kind, data.get(), pages, page_tokens};
    if (refuses(shape, cache, rows, 4) != nullptr) return false;
    const LatentRow beyond = {nullptr, 0, pages * page_tokens + 1};
    if (refuses(shape, cache, &beyond, 1) == nullptr) return false;
    const auto kv_b = random_bytes(size_t(heads * per_head * latent) * 34 / 32);
    const int64_t row_bytes = latent / 32 * 34, head_bytes = per_head * row_bytes;
    const HeadMatrices keys = {Q8_0, kv_b.get(), shape.nope, latent, head_bytes, true};
    const HeadMatrices by_rows = {Q8_0, kv_b.get(), latent, shape.nope, latent * 34};
    const HeadMatrices values = {Q8_0, kv_b.get() + shape.nope * row_bytes, shape.value, latent, head_bytes};
    std::vector<float> query(size_t(4 * heads * width), 0.5f), out(size_t(4 * heads * latent)), sums(size_t(4 * heads));
    return attend_latents(shape, cache, rows, 4, query.data(), 0.1f, out.data(), sums.data(), threads) &&
           attend_absorbed(shape, cache, rows, 4, query.data(), keys, values, 0.1f, out.data(), threads) &&
           attend_absorbed(shape, cache, rows, 4, query.data(), by_rows, values, 0.1f, out.data(), threads);
}

bool check_all_latents() {
    for (int kind : {int(F32), int(F16), int(BF16), int(Q8_0)})
        for (int64_t page_tokens : {1, 7, 64, 200})
            for (int64_t heads : {1, 16, 21})
                if (!check_latents(kind, page_tokens, 64, 32, heads, 1 + int(heads % 3))) {
                    std::printf("%s: latents of type %d, pages of %d\n", kernels().name, kind, int(page_tokens));
                    return false;
                }
    return true;
}

// A prefill of 9 query heads on 3 in buffers of exactly its size: the scalar kernels' results, but for bfloat16's rounding.
bool check_attention(int kind, int64_t key_dim, int64_t value_dim, int64_t tokens, int64_t first, int64_t start, int64_t window,
                     int64_t end = CAUSAL) {
    const AttentionShape shape = {9, 3, key_dim, value_dim, 0.1f, window, end};
    const int64_t bytes = layout_of(kind).bytes, keys = first + tokens;
    std::normal_distribution<float> normal;
    const auto numbers = [&](int64_t count) {
        std::unique_ptr<uint8_t[]> made(new uint8_t[size_t(count * bytes)]);
        for (int64_t i = 0; i < count; i++) {
            const float x = normal(generator);
            const uint16_t narrow = uint16_t(kind == F16 ? 0x3800 | (generator() & 0x83ff) : 0x3f00 | (generator() & 0x80ff));
            std::memcpy(made.get() + i * bytes, kind == F32 ? static_cast<const void*>(&x) : &narrow, size_t(bytes));
        }
        return made;
    };
    const auto cache_keys = numbers(3 * keys * key_dim), cache_values = numbers(3 * keys * value_dim);
    const KeyValues cache = {kind, cache_keys.get(), cache_values.get(), keys * key_dim * bytes, keys * value_dim * bytes};
    std::vector<float> q(size_t(tokens * 9 * key_dim)), out(size_t(tokens * 9 * value_dim)), expected(out), sums(size_t(tokens * 9));
    for (float& value : q) value = normal(generator);
    if (refuses(shape, kind, tokens, first, start) != nullptr) return false;
    const auto run = [&](std::vector<float>& to, int threads) {
        return prefill_attention(shape, cache, q.data(), 9 * key_dim, tokens, first, start, to.data(), 9 * value_dim, threads, sums.data());
    };
    const char* isa = kernels().name;
    bool fine = run(out, 2) && set_isa("scalar") && run(expected, 1) && set_isa(isa);
    for (size_t i = 0; i < out.size(); i++) fine = fine && std::fabs(out[i] - expected[i]) <= 0.1f;
    return fine;
}

bool check_attentions() {
    for (const int kind : {F32, F16, BF16})
        for (const int64_t tokens : {1, 2, 17, 90})
            for (const int64_t first : {0, 131})
                if (!check_attention(kind, 24, 8, tokens, first, 0, 0) || !check_attention(kind, 64, 40, tokens, first, 5, 33) ||
                    !check_attention(kind, 32, 16, tokens, first, 1, 0, (first + tokens) / 2)) {
                    std::printf("%s: attention on type %d differs, %d tokens\n", kernels().name, kind, int(tokens));
                    return false;
                }
    return true;
}

// Blocks in buffers of exactly their size: packed, unpacked, and attended to by two rows, the second of which sees half of it, with a
// float32 segment in between. Results are the scalar kernels'.
bool check_blocks(int kind, int64_t tokens, int64_t key_dim, int64_t value_dim, int64_t group, bool shared) {
    const Layout layout = layout_of(kind);
    const int64_t keys_bytes = tokens * key_dim / layout.elements * layout.bytes;
    const int64_t bytes = keys_bytes + (shared ? 0 : tokens * value_dim / layout.elements * layout.bytes);
    const BlockShape shape = {kind, tokens, key_dim, value_dim, shared ? 0 : keys_bytes, bytes, shared};
    std::normal_distribution<float> normal;
    std::vector<float> keys(size_t(2 * tokens * key_dim)), values(size_t(2 * tokens * value_dim)), q(size_t(2 * group * key_dim));
    for (std::vector<float>* all : {&keys, &values, &q})
        for (float& x : *all) x = normal(generator);
    const auto of = [&](std::vector<float>& x, int64_t dim) {
        return TokenRows{F32, reinterpret_cast<uint8_t*>(x.data()), tokens * dim * 4, dim * 4};
    };
    std::unique_ptr<uint8_t[]> packed(new uint8_t[size_t(2 * bytes)]);
    if (refuses(shape) != nullptr ||
        pack_blocks(shape, 2, of(keys, key_dim), of(values, value_dim), packed.get(), bytes, 2) != Packed::DONE)
        return false;
    const int64_t addresses[] = {int64_t(uintptr_t(packed.get())), int64_t(uintptr_t(packed.get() + bytes))};
    std::vector<float> wide_keys(keys.size()), wide_values(values.size());
    auto *to_keys = reinterpret_cast<uint8_t*>(wide_keys.data()), *to_values = reinterpret_cast<uint8_t*>(wide_values.data());
    if (!unpack_blocks(shape, 2, 1, addresses, 1, F32, to_keys, tokens * key_dim * 4, to_values, tokens * value_dim * 4, 2)) return false;
    const auto segment = [&](int64_t block, int64_t count) {
        const uint8_t* at = packed.get() + block * bytes;
        return Segment{kind, at, shared ? at : at + keys_bytes, count};
    };
    const Segment segments[] = {segment(0, tokens), {F32, to_keys, to_values, tokens}, segment(1, tokens), segment(1, tokens / 2)};
    const int64_t first[] = {0, 3, 4};
    const RowsShape rows = {2, 2, group, key_dim, value_dim, 0.1f};
    std::vector<float> out(size_t(2 * group * value_dim)), sums(size_t(2 * group)), expected(out), expected_sums(sums);
    const auto run = [&](std::vector<float>& to, std::vector<float>& log_sum, int threads) {
        return attend_segments(rows, segments, first, q.data(), 0, to.data(), 0, log_sum.data(), threads);
    };
    const char* isa = kernels().name;
    bool fine = run(out, sums, 3) && set_isa("scalar") && run(expected, expected_sums, 1) && set_isa(isa);
    for (size_t i = 0; i < out.size(); i++) fine = fine && std::fabs(out[i] - expected[i]) <= 1e-4f;
    for (size_t i = 0; i < sums.size(); i++) fine = fine && (sums[i] == expected_sums[i] || std::fabs(sums[i] - expected_sums[i]) <= 1e-4f);
    return fine;
}

bool check_all_blocks() {
    for (const int kind : {F32, F16, BF16, Q8_0, Q4_0})
        for (const int64_t tokens : {1, 16, 150, 1500})
            for (const int64_t group : {1, 3, 6})
                if (!check_blocks(kind, tokens, 64, 32, group, false) || !check_blocks(kind, tokens, 96, 64, group, true)) {
                    std::printf("%s: blocks of type %d differ, %d tokens\n", kernels().name, kind, int(tokens));
                    return false;
                }
    return true;
}

// A layer of experts of one type, with a shared one; any number of threads gives the same bits.
bool check_experts(int kind, int64_t hidden, int64_t inner, int64_t tokens, int64_t each) {
    std::vector<std::unique_ptr<uint8_t[]>> memory;
    const auto matrix = [&](int64_t rows, int64_t columns) {
        const Layout layout = layout_of(kind);
        memory.push_back(random_bytes(size_t(rows * (columns / layout.elements) * layout.bytes)));
        return Matrix{kind, memory.back().get(), rows, columns};
    };
    const auto expert = [&](int64_t size) { return Expert{matrix(size, hidden), matrix(size, hidden), matrix(hidden, size)}; };
    const Experts experts{SILU, {expert(inner), expert(inner), expert(inner)}, true, expert(2 * inner)};
    std::vector<float> x(size_t(tokens * hidden), 0.25f), weights(size_t(tokens * each), 0.5f), share(size_t(tokens), 0.5f);
    std::vector<int32_t> chosen(weights.size());
    for (int32_t& number : chosen) number = int32_t(generator() % 3);
    const Hidden given{tokens, x.data(), false, nullptr};
    const Choices choices{each, chosen.data(), false, weights.data(), share.data()};
    std::vector<float> out[2];
    for (int i = 0; i < 2; i++) {
        out[i].resize(x.size());
        if (run_experts(experts, given, choices, out[i].data(), hidden, i == 1, 1 + 2 * i).status != ExpertsResult::DONE) return false;
    }
    if (std::memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(float)) != 0) return false;
    if (chosen.empty()) return true;
    chosen.back() = 3;
    const ExpertsResult result = run_experts(experts, given, choices, out[0].data(), hidden, false, 2);
    return result.status == ExpertsResult::NO_SUCH_EXPERT && result.place == int64_t(chosen.size()) - 1;
}

bool check_all_experts() {
    for (int kind : {int(F32), int(BF16), int(Q4_0), int(Q8_0), int(Q4_K), int(Q6_K)}) {
        const int64_t block = layout_of(kind).elements, size = block == 1 ? 9 : block;
        for (int64_t tokens : {1, 3, 20, 70})
            if (!check_experts(kind, 2 * size, 3 * size, tokens, tokens % 3)) {
                std::printf("%s: experts of type %d differ, %d tokens\n", kernels().name, kind, int(tokens));
                return false;
            }
    }
    return true;
}

// Several threads of the program call at once, each with a job for several threads.
bool check_threads() {
    bool fine[3] = {};
    const auto data = random_bytes(3000 * 18 * 20);
    const Matrix weight{Q4_1, data.get(), 3000, 576};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; caller++)
        callers.emplace_back([&, caller] {
            std::vector<float> x(576, 0.5f), out(3000);
            bool all = true;
            for (int i = 0; i < 200; i++) all = linear(weight, x.data(), false, 1, out.data(), 3000, 1 + i % 4) && all;
            fine[caller] = all;
        });
    for (std::thread& caller : callers) caller.join();
    return fine[0] && fine[1] && fine[2];
}

// Memory of a layer under test, which lives as long as it.
struct Held {
    std::vector<std::unique_ptr<uint8_t[]>> bytes;
    std::vector<std::vector<float>> floats;

    Matrix matrix(int kind, int64_t rows, int64_t columns) {
        const Layout layout = layout_of(kind);
        bytes.push_back(random_bytes(size_t(rows * (columns / layout.elements) * layout.bytes)));
        return {kind, bytes.back().get(), rows, columns};
    }

    Norm norm(int64_t count) {
        floats.emplace_back(size_t(count), 0.5f);
        return {floats.back().data(), 1e-6f};
    }

    Bundle bundle(std::initializer_list<Matrix> matrices, bool biased = false) {
        Bundle made;
        for (const Matrix& m : matrices) made.add({m, made.width(), biased ? norm(m.rows).weight : nullptr});
        return made;
    }
};

constexpr int64_t HIDDEN = 256, INNER = 96, HEADS = 4, KV_HEADS = 2, DIM = 32, NOPE = 32, ROPE = 16, LATENT = 64, VALUE = 32, RANK = 64;

void make_mlp(Held& held, Layer& layer, bool routed, Experts& experts) {
    if (!routed) {
        layer.mlp.intermediate = INNER;
        layer.mlp.gate_up = held.bundle({held.matrix(Q4_K, INNER, HIDDEN), held.matrix(Q8_0, INNER, HIDDEN)});
        layer.mlp.down = held.bundle({held.matrix(Q4_1, HIDDEN, INNER)}, true);
        return;
    }
    for (int e = 0; e < 6; e++)
        experts.routed.push_back({held.matrix(Q4_K, INNER, HIDDEN), held.matrix(Q4_K, INNER, HIDDEN), held.matrix(Q8_0, HIDDEN, INNER)});
    experts.has_shared = true;
    experts.shared = {held.matrix(Q6_K, INNER, HIDDEN), held.matrix(Q8_0, INNER, HIDDEN), held.matrix(Q5_0, HIDDEN, INNER)};
    layer.routed.experts = &experts;
    layer.routed.gated = true;
    layer.routed.routing = {6, 2, true, true, 1.5f, held.norm(6).weight, 3, 2, true};
    layer.routed.products = held.bundle({held.matrix(F32, 6, HIDDEN), held.matrix(Q8_0, 1, HIDDEN)});
}

Layer make_layer(Held& held, bool latent, bool routed, Experts& experts) {
    Layer layer;
    layer.hidden = HIDDEN;
    layer.before_attention = held.norm(HIDDEN);
    layer.before_mlp = held.norm(HIDDEN);
    layer.after_mlp = held.norm(HIDDEN);
    if (latent) {
        LatentAttention& a = layer.latent;
        a.shape = {HEADS, NOPE, ROPE, LATENT, VALUE};
        a.q_rank = RANK;
        a.pairing = NEIGHBOURS_APART;
        a.scale = 0.1f;
        a.q_norm = held.norm(RANK);
        a.latent_norm = held.norm(LATENT);
        a.first = held.bundle({held.matrix(Q8_0, RANK, HIDDEN), held.matrix(Q4_K, LATENT + ROPE, HIDDEN)});
        a.second = held.bundle({held.matrix(Q4_0, HEADS * (NOPE + ROPE), RANK)});
        a.output = held.bundle({held.matrix(Q8_0, HIDDEN, HEADS * VALUE)});
        const Matrix keys = held.matrix(Q8_0, HEADS * LATENT, NOPE), values = held.matrix(Q8_0, HEADS * VALUE, LATENT);
        a.keys = {Q8_0, keys.data, LATENT, NOPE, LATENT * (NOPE / 32) * 34};
        a.values = {Q8_0, values.data, VALUE, LATENT, VALUE * (LATENT / 32) * 34};
    } else {
        Attention& a = layer.attention;
        a.heads = HEADS, a.kv_heads = KV_HEADS, a.head_dim = DIM, a.rotary_dim = DIM, a.window = 7;
        a.scale = 0.1f;
        a.q_norm = held.norm(DIM);
        a.qkv = held.bundle({held.matrix(Q4_K, HEADS * DIM, HIDDEN), held.matrix(Q8_0, KV_HEADS * DIM, HIDDEN),
                             held.matrix(F16, KV_HEADS * DIM, HIDDEN)}, true);
        a.output = held.bundle({held.matrix(Q5_1, HIDDEN, HEADS * DIM)});
    }
    make_mlp(held, layer, routed, experts);
    return layer;
}

// A prompt and a token after it, of two sequences, through one layer: memory is what counts.
bool check_layer(bool latent, bool routed, int kind, int threads) {
    constexpr int64_t BATCH = 2, PAGE = 4, PAGES = 8;
    Held held;
    held.floats.reserve(64);
    Experts experts{SILU, {}, false, {}};
    const Layer layer = make_layer(held, latent, routed, experts);
    const int64_t item = layout_of(kind).bytes, capacity = 14, rotary = latent ? ROPE : DIM;
    std::vector<uint8_t> keys(size_t(BATCH * KV_HEADS * capacity * DIM * item)), values(keys);
    std::vector<uint8_t> pages(size_t(PAGES * PAGE * (LATENT + ROPE) * item));
    const std::vector<int32_t> table = {3, 0, 5, 7, 1, 2, 4, 6};
    const std::vector<int64_t> starts = {0, 2};
    int64_t past = 0;
    for (const int64_t tokens : {9, 1, 3}) {
        std::vector<float> x(size_t(BATCH * tokens * HIDDEN), 0.25f), cos(size_t(tokens * rotary), 0.5f), sin(cos);
        const KeyValueCache cache{kind, keys.data(), values.data(), capacity, past};
        const PagedLatents latents{{kind, pages.data(), PAGES, PAGE}, table.data(), 4, past};
        const Outcome outcome = run(layer, {x.data(), BATCH, tokens, cos.data(), sin.data(), true, latent ? nullptr : &cache,
                                            latent ? &latents : nullptr, starts.data(), threads});
        if (outcome == Outcome::no_memory) return false;
        past += tokens;
    }
    return true;
}

// Sequences in pages: a piece of a prompt and tokens that decode, in one run.
bool check_pages(bool latent, bool routed, int kind, int threads) {
    constexpr int64_t PAGE = 16, PAGES = 7, SEQUENCES = 3;
    Held held;
    held.floats.reserve(64);
    Experts experts{SILU, {}, false, {}};
    const Layer layer = make_layer(held, latent, routed, experts);
    const int64_t item = layout_of(kind).bytes, rotary = latent ? ROPE : DIM;
    std::vector<uint8_t> keys(size_t(PAGES * KV_HEADS * PAGE * DIM * item)), values(keys);
    std::vector<uint8_t> pages(size_t(PAGES * PAGE * (LATENT + ROPE) * item));
    const std::vector<int32_t> one = {5, 0}, two = {3, 6, 1}, three = {2, 4};
    const int32_t* const tables[] = {one.data(), two.data(), three.data()};
    std::vector<int64_t> pasts(SEQUENCES);
    for (const auto& counts : {std::vector<int64_t>{15, 29, 1}, {1, 1, 5}, {1, 17, 1}, {1, 1, 1}}) {
        std::vector<int64_t> firsts = {0};
        for (const int64_t count : counts) firsts.push_back(firsts.back() + count);
        const int64_t rows = firsts.back();
        std::vector<float> x(size_t(rows * HIDDEN), 0.25f), cos(size_t(rows * rotary), 0.5f), sin(cos);
        const Ragged ragged{SEQUENCES, firsts.data(), pasts.data(), tables, PAGE, pasts[0] % 2 == 0};
        const PagedKeyValues cache{kind, keys.data(), values.data(), PAGES};
        const PagedLatents latents{{kind, pages.data(), PAGES, PAGE}, nullptr, 0, 0};
        Run r{x.data(), 1, rows, cos.data(), sin.data(), true, nullptr, latent ? &latents : nullptr, nullptr, threads};
        r.ragged = &ragged;
        r.pages = latent ? nullptr : &cache;
        if (run(layer, r) == Outcome::no_memory) return false;
        for (size_t s = 0; s < SEQUENCES; s++) pasts[s] += counts[s];
    }
    return true;
}

bool check_layers() {
    for (const bool latent : {false, true})
        for (const bool routed : {false, true})
            for (const int kind : {F32, F16, BF16})
                if (!check_layer(latent, routed, kind, 3) || !check_pages(latent, routed, kind, 3)) return false;
    return true;
}

}  // namespace

int main() {
    for (const char* isa : {"avx512bf16", "avx512vnni", "avx512", "avx2", "scalar"}) {
        if (!set_isa(isa)) {
            std::printf("%s: not on this CPU\n", isa);
            continue;
        }
        if (!check_all() || !check_attentions() || !check_all_latents() || !check_all_experts() || !check_layers() || !check_threads())
            return 1;
        if (!check_anchors() || !check_all_blocks()) return 1;
        std::printf("%s: fine\n", isa);
    }
    return 0;
}
