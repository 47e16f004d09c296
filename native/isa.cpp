#include "isa.h"

#include <stdexcept>

#ifdef BRANCHLINE_AVX2
#include <cpuid.h>
#endif
#ifdef BRANCHLINE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef BRANCHLINE_NEON
#include <sys/auxv.h>
#endif

namespace branchline {
namespace {

#ifdef BRANCHLINE_AVX2
struct Leaf {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;

    Leaf(unsigned number, unsigned part) { __get_cpuid_count(number, part, &eax, &ebx, &ecx, &edx); }
};

// Names that every compiler knows also ask whether the system saves the registers; the others are asked for by number.
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (Leaf(1, 0).ecx >> 29 & 1);  // F16C
}
#endif

#if defined(BRANCHLINE_AVX512) || defined(BRANCHLINE_AVX512BF16) || defined(BRANCHLINE_AMX)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(BRANCHLINE_AVX512BF16) || defined(BRANCHLINE_AMX)
bool has_avx512bf16() { return has_avx512() && Leaf(7, 0).eax >= 1 && (Leaf(7, 1).eax >> 5 & 1); }
#endif

#ifdef BRANCHLINE_AVXVNNI
bool has_avxvnni() { return Leaf(7, 0).eax >= 1 && (Leaf(7, 1).eax >> 4 & 1); }
#endif

#ifdef BRANCHLINE_AMX
bool has_amx() {
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;            // of leaf 7
    constexpr unsigned kTileConfig = 1u << 17, kTileData = 1u << 18;  // of the register that says what the system saves
    constexpr unsigned kSystemSaves = 1u << 27;                       // of leaf 1: that register can be read
    constexpr long kAskForState = 0x1023, kTileDataState = 18;        // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    if ((Leaf(7, 0).edx & (kTile | kInt8)) != (kTile | kInt8) || !(Leaf(1, 0).ecx & kSystemSaves)) return false;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & (kTileConfig | kTileData)) != (kTileConfig | kTileData)) return false;
    // Linux enlarges what it saves for a process only on request: all threads have it from then on.
    return syscall(SYS_arch_prctl, kAskForState, kTileDataState) == 0;
}
#endif

#ifdef BRANCHLINE_NEON
bool has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }  // HWCAP_ASIMDDP
#endif

}  // namespace

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> found;
#ifdef BRANCHLINE_AVX2
    __builtin_cpu_init();
    if (has_avx2()) {
#ifdef BRANCHLINE_AMX
        if (has_avx512bf16() && has_amx()) found.push_back(amx_kernels());
#endif
#ifdef BRANCHLINE_AVX512BF16
        if (has_avx512bf16()) found.push_back(avx512bf16_kernels());
#endif
#ifdef BRANCHLINE_AVX512
        if (has_avx512()) found.push_back(avx512_kernels());
#endif
#ifdef BRANCHLINE_AVXVNNI
        if (has_avxvnni()) found.push_back(avxvnni_kernels());
#endif
        found.push_back(avx2_kernels());
    }
#endif
#ifdef BRANCHLINE_NEON
    if (has_dot_products()) found.push_back(neon_kernels());
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
