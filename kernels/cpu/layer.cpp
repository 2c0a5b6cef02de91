#include "layer.h"

#include "slab.h"

namespace ktopt {
namespace {

constexpr int64_t TOGETHER = 512;  // tokens that go through a layer's products at a time: what they need stays in the cache

// Rows of many sequences, whose number is any: in slabs of about one size.
Outcome run_ragged(const Layer& layer, const Run& run) {
    const int64_t slabs = std::max<int64_t>(1, (run.tokens + TOGETHER / 2) / TOGETHER), step = (run.tokens + slabs - 1) / slabs;
    for (int64_t t = 0; t < run.tokens; t += step) {
        Slab slab(layer, run, 0, t, std::min(step, run.tokens - t));
        const Outcome outcome = slab.go();
        if (outcome != Outcome::done) return outcome;
    }
    return Outcome::done;
}

}  // namespace

Outcome run(const Layer& layer, const Run& run) {
    rouse(run.threads);
    if (run.ragged != nullptr) return run_ragged(layer, run);
    const bool one_each = run.tokens == 1;
    const int64_t sequences = one_each ? 1 : run.batch, tokens = one_each ? run.batch : run.tokens;
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t t = 0; t < tokens; t += TOGETHER) {
            Slab slab(layer, run, one_each ? t : s, one_each ? 0 : t, std::min(TOGETHER, tokens - t));
            const Outcome outcome = slab.go();
            if (outcome != Outcome::done) return outcome;
        }
    return Outcome::done;
}

}  // namespace ktopt
