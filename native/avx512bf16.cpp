// Attention on AVX512-BF16; all else is AVX512's. Compiled with these instructions, so nothing here may run before `isa.cpp`
// has looked.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "kernels.h"

namespace branchline {
namespace {

constexpr const char* kName = "avx512bf16";
constexpr int kRowTile = 4;
constexpr std::size_t kPairs = 1;
constexpr int kQueries = 6, kVectors = 4;  // 24 sums of 16 lanes stay in registers
#include "simd_avx2.h"
#include "pair_avx512.h"
#include "dot_avx512.h"
#include "products_bf16.h"
#include "kernels.inl"

}  // namespace

const Kernels* avx512bf16_kernels() {
    static const Kernels table = with_attention(*avx512_kernels());
    return &table;
}

}  // namespace branchline
