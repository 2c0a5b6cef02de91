#include "layer.h"

#include "slab.h"

namespace ktopt {
namespace {

constexpr int64_t TOGETHER = 512;  // tokens that go through a layer's products at a time: what they need stays in the cache

}  // namespace

Outcome run(const Layer& layer, const Run& run) {
    rouse(run.threads);
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
