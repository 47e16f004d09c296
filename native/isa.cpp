#include "isa.h"

#include <stdexcept>

namespace branchline {

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> found;
#ifdef BRANCHLINE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        found.push_back(avx2_kernels());
    }
#endif
    found.push_back(portable_kernels());
    return found;
}

const Kernels* choose_kernels(const std::string& name) {
    std::string names;
    for (const Kernels* kernels : usable_kernels()) {
        if (name == "auto" || name == kernels->name) return kernels;
        names += std::string(" ") + kernels->name;
    }
    throw std::invalid_argument("this processor has no kernels named " + name + "; it has" + names);
}

}  // namespace branchline
