// The kernels in plain C++: they run everywhere and define what every other instruction set must compute.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "kernels.h"

namespace branchline {
namespace {

constexpr const char* kName = "portable";
constexpr int kRowTile = 1;  // more together would be no faster: the time goes into fused multiply-adds
constexpr std::size_t kPairs = 1;  // of panels, whose sums do
constexpr int kQueries = 3, kVectors = 1;  // whose sums do in attention
#include "simd_portable.h"
#include "pair.h"
#include "products.h"
#include "kernels.inl"

}  // namespace

const Kernels* portable_kernels() { return &kTable; }

}  // namespace branchline
