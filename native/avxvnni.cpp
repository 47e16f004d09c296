// The linear kernel with the 256-bit dot product instruction; all else is AVX2's. Compiled with these instructions, so
// nothing here may run before `isa.cpp` has looked.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "kernels.h"

namespace branchline {
namespace {

constexpr const char* kName = "avxvnni";
constexpr int kRowTile = 4;  // rows whose sums stay in registers
constexpr std::size_t kPairs = 1;  // of panels, whose sums do
constexpr int kQueries = 3, kVectors = 1;
#include "simd_avx2.h"
#include "dot_vnni.h"
#include "pair.h"
#include "products.h"
#include "kernels.inl"

}  // namespace

const Kernels* avxvnni_kernels() {
    static const Kernels table = with_linear(*avx2_kernels(), linear);
    return &table;
}

}  // namespace branchline
