// The kernels on AArch64 with dot products. Compiled with these instructions, so nothing here may run before `isa.cpp` has
// looked.
#include <arm_neon.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "kernels.h"

namespace branchline {
namespace {

constexpr const char* kName = "neon";
constexpr int kRowTile = 4;  // rows whose sums stay in registers, or nearly
constexpr std::size_t kPairs = 1;  // of panels, whose sums do
constexpr int kQueries = 3, kVectors = 1;  // whose sums do in attention
#include "simd_neon.h"
#include "pair.h"
#include "products.h"
#include "kernels.inl"

}  // namespace

const Kernels* neon_kernels() { return &kTable; }

}  // namespace branchline
