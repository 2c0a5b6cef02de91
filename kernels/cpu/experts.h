// The experts of one layer in one call: gate, up, activation, down and the weighted sum, on weights as they are stored.
#pragma once

#include <vector>

#include "gemm.h"

namespace ktopt {

// down(activation(gate(x)) * up(x)): gate and up are (inner, hidden), down is (hidden, inner), each of its own type.
struct Expert {
    Matrix gate, up, down;
};

// A layer's experts. Where there is a shared one, every token meets it.
struct Experts {
    int activation;
    std::vector<Expert> routed;
    bool has_shared;
    Expert shared;

    int64_t hidden() const { return (has_shared ? shared : routed.front()).down.rows; }
};

// Why these matrices aren't the experts of one layer, or null.
const char* refuses(const Experts& experts);

// Tokens as float32 or bfloat16, (tokens, hidden). Who has them in 8 bits already gives that too, activation_blocks(hidden) for each
// token; `numbers` may then be null unless the gate or up of an expert is in a floating-point type. `many` is as gemm.h's product
// takes it.
struct Hidden {
    int64_t tokens;
    const void* numbers;
    bool bfloat16;
    const Activations* quantized;
    int64_t many = MANY_TOKENS;
};

// The router's choices: for each token `each` experts by number, int32 or int64, and their weights. shared_weights has one weight a
// token, null for all 1.
struct Choices {
    int64_t each;
    const void* experts;
    bool wide;
    const float* weights;
    const float* shared_weights;
};

struct ExpertsResult {
    enum { DONE, NO_MEMORY, NO_SUCH_EXPERT } status;
    int64_t place;  // NO_SUCH_EXPERT: where in the choices it stands
};

// out[t * out_stride + h], float32, becomes the weighted sum over token t's experts; with `add` the sum is added to what is there.
// Experts are summed in the order of their numbers, the shared one last, so the result doesn't depend on the number of threads.
// One expert may be chosen twice by a token. Nothing is written where the choices name an expert that isn't there.
ExpertsResult run_experts(const Experts& experts, const Hidden& x, const Choices& choices, float* out, int64_t out_stride, bool add,
                          int threads);

}  // namespace ktopt
