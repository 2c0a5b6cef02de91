#include "router.h"

#include <algorithm>
#include <cmath>

namespace ktopt {
namespace {

void softmax(const float* products, int64_t n, float* scores) {
    float most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++) most = products[i] > most ? products[i] : most;
    for (int64_t i = 0; i < n; i++) sum += scores[i] = std::exp(products[i] - most);
    for (int64_t i = 0; i < n; i++) scores[i] /= sum;
}

// What a group counts.
float group_score(const float* scores, int64_t n, bool sum_of_two) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (scores[i] > best) {
            second = best;
            best = scores[i];
        } else if (scores[i] > second) {
            second = scores[i];
        }
    }
    return sum_of_two && n > 1 ? best + second : best;
}

// The `wanted` best of scores, best first.
void best(const float* scores, int64_t n, int64_t wanted, int32_t* ids) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        if (found == wanted && !(scores[i] > scores[ids[found - 1]])) continue;
        int64_t at = found < wanted ? found++ : found - 1;
        for (; at > 0 && scores[i] > scores[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = int32_t(i);
    }
}

void drop_groups(const Routing& r, float* wanted) {
    const int64_t size = r.experts / r.groups;
    float score[MOST_EXPERTS];
    int32_t kept[MOST_EXPERTS];
    for (int64_t g = 0; g < r.groups; g++) score[g] = group_score(wanted + g * size, size, r.sum_of_two);
    best(score, r.groups, r.kept_groups, kept);
    std::sort(kept, kept + r.kept_groups);
    for (int64_t g = 0, next = 0; g < r.groups; g++) {
        if (next < r.kept_groups && kept[next] == g) {
            next++;
        } else {
            std::fill_n(wanted + g * size, size, -INFINITY);
        }
    }
}

}  // namespace

void choose(const Routing& r, const float* products, int32_t* ids, float* weights) {
    float scores[MOST_EXPERTS], wanted[MOST_EXPERTS];
    if (r.sigmoid) {
        for (int64_t i = 0; i < r.experts; i++) scores[i] = 1.0f / (1.0f + std::exp(-products[i]));
    } else {
        softmax(products, r.experts, scores);
    }
    for (int64_t i = 0; i < r.experts; i++) wanted[i] = scores[i] + (r.bias == nullptr ? 0.0f : r.bias[i]);
    if (r.groups > 1) drop_groups(r, wanted);
    best(wanted, r.experts, r.chosen, ids);
    float sum = r.sigmoid ? 1e-20f : 0.0f;
    for (int64_t k = 0; k < r.chosen; k++) sum += weights[k] = scores[ids[k]];
    for (int64_t k = 0; k < r.chosen; k++) weights[k] *= r.normalize ? r.scale / sum : r.scale;
}

}  // namespace ktopt
