// The kernels on AVX2, FMA and F16C. Compiled with these instructions, so nothing here may run before `isa.cpp` has looked.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "kernels.h"

namespace branchline {
namespace {

constexpr const char* kName = "avx2";
constexpr int kRowTile = 4;  // rows whose sums stay in registers
constexpr std::size_t kPairs = 1;  // of panels, whose sums do
constexpr int kQueries = 3, kVectors = 1;  // whose sums do in attention
#include "simd_avx2.h"
#include "dot_avx2.h"
#include "pair.h"
#include "products.h"
#include "kernels.inl"

}  // namespace

const Kernels* avx2_kernels() { return &kTable; }

}  // namespace branchline
