// The kernels in plain C++: they run everywhere and define what every other instruction set must compute.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"

namespace branchline {
namespace {

constexpr const char* kName = "portable";
#include "simd_portable.h"
#include "kernels.inl"

}  // namespace

const Kernels* portable_kernels() { return &kTable; }

}  // namespace branchline
