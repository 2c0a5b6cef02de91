#include "experts.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gemm.h"
#include "pool.h"
#include "scratch.h"

namespace ktopt {
namespace {

constexpr int64_t LEAST_BYTES = 24 << 10;  // what a part reads at least, as in linear.cpp
constexpr int PARTS_A_THREAD = 8;
constexpr int64_t TOKENS_TOGETHER = 64;  // their activations and results stay in a core's cache beside the rows that they meet
constexpr int64_t GROUP = 32;            // activations that share a scale; rows of gate and up are shared out in such steps

// the caller's, which all threads read
thread_local Scratch plan_scratch, pieces_scratch, floats_scratch, quantized_scratch, inner_scratch;
thread_local Scratch gathered_scratch, product_scratch;  // each thread's own

// Room for `count` of T, all that the scratch holds; null where there is no memory.
template <class T>
T* room(Scratch& scratch, size_t count) {
    return scratch.reset(Scratch::room<T>(count)) ? scratch.take<T>(count) : nullptr;
}

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Rows [begin, begin + count) as a matrix.
Matrix rows_of(const Matrix& w, int64_t begin, int64_t count) {
    return {w.kind, w.data + size_t(begin) * size_t(row_bytes(w)), count, w.columns};
}

// Calls f(first, count) for a group's tokens in blocks of about the same size.
template <class Function>
void in_blocks(int64_t tokens, Function f) {
    const int64_t blocks = (tokens + TOKENS_TOGETHER - 1) / TOKENS_TOGETHER;
    for (int64_t b = 0; b < blocks; b++) f(tokens * b / blocks, tokens * (b + 1) / blocks - tokens * b / blocks);
}

bool quantizes(const Expert& expert) { return !is_float(expert.gate.kind) || !is_float(expert.up.kind); }
bool takes_floats(const Expert& expert) { return is_float(expert.gate.kind) || is_float(expert.up.kind); }

// One expert and the tokens that chose it, `count` places from `first` on in the order of experts.
struct Group {
    const Expert* expert;
    int64_t first, count;
    size_t inner_at;  // where its activations of the inner layer lie, in bytes

    bool inner_floats() const { return is_float(expert->down.kind); }
    int64_t inner() const { return expert->down.columns; }
    size_t token_bytes() const {
        return inner_floats() ? size_t(rounded_up(inner(), 16)) * sizeof(float)
                              : size_t(activation_blocks(inner())) * sizeof(Activations);
    }
    // What its gate and up cost: bytes read, and products.
    int64_t row_cost() const { return (row_bytes(expert->gate) + row_bytes(expert->up)) * (2 + count) / 2; }
};

// Rows [begin, begin + rows) of a group's gate and up.
struct Piece {
    const Group* group;
    int64_t begin, rows;
};

// A call: what was asked, in the order of experts.
class Call {
public:
    Call(const Experts& experts, const Hidden& x, const Choices& choices, float* out, int64_t out_stride, bool add, int threads)
        : isa_(kernels()), experts_(experts), x_(x), choices_(choices), out_(out), out_stride_(out_stride), add_(add),
          threads_(threads), hidden_(experts.hidden()), blocks_(activation_blocks(hidden_)) {}

    ExpertsResult run() {
        const int64_t bad = check();
        if (bad >= 0) return {ExpertsResult::NO_SUCH_EXPERT, bad};
        if (!sort() || !take_input() || (group_count_ > 0 && !take_inner())) return {ExpertsResult::NO_MEMORY, 0};
        gate_and_up();
        if (!failed_) down();
        return {failed_ ? ExpertsResult::NO_MEMORY : ExpertsResult::DONE, 0};
    }

private:
    int64_t chosen(int64_t place) const {
        return choices_.wide ? static_cast<const int64_t*>(choices_.experts)[place]
                             : static_cast<const int32_t*>(choices_.experts)[place];
    }

    int64_t check() const {
        const auto count = int64_t(experts_.routed.size());
        for (int64_t place = 0; place < x_.tokens * choices_.each; place++)
            if (chosen(place) < 0 || chosen(place) >= count) return place;
        return -1;
    }

    // Groups, with tokens and weights in the order of experts.
    bool sort() {
        const auto count = int64_t(experts_.routed.size());
        const int64_t routed = x_.tokens * choices_.each, all = routed + (experts_.has_shared ? x_.tokens : 0);
        const auto slots = size_t(count + 1), places = size_t(all);
        if (!plan_scratch.reset(Scratch::room<Group>(slots) + Scratch::room<int64_t>(slots) + Scratch::room<int64_t>(places) +
                                Scratch::room<float>(places)))
            return false;
        groups_ = plan_scratch.take<Group>(slots);
        auto* next = plan_scratch.take<int64_t>(slots);
        token_ = plan_scratch.take<int64_t>(places);
        weight_ = plan_scratch.take<float>(places);
        std::fill(next, next + count + 1, 0);
        for (int64_t place = 0; place < routed; place++) next[chosen(place) + 1]++;
        for (int64_t e = 0; e < count; e++) {
            if (next[e + 1] > 0) groups_[group_count_++] = {&experts_.routed[size_t(e)], next[e], next[e + 1], 0};
            next[e + 1] += next[e];
        }
        for (int64_t place = 0; place < routed; place++) {
            const int64_t at = next[chosen(place)]++;
            token_[at] = place / choices_.each;
            weight_[at] = choices_.weights[place];
        }
        if (experts_.has_shared) groups_[group_count_++] = {&experts_.shared, routed, x_.tokens, 0};
        for (int64_t t = 0; t < all - routed; t++) {
            token_[routed + t] = t;
            weight_[routed + t] = choices_.shared_weights == nullptr ? 1.0f : choices_.shared_weights[t];
        }
        return true;
    }

    // The tokens in the forms that some group wants: float32, and 8 bits.
    bool take_input() {
        bool floats = false, eights = false;
        for (int64_t g = 0; g < group_count_; g++) {
            floats = floats || takes_floats(*groups_[g].expert);
            eights = eights || quantizes(*groups_[g].expert);
        }
        quantized_ = x_.quantized;
        eights = eights && quantized_ == nullptr;
        if (!floats && !eights) return true;
        floats_ = static_cast<const float*>(x_.numbers);
        float* wide = nullptr;
        if (x_.bfloat16) {
            floats_ = wide = room<float>(floats_scratch, size_t(x_.tokens * hidden_));
            if (wide == nullptr) return false;
        }
        Activations* made = nullptr;
        if (eights) {
            quantized_ = made = room<Activations>(quantized_scratch, size_t(x_.tokens * blocks_));
            if (made == nullptr) return false;
        }
        each(x_.tokens, x_.tokens * hidden_ * 4 >= LONG_BYTES, x_.tokens >= TOKENS_TOGETHER, [&](int64_t t) {
            if (wide) isa_.widen(static_cast<const uint16_t*>(x_.numbers) + t * hidden_, hidden_, wide + t * hidden_);
            if (made) isa_.quantize(floats_ + t * hidden_, hidden_, made + t * blocks_);
        });
        return true;
    }

    // Room for what gate and up give, and pieces of about equal cost.
    bool take_inner() {
        int64_t cost = 0;
        size_t bytes = 0;
        for (int64_t g = 0; g < group_count_; g++) {
            groups_[g].inner_at = bytes;
            bytes += size_t(groups_[g].count) * groups_[g].token_bytes();
            cost += groups_[g].row_cost() * groups_[g].inner();
        }
        inner_ = room<uint8_t>(inner_scratch, bytes);
        if (inner_ == nullptr) return false;
        const int64_t wanted = threads_ > 1 ? std::max<int64_t>(LEAST_BYTES, cost / (int64_t(threads_) * PARTS_A_THREAD)) : cost;
        const auto step_of = [&](const Group& group) { return rounded_up(std::max<int64_t>(1, wanted / group.row_cost()), GROUP); };
        for (int64_t g = 0; g < group_count_; g++)
            piece_count_ += (groups_[g].inner() + step_of(groups_[g]) - 1) / step_of(groups_[g]);
        auto* next = pieces_ = room<Piece>(pieces_scratch, size_t(piece_count_));
        if (next == nullptr) return false;
        for (int64_t g = 0; g < group_count_; g++) {
            const int64_t inner = groups_[g].inner(), step = step_of(groups_[g]);
            for (int64_t begin = 0; begin < inner; begin += step) *next++ = {&groups_[g], begin, std::min(step, inner - begin)};
        }
        long_ = cost >= LONG_BYTES;
        return true;
    }

    void gate_and_up() {
        each(piece_count_, long_, true, [&](int64_t part) {
            const Piece& piece = pieces_[part];
            in_blocks(piece.group->count, [&](int64_t start, int64_t count) { gate_and_up(piece, start, count); });
        });
    }

    // A piece for the tokens [start, start + count) of its group, to the activations that down takes.
    void gate_and_up(const Piece& piece, int64_t start, int64_t count) {
        const Group& group = *piece.group;
        auto* gate = room<float>(product_scratch, size_t(2 * count * piece.rows));
        if (gate == nullptr) return fail();
        float* up = gate + count * piece.rows;
        multiply(group.expert->gate, piece, group.first + start, count, gate);
        multiply(group.expert->up, piece, group.first + start, count, up);
        if (failed_) return;
        for (int64_t t = 0; t < count; t++) {
            uint8_t* to = inner_ + group.inner_at + size_t(start + t) * group.token_bytes();
            const float *g = gate + t * piece.rows, *u = up + t * piece.rows;
            if (group.inner_floats()) {
                isa_.gated(experts_.activation, g, u, piece.rows, reinterpret_cast<float*>(to) + piece.begin);
            } else {
                float* made = gate + t * piece.rows;
                isa_.gated(experts_.activation, g, u, piece.rows, made);
                quantize(made, piece.begin, piece.rows, group.inner(), reinterpret_cast<Activations*>(to));
            }
        }
    }

    // Numbers [begin, begin + count) of a token's inner layer to their place: whole groups of 32, which others may have the rest of.
    void quantize(const float* numbers, int64_t begin, int64_t count, int64_t inner, Activations* to) const {
        for (int64_t at = begin, end = begin + count; at < end;) {
            const int64_t within = at % 256, some = std::min(256 - within, end - at);
            if (within == 0 && (some == 256 || end == inner)) {
                isa_.quantize(numbers + (at - begin), some, to + at / 256);
            } else {
                Activations block;
                isa_.quantize(numbers + (at - begin), some, &block);
                const auto first = size_t(within / GROUP);
                const auto groups = size_t((end == inner ? 256 - within : some) / GROUP);  // the row's end is filled up with zeros
                Activations& whole = to[at / 256];
                std::memcpy(whole.q + GROUP * first, block.q, GROUP * groups);
                std::memcpy(whole.d8 + first, block.d8, groups * sizeof(float));
                std::memcpy(whole.s8 + first, block.s8, groups * sizeof(float));
                std::memcpy(whole.s16 + 2 * first, block.s16, 2 * groups * sizeof(float));
            }
            at += some;
        }
    }

    // A piece's rows of a matrix times tokens, which are gathered first where they don't lie in a row.
    void multiply(const Matrix& weight, const Piece& piece, int64_t place, int64_t count, float* out) {
        const bool floats = is_float(weight.kind);
        const size_t stride = size_t(floats ? hidden_ : blocks_), item = floats ? sizeof(float) : sizeof(Activations);
        const auto* from = floats ? reinterpret_cast<const uint8_t*>(floats_) : reinterpret_cast<const uint8_t*>(quantized_);
        const int64_t* tokens = token_ + place;
        const uint8_t* operand = from + size_t(tokens[0]) * stride * item;
        bool together = true;
        for (int64_t t = 1; t < count; t++) together = together && tokens[t] == tokens[0] + t;
        if (!together) {
            auto* gathered = room<uint8_t>(gathered_scratch, size_t(count) * stride * item);
            if (gathered == nullptr) return fail();
            for (int64_t t = 0; t < count; t++)
                std::memcpy(gathered + size_t(t) * stride * item, from + size_t(tokens[t]) * stride * item, stride * item);
            operand = gathered;
        }
        product(rows_of(weight, piece.begin, piece.rows), operand, stride, count, out, size_t(piece.rows), false, 0, piece.rows,
                x_.many);
    }

    // A part has some of the output's columns, and sums them over all experts.
    void down() {
        int64_t cost = 0;
        for (int64_t g = 0; g < group_count_; g++) cost += row_bytes(groups_[g].expert->down) * (2 + groups_[g].count) / 2;
        int64_t step = hidden_;
        if (threads_ > 1 && cost > 0)
            step = std::max(LEAST_BYTES / cost, hidden_ / (int64_t(threads_) * PARTS_A_THREAD));
        step = rounded_up(std::max<int64_t>(step, 1), 16);
        each((hidden_ + step - 1) / step, long_, true, [&](int64_t part) {
            const int64_t begin = part * step, count = std::min(step, hidden_ - begin);
            if (!add_)
                for (int64_t t = 0; t < x_.tokens; t++) std::fill_n(out_ + t * out_stride_ + begin, count, 0.0f);
            for (int64_t g = 0; g < group_count_; g++)
                in_blocks(groups_[g].count, [&](int64_t start, int64_t tokens) { down(groups_[g], start, tokens, begin, count); });
        });
    }

    void down(const Group& group, int64_t start, int64_t tokens, int64_t begin, int64_t count) {
        auto* made = room<float>(product_scratch, size_t(tokens * count));
        if (made == nullptr) return fail();
        const size_t item = group.inner_floats() ? sizeof(float) : sizeof(Activations);
        product(rows_of(group.expert->down, begin, count), inner_ + group.inner_at + size_t(start) * group.token_bytes(),
                group.token_bytes() / item, tokens, made, size_t(count), false, 0, count, x_.many);
        for (int64_t t = 0; t < tokens; t++) {
            const float weight = weight_[group.first + start + t];
            float* to = out_ + token_[group.first + start + t] * out_stride_ + begin;
            for (int64_t r = 0; r < count; r++) to[r] += weight * made[t * count + r];
        }
    }

    template <class Function>
    void each(int64_t parts, bool is_long, bool shared, Function function) {
        share_out(parts, shared ? threads_ : 1, is_long, function);
    }

    void fail() { failed_.store(true, std::memory_order_relaxed); }

    const Kernels& isa_;
    const Experts& experts_;
    const Hidden& x_;
    const Choices& choices_;
    float* out_;
    const int64_t out_stride_;
    const bool add_;
    const int threads_;
    const int64_t hidden_, blocks_;
    Group* groups_ = nullptr;
    int64_t group_count_ = 0;
    int64_t* token_ = nullptr;
    float* weight_ = nullptr;
    const float* floats_ = nullptr;
    const Activations* quantized_ = nullptr;
    uint8_t* inner_ = nullptr;
    Piece* pieces_ = nullptr;
    int64_t piece_count_ = 0;
    bool long_ = false;
    std::atomic<bool> failed_{false};
};

bool fits(const Expert& expert, int64_t hidden) {
    return expert.gate.columns == hidden && expert.up.columns == hidden && expert.down.rows == hidden &&
           expert.gate.rows == expert.up.rows && expert.down.columns == expert.up.rows;
}

}  // namespace

const char* refuses(const Experts& experts) {
    if (experts.activation < 0 || experts.activation >= ACTIVATIONS) return "there is no kernel for this activation";
    if (experts.routed.empty() && !experts.has_shared) return "there are no experts";
    const int64_t hidden = experts.hidden();
    bool fit = !experts.has_shared || fits(experts.shared, hidden);
    for (const Expert& expert : experts.routed) fit = fit && fits(expert, hidden);
    return fit ? nullptr : "gate and up must be (inner, hidden) and down (hidden, inner), hidden the same for all experts";
}

ExpertsResult run_experts(const Experts& experts, const Hidden& x, const Choices& choices, float* out, int64_t out_stride, bool add,
                          int threads) {
    return Call(experts, x, choices, out, out_stride, add, threads).run();
}

}  // namespace ktopt
