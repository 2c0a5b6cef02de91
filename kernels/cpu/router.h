// Which experts a token goes to, from the router's products.
#pragma once

#include <cstdint>

namespace ktopt {

// How scores come from products and choices from scores, as transformers' routers have it.
struct Routing {
    int64_t experts, chosen;
    bool sigmoid;        // scores are sigmoids (DeepSeek-V3), or the softmax over all experts
    bool normalize;      // weights are divided by their sum
    float scale;         // weights are multiplied by
    const float* bias;   // added to scores for choosing only, or null
    int64_t groups, kept_groups;  // experts are chosen from so many groups; 1 and 1 for no groups
    bool sum_of_two;     // a group counts the sum of its best two (V3), or its best (V2)
};

constexpr int64_t MOST_EXPERTS = 1024;

// products (experts) to ids and weights (chosen), best first. Of equal scores the lower expert wins. NaN products choose the first
// experts with weights that are NaN.
void choose(const Routing& routing, const float* products, int32_t* ids, float* weights);

}  // namespace ktopt
