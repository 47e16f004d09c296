// AVX-VNNI, AVX512 and AMX in plain AVX2, so that their units run, bit by bit, on processors that have none of them. A test
// compiles a unit with this header in front of it and without the unit's own flags.
//
// Knows: the instructions' definitions in Intel's manual, for exactly those that the units use. Refuses to know: the units.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulation {

// ---------------------------------------------------------------- vectors

template <class Vector, class Element>
struct Lanes {
    static constexpr int count = sizeof(Vector) / sizeof(Element);
    Element v[count];

    explicit Lanes(Vector from) { std::memcpy(v, &from, sizeof v); }
    Vector vector() const {
        Vector out;
        std::memcpy(&out, v, sizeof v);
        return out;
    }
};

// VPDPBUSD: four products of unsigned bytes of `a` and signed bytes of `b`, added to a 32-bit sum without saturation.
template <class Vector>
Vector dot_bytes(Vector sum, Vector a, Vector b) {
    Lanes<Vector, std::uint32_t> total(sum);
    const Lanes<Vector, std::uint8_t> left(a);
    const Lanes<Vector, std::int8_t> right(b);
    for (int i = 0; i < left.count; ++i) total.v[i / 4] += static_cast<std::uint32_t>(left.v[i] * right.v[i]);
    return total.vector();
}

inline __m256i dpbusd(__m256i sum, __m256i a, __m256i b) { return dot_bytes(sum, a, b); }

// What has no parts that meet is done half by half.
struct Halves {
    __m256i low, high;

    explicit Halves(__m512i from) {
        std::memcpy(&low, &from, 32);
        std::memcpy(&high, reinterpret_cast<const char*>(&from) + 32, 32);
    }
    Halves(__m256i low, __m256i high) : low(low), high(high) {}
    Halves(__m256 low, __m256 high) : low(_mm256_castps_si256(low)), high(_mm256_castps_si256(high)) {}
    __m512i ints() const {
        __m512i out;
        std::memcpy(&out, &low, 32);
        std::memcpy(reinterpret_cast<char*>(&out) + 32, &high, 32);
        return out;
    }
    __m512 floats() const { return reinterpret_cast<__m512>(ints()); }
};
struct FloatHalves {
    __m256 low, high;

    explicit FloatHalves(__m512 from) {
        const Halves halves(reinterpret_cast<__m512i>(from));
        low = _mm256_castsi256_ps(halves.low);
        high = _mm256_castsi256_ps(halves.high);
    }
};

template <class F>
__m512i by_halves(F f, __m512i a, __m512i b) {
    const Halves x(a), y(b);
    return Halves(f(x.low, y.low), f(x.high, y.high)).ints();
}
template <class F>
__m512 by_halves(F f, __m512 a, __m512 b) {
    const FloatHalves x(a), y(b);
    return Halves(f(x.low, y.low), f(x.high, y.high)).floats();
}

inline __m512i dpbusd_wide(__m512i sum, __m512i a, __m512i b) { return dot_bytes(sum, a, b); }
inline __m512i zero() { return Halves(_mm256_setzero_si256(), _mm256_setzero_si256()).ints(); }
inline __m512i set1_epi8(char x) { return Halves(_mm256_set1_epi8(x), _mm256_set1_epi8(x)).ints(); }
inline __m512i set1_epi32(int x) { return Halves(_mm256_set1_epi32(x), _mm256_set1_epi32(x)).ints(); }
inline __m512 set1_ps(float x) { return Halves(_mm256_set1_ps(x), _mm256_set1_ps(x)).floats(); }
inline __m512i load(const void* p) {
    __m512i out;
    std::memcpy(&out, p, sizeof out);
    return out;
}
inline void store(void* p, __m512i a) { std::memcpy(p, &a, sizeof a); }
inline __m512i widen(__m256i a) { return Halves(a, _mm256_setzero_si256()).ints(); }
inline __m256 low_floats(__m512 a) { return FloatHalves(a).low; }
inline __m512i insert(__m512i a, __m256i b, int at) {
    const Halves halves(a);
    return at == 0 ? Halves(b, halves.high).ints() : Halves(halves.low, b).ints();
}
inline __m256d extract(__m512d a, int at) {
    const Halves halves(reinterpret_cast<__m512i>(a));
    return _mm256_castsi256_pd(at == 0 ? halves.low : halves.high);
}
inline __m512i bit_and(__m512i a, __m512i b) {
    return by_halves([](__m256i x, __m256i y) { return _mm256_and_si256(x, y); }, a, b);
}
inline __m512i bit_xor(__m512i a, __m512i b) {
    return by_halves([](__m256i x, __m256i y) { return _mm256_xor_si256(x, y); }, a, b);
}
inline __m512i sub_epi32(__m512i a, __m512i b) {
    return by_halves([](__m256i x, __m256i y) { return _mm256_sub_epi32(x, y); }, a, b);
}
inline __m512i srli_epi16(__m512i a, int by) {
    const Halves x(a);
    return Halves(_mm256_srli_epi16(x.low, by), _mm256_srli_epi16(x.high, by)).ints();
}
inline __m512i slli_epi32(__m512i a, int by) {
    const Halves x(a);
    return Halves(_mm256_slli_epi32(x.low, by), _mm256_slli_epi32(x.high, by)).ints();
}
inline __m512i cvtepu16_epi32(__m256i a) {
    const __m128i low = _mm256_castsi256_si128(a), high = _mm256_extracti128_si256(a, 1);
    return Halves(_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)).ints();
}
inline __m512 cvtph_ps(__m256i a) {
    return Halves(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))).floats();
}
inline __m512 cvtepi32_ps(__m512i a) {
    const Halves x(a);
    return Halves(_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)).floats();
}
inline __m512 mul_ps(__m512 a, __m512 b) {
    return by_halves([](__m256 x, __m256 y) { return _mm256_mul_ps(x, y); }, a, b);
}
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const FloatHalves x(a), y(b), z(c);
    return Halves(_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)).floats();
}

inline __m512 add_ps(__m512 a, __m512 b) {
    return by_halves([](__m256 x, __m256 y) { return _mm256_add_ps(x, y); }, a, b);
}
inline __m512 sub_ps(__m512 a, __m512 b) {
    return by_halves([](__m256 x, __m256 y) { return _mm256_sub_ps(x, y); }, a, b);
}
inline __m512 max_ps(__m512 a, __m512 b) {
    return by_halves([](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }, a, b);
}
inline __m512 min_ps(__m512 a, __m512 b) {
    return by_halves([](__m256 x, __m256 y) { return _mm256_min_ps(x, y); }, a, b);
}
inline __m512 div_ps(__m512 a, __m512 b) {
    return by_halves([](__m256 x, __m256 y) { return _mm256_div_ps(x, y); }, a, b);
}
inline __m512 load_ps(const float* p) { return reinterpret_cast<__m512>(load(p)); }
inline void store_ps(float* p, __m512 a) { store(p, reinterpret_cast<__m512i>(a)); }
inline __m512i add_epi32(__m512i a, __m512i b) {
    return by_halves([](__m256i x, __m256i y) { return _mm256_add_epi32(x, y); }, a, b);
}
inline __m512i cvttps_epi32(__m512 a) {
    const FloatHalves x(a);
    return Halves(_mm256_cvttps_epi32(x.low), _mm256_cvttps_epi32(x.high)).ints();
}
inline __m512i cvtepi8_epi32(__m128i a) {
    return Halves(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))).ints();
}
inline __m512 mask_mov_ps(__m512 other, __mmask16 mask, __m512 a) {
    Lanes<__m512, float> out(other);
    const Lanes<__m512, float> chosen(a);
    for (int i = 0; i < 16; ++i) out.v[i] = mask >> i & 1 ? chosen.v[i] : out.v[i];
    return out.vector();
}
inline __m512 maskz_mov_ps(__mmask16 mask, __m512 a) { return mask_mov_ps(set1_ps(0.0f), mask, a); }
template <int How>
inline __mmask16 cmp_ps_mask(__m512 a, __m512 b) {
    const FloatHalves x(a), y(b);
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.low, y.low, How));
    return static_cast<__mmask16>(low | _mm256_movemask_ps(_mm256_cmp_ps(x.high, y.high, How)) << 8);
}

// ---------------------------------------------------------------- bf16

// "Denormals are zeros", of operands and of results; rounding is to the nearest, ties to even.
inline float flushed(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x; }
inline float widen_bf16(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return flushed(out);
}
inline std::uint16_t to_bf16(float x) {
    const float number = flushed(x);
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (number != number) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
// VDPBF16PS: the odd product first, then the even one.
inline __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    Lanes<__m512, float> total(sum);
    const Lanes<__m512bh, std::uint16_t> left(a), right(b);
    for (int i = 0; i < 16; ++i) {
        const auto plus = [&](float so_far, int at) {
            return flushed(__builtin_fmaf(widen_bf16(left.v[at]), widen_bf16(right.v[at]), so_far));
        };
        total.v[i] = plus(plus(flushed(total.v[i]), 2 * i + 1), 2 * i);
    }
    return total.vector();
}
inline __m256bh cvtneps_pbh(__m512 a) {
    const Lanes<__m512, float> from(a);
    std::uint16_t bits[16];
    for (int i = 0; i < 16; ++i) bits[i] = to_bf16(from.v[i]);
    __m256bh out;
    std::memcpy(&out, bits, sizeof out);
    return out;
}
inline __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
    const __m256bh halves[2] = {cvtneps_pbh(low), cvtneps_pbh(high)};
    __m512bh out;
    std::memcpy(&out, halves, sizeof out);
    return out;
}

// ---------------------------------------------------------------- tiles

// Two-dimensional registers and their configuration. What the processor would answer with a fault ends the process.
class TileUnit {
public:
    void configure(const void* memory) {
        std::memcpy(&shape_, memory, sizeof shape_);
        check(shape_.palette == 1 && shape_.start_row == 0);
        for (int i = 0; i < 14; ++i) check(shape_.reserved[i] == 0);
        for (int i = 0; i < 16; ++i) {
            check(shape_.row_bytes[i] <= (i < 8 ? 64 : 0) && shape_.rows[i] <= (i < 8 ? 16 : 0));
            check((shape_.row_bytes[i] == 0) == (shape_.rows[i] == 0));
        }
        configured_ = true;
        std::memset(tiles_, 0, sizeof tiles_);
    }
    void release() { configured_ = false; }
    void zero(int tile) {
        check(configured_);
        std::memset(tiles_[tile], 0, sizeof tiles_[tile]);
    }
    void load(int tile, const void* from, std::size_t stride) {
        zero(tile);
        for (int row = 0; row < shape_.rows[tile]; ++row) {
            std::memcpy(tiles_[tile][row], static_cast<const char*>(from) + static_cast<std::size_t>(row) * stride,
                        shape_.row_bytes[tile]);
        }
    }
    void store(int tile, void* to, std::size_t stride) const {
        check(configured_);
        for (int row = 0; row < shape_.rows[tile]; ++row) {
            std::memcpy(static_cast<char*>(to) + static_cast<std::size_t>(row) * stride, tiles_[tile][row],
                        shape_.row_bytes[tile]);
        }
    }
    // TDPBSSD and TDPBSUD: rows of signed bytes of `a` times columns of `b`, four to a 32-bit sum.
    template <class B>
    void multiply(int sum, int a, int b) {
        check(configured_ && sum != a && sum != b && a != b);
        check(shape_.rows[sum] == shape_.rows[a] && shape_.row_bytes[sum] == shape_.row_bytes[b]);
        check(shape_.row_bytes[a] == 4 * shape_.rows[b] && shape_.row_bytes[b] % 4 == 0);
        for (int row = 0; row < shape_.rows[sum]; ++row) {
            for (int column = 0; column < shape_.row_bytes[sum] / 4; ++column) {
                std::int32_t total;
                std::memcpy(&total, &tiles_[sum][row][4 * column], 4);
                for (int k = 0; k < shape_.row_bytes[a]; ++k) {
                    total += static_cast<std::int8_t>(tiles_[a][row][k]) *
                             static_cast<B>(tiles_[b][k / 4][4 * column + k % 4]);
                }
                std::memcpy(&tiles_[sum][row][4 * column], &total, 4);
            }
        }
    }

private:
    static void check(bool truth) {
        if (!truth) std::abort();
    }
    struct {
        std::uint8_t palette, start_row, reserved[14];
        std::uint16_t row_bytes[16];
        std::uint8_t rows[16];
    } shape_;
    bool configured_ = false;
    std::uint8_t tiles_[8][16][64];
};

inline TileUnit& tiles() {
    static TileUnit unit;
    return unit;
}

}  // namespace emulation

#define _mm256_dpbusd_avx_epi32 emulation::dpbusd
#define _mm512_dpbusd_epi32 emulation::dpbusd_wide
#define _mm512_setzero_si512 emulation::zero
#define _mm512_set1_epi8 emulation::set1_epi8
#define _mm512_set1_epi32 emulation::set1_epi32
#define _mm512_set1_ps emulation::set1_ps
#define _mm512_loadu_si512 emulation::load
#define _mm512_storeu_si512 emulation::store
#define _mm512_castsi256_si512 emulation::widen
#define _mm512_castps512_ps256 emulation::low_floats
#define _mm512_castsi512_ps(a) reinterpret_cast<__m512>(a)
#define _mm512_castps_si512(a) reinterpret_cast<__m512i>(a)
#define _mm512_castps_pd(a) reinterpret_cast<__m512d>(a)
#define _mm512_inserti64x4 emulation::insert
#define _mm512_extractf64x4_pd emulation::extract
#define _mm512_and_si512 emulation::bit_and
#define _mm512_xor_si512 emulation::bit_xor
#define _mm512_sub_epi32 emulation::sub_epi32
#define _mm512_srli_epi16 emulation::srli_epi16
#define _mm512_slli_epi32 emulation::slli_epi32
#define _mm512_cvtepu16_epi32 emulation::cvtepu16_epi32
#define _mm512_cvtph_ps emulation::cvtph_ps
#define _mm512_cvtepi32_ps emulation::cvtepi32_ps
#define _mm512_mul_ps emulation::mul_ps
#define _mm512_fmadd_ps emulation::fmadd_ps
#define _mm512_add_ps emulation::add_ps
#define _mm512_sub_ps emulation::sub_ps
#define _mm512_max_ps emulation::max_ps
#define _mm512_min_ps emulation::min_ps
#define _mm512_div_ps emulation::div_ps
#define _mm512_loadu_ps emulation::load_ps
#define _mm512_storeu_ps emulation::store_ps
#define _mm512_add_epi32 emulation::add_epi32
#define _mm512_cvttps_epi32 emulation::cvttps_epi32
#define _mm512_cvtepi8_epi32 emulation::cvtepi8_epi32
#define _mm512_mask_mov_ps emulation::mask_mov_ps
#define _mm512_maskz_mov_ps emulation::maskz_mov_ps
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, how) emulation::cmp_ps_mask<how>(a, b)
#define _mm512_dpbf16_ps emulation::dpbf16_ps
#define _mm512_cvtneps_pbh emulation::cvtneps_pbh
#define _mm512_cvtne2ps_pbh emulation::cvtne2ps_pbh

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig(memory) emulation::tiles().configure(memory)
#define _tile_release() emulation::tiles().release()
#define _tile_zero(tile) emulation::tiles().zero(tile)
#define _tile_loadd(tile, from, stride) emulation::tiles().load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulation::tiles().store(tile, to, stride)
#define _tile_dpbssd(sum, a, b) emulation::tiles().multiply<std::int8_t>(sum, a, b)
#define _tile_dpbsud(sum, a, b) emulation::tiles().multiply<std::uint8_t>(sum, a, b)
