// Which instruction set runs: the best that this CPU has, unless told otherwise.
#include <atomic>
#include <cstring>

#include "types.h"

namespace ktopt {
namespace {

struct Choice {
    const Kernels* kernels;
    bool here;
};

// Best first.
const Choice* choices(int& count) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    static const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    static const Choice all[] = {
        {&avx512bf16_kernels, vnni && __builtin_cpu_supports("avx512bf16")},
        {&avx512vnni_kernels, vnni},
        {&avx512_kernels, avx512},
        {&avx2_kernels, avx2},
        {&scalar_kernels, true},
    };
    count = 5;
#else
    static const Choice all[] = {{&scalar_kernels, true}};
    count = 1;
#endif
    return all;
}

const Kernels* find(const char* name) {
    int count;
    const Choice* all = choices(count);
    for (int i = 0; i < count; i++)
        if (all[i].here && (name == nullptr || std::strcmp(name, all[i].kernels->name) == 0)) return all[i].kernels;
    return nullptr;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* found = chosen.load(std::memory_order_relaxed);
    if (found == nullptr) chosen.store(found = find(nullptr));
    return *found;
}

bool has_isa(const char* name) { return find(name) != nullptr; }

bool set_isa(const char* name) {
    const Kernels* found = find(name);
    if (found == nullptr) return false;
    chosen.store(found);
    return true;
}

}  // namespace ktopt
