// Products with anchors that are float16 vectors, shares of a softmax, and the threshold of a choice: see anchors.h.
#pragma once

#include "anchors.h"
#include "generic.h"
#include "simd.h"

namespace ktopt {
namespace {
namespace anchor {

template <int heads>
inline void four_rows(const uint16_t* const (&rows)[4], int64_t dim, const float* q, float (*out)[4]) {
    Vector sums[heads][4];
    for (auto& head : sums)
        for (Vector& sum : head) sum = Vector::zero();
    for (int64_t d = 0; d < dim; d += Vector::WIDTH)
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const Vector x = Vector::load_float16(rows[r] + d);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sums[h][r] = x.times_plus(Vector::load(q + h * dim + d), sums[h][r]);
        }
    for (int h = 0; h < heads; h++) Vector::sums(sums[h], out[h]);
}

// Always four rows at a time, so that equal rows have equal results wherever they stand.
inline void dots(const uint16_t* rows, int64_t count, int64_t dim, const float* q, int64_t heads, float* out, size_t out_stride) {
    for (int64_t r = 0; r < count; r += 4) {
        const int64_t there = count - r < 4 ? count - r : 4;
        const uint16_t* four[4];
        for (int64_t i = 0; i < 4; i++) four[i] = rows + (r + (i < there ? i : there - 1)) * dim;
        in_groups(heads, [&](auto batch, int64_t h) {
            float found[decltype(batch)::value][4];
            four_rows<decltype(batch)::value>(four, dim, q + h * dim, found);
            for (int64_t i = 0; i < decltype(batch)::value; i++)
                std::memcpy(out + size_t(h + i) * out_stride + r, found[i], size_t(there) * sizeof(float));
        });
    }
}

inline void add_shares(const float* largest, const float* sums, int64_t blocks, float rest, float* shares) {
    constexpr int64_t AT_ONCE = 256;
    float most = rest;
    for (int64_t b = 0; b < blocks; b++) most = largest[b] > most ? largest[b] : most;
    if (!(most > -__builtin_inff())) return;
    float total = __builtin_expf(rest - most);
    float weights[AT_ONCE];
    const auto weigh = [&](int64_t from, int64_t count) {
        for (int64_t i = 0; i < count; i++) weights[i] = largest[from + i] - most;
        for (int64_t i = count; i % Vector::WIDTH; i++) weights[i] = 0;
        for (int64_t i = 0; i < count; i += Vector::WIDTH) exponential(Vector::load(weights + i)).store(weights + i);
        for (int64_t i = 0; i < count; i++) weights[i] = largest[from + i] == -__builtin_inff() ? 0 : weights[i];
        for (int64_t i = 0; sums && i < count; i++) weights[i] *= sums[from + i];
    };
    for (int64_t b = 0; b < blocks; b += AT_ONCE) {
        const int64_t count = blocks - b < AT_ONCE ? blocks - b : AT_ONCE;
        weigh(b, count);
        for (int64_t i = 0; i < count; i++) total += weights[i];
    }
    const float inverse = 1.0f / total;
    for (int64_t b = 0; b < blocks; b += AT_ONCE) {
        const int64_t count = blocks - b < AT_ONCE ? blocks - b : AT_ONCE;
        if (blocks > AT_ONCE) weigh(b, count);
        for (int64_t i = 0; i < count; i++) shares[b + i] += weights[i] * inverse;
    }
}

// By halving the range of numbers: a pass over them each time, which vector registers make cheap.
inline int32_t reached(const int32_t* numbers, int64_t n, int64_t count) {
    int32_t least = numbers[0], most = numbers[0];
    for (int64_t i = 0; i < n; i++) {
        least = numbers[i] < least ? numbers[i] : least;
        most = numbers[i] > most ? numbers[i] : most;
    }
    int64_t low = least, high = most;
    while (low < high) {
        const auto middle = int32_t(high - (high - low) / 2);
        int32_t reach = 0;
        for (int64_t i = 0; i < n; i++) reach += numbers[i] >= middle;
        if (reach >= count) low = middle;
        else high = int64_t(middle) - 1;
    }
    return int32_t(low);
}

}  // namespace anchor
}  // namespace
}  // namespace ktopt
