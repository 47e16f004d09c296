// 16-bit floats as bits. `static`, because each translation unit has its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace branchline {

struct BFloat {
    std::uint16_t bits;
};

static inline float bits_to_float(std::uint32_t bits) {
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

static inline float bfloat_to_float(std::uint16_t bits) { return bits_to_float(static_cast<std::uint32_t>(bits) << 16); }

// The nearest number, ties to even, as AVX512-BF16 does it: numbers too small for a full mantissa become a zero.
static inline std::uint16_t float_to_bfloat(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint32_t size = bits & 0x7fffffffu, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const std::uint32_t or_zero = size < 0x00800000u ? bits >> 16 & 0x8000u : rounded;
    return static_cast<std::uint16_t>(size > 0x7f800000u ? bits >> 16 | 0x40u : or_zero);  // NaN stays NaN
}

static inline float half_to_float(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = static_cast<float>(mantissa) * (1.0f / 16777216.0f);
    return sign ? -small : small;
}

// Only for numbers that are exactly an f16; `exact` tells whether this one was.
static inline std::uint16_t float_to_half(float x, bool& exact) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    const std::int32_t exponent = static_cast<std::int32_t>(bits >> 23 & 255u) - 112;
    std::uint32_t mantissa = bits & 0x7fffffu, out;
    if (exponent >= 31) {
        out = 0x7c00u;
    } else if (exponent > 0) {
        out = static_cast<std::uint32_t>(exponent) << 10 | mantissa >> 13;
    } else if (exponent > -10) {
        out = (mantissa | 0x800000u) >> (14 - exponent);
    } else {
        out = 0;
    }
    const std::uint16_t half = static_cast<std::uint16_t>(sign | out);
    exact = half_to_float(half) == x;
    return half;
}

}  // namespace branchline
