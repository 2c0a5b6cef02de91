// Anchors under sanitizers, for sanitize_kernels.cpp: indexes in buffers that are exactly as large as they must be, blocks put in
// one after the other, scores and choices of every type; several threads find what one does.
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "anchors.h"
#include "types.h"

using namespace ktopt;

bool check_anchors();

namespace {

struct Memory {
    std::unique_ptr<uint16_t[]> anchors, mean, steps, magnitude;
    std::unique_ptr<uint8_t[]> codes, signs;
    AnchorIndex index;

    Memory(int type, int64_t each, int64_t rows, int64_t blocks, int64_t tokens, int64_t dim) {
        const auto all = size_t(rows * blocks);
        index = {type, each, rows, blocks, tokens, dim, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
        const auto padded = size_t(index.padded()), numbers = size_t(dim);
        anchors.reset(index.anchors = new uint16_t[all * size_t(each) * numbers]());
        mean.reset(index.mean = new uint16_t[all * numbers]());
        codes.reset(index.codes = new uint8_t[all * padded * numbers / 2]());
        steps.reset(index.steps = new uint16_t[all * 2 * padded]());
        signs.reset(index.signs = new uint8_t[all * padded * numbers / 8]());
        magnitude.reset(index.magnitude = new uint16_t[all * padded]());
    }
};

// Anchors of all blocks, the first one alone; of types that aren't made from keys, some vectors.
bool fill(const Memory& memory, const std::vector<float>& keys, int threads) {
    const AnchorIndex& x = memory.index;
    const int64_t block = x.tokens * x.dim;
    if (x.type == FIXED || x.type == DYNAMIC) {
        for (int64_t i = 0; i < x.rows * x.max_blocks * x.each * x.dim; i++) x.anchors[i] = uint16_t(0x3000 + i % 0x0c00);
        return true;
    }
    const auto* data = reinterpret_cast<const uint8_t*>(keys.data());
    const auto* rest = reinterpret_cast<const uint8_t*>(keys.data() + block);
    return add_anchors(x, {F32, data, x.max_blocks * block, block, x.dim, 0, 1, 65504}, threads) == -1 &&
           add_anchors(x, {F32, rest, x.max_blocks * block, block, x.dim, 1, x.max_blocks - 1, 65504}, threads) == -1 &&
           add_anchors(x, {F32, data, x.max_blocks * block, block, x.dim, 0, x.max_blocks, 1e-3f}, threads) == 0;
}

bool check(int type, int64_t tokens, int64_t dim, int64_t heads, int64_t blocks, int threads) {
    constexpr int64_t ROWS = 4;
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> keys(size_t(ROWS * blocks * tokens * dim)), q(size_t(ROWS * heads * dim)), rest(size_t(ROWS * heads));
    for (float& number : keys) number = normal(generator);
    for (float& number : q) number = normal(generator);
    for (float& number : rest) number = normal(generator);
    std::vector<uint8_t> allowed(size_t(ROWS * blocks));
    for (size_t i = 0; i < allowed.size(); i++) allowed[i] = generator() % 8 != 0;
    const int64_t each = type == QUEST || type == KEY_INT4 ? 2 : type == FIXED || type == DYNAMIC ? 3 : 1;
    const Memory memory(type, each, ROWS, blocks, tokens, dim);
    if (refuses(memory.index) != nullptr || !fill(memory, keys, threads)) return false;
    for (const int64_t shared : {0, 2})
        for (const uint8_t* mask : {static_cast<const uint8_t*>(nullptr), static_cast<const uint8_t*>(allowed.data())})
            for (const int64_t count : {int64_t(1), blocks / 3, blocks}) {
                Choice choice{blocks, q.data(), heads, 0.125f, count, shared, mask, mask ? rest.data() : nullptr, threads};
                std::vector<int32_t> picks(size_t(ROWS * count)), alone(picks);
                std::vector<float> scores(size_t(ROWS * blocks)), again(scores);
                const int64_t found = choose_blocks(memory.index, choice, picks.data());
                bool fine = score_blocks(memory.index, choice, scores.data());
                choice.threads = 1;
                fine = fine && found == choose_blocks(memory.index, choice, alone.data()) && picks == alone;
                fine = fine && score_blocks(memory.index, choice, again.data());
                if (!fine || std::memcmp(scores.data(), again.data(), scores.size() * sizeof(float)) != 0) return false;
            }
    return true;
}

}  // namespace

bool check_anchors() {
    for (int type = 0; type < ANCHOR_TYPES; type++)
        if (!check(type, 20, 48, 5, 9, 3) || !check(type, 32, 64, 3, 70, 3) || !check(type, 16, 1024, 17, 6, 2)) return false;
    return check(KEY_INT4, 16, 16, 1, 150, 3);
}
