// Plain C++, for any CPU; compilers vectorise what they can for the one they build for (NEON on aarch64).
#include "table.h"

namespace ktopt {
namespace {

struct Lanes {
    float total = 0;

    template <class F>
    void add(const Unpacked& w, const Activations& x) {
        constexpr int GROUPS = 256 / F::GROUP;
        const float* sums = F::GROUP == 16 ? x.s16 : x.s8;
        for (int g = 0; g < GROUPS; g++) {
            int dot = 0;
            for (int i = g * F::GROUP; i < (g + 1) * F::GROUP; i++) dot += int(w.u[i]) * int(x.q[i]);
            total += w.scale[g] * x.d8[g * F::GROUP / 32] * float(dot);
            total -= (w.scale[g] * float(F::ZERO) + (F::OFFSETS ? w.offset[g] : 0.0f)) * sums[g];
        }
    }

    float sum() const { return total; }
};

template <int kind>
constexpr RowsFunction quantized = quantized_rows<Lanes, kind>;
template <int kind>
constexpr RowsFunction floats = float_rows<kind>;

}  // namespace

KTOPT_KERNELS(scalar_kernels, "scalar", quantize, quantized, floats, dequantize, no_product);

}  // namespace ktopt
