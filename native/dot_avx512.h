// Dot products of bytes with 512-bit VNNI, both panels of a pair in one instruction, after pair_avx512.h. Each function
// gives the bits of its namesake in simd_portable.h; dot_vnni.h says why.

inline __m512i repeat_four_wide(const std::int8_t* p) {
    std::int32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return _mm512_set1_epi32(bytes);
}

template <int R>
inline void dot_q4(const std::uint8_t* w0, const std::uint8_t* w1, const std::int8_t* a, std::size_t width, IntPair (&dot)[R]) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i total[R];
    for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i codes = load_bytes(w0 + 32 * j, w1 + 32 * j);
        const __m512i early = _mm512_and_si512(codes, low), late = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            total[r] = _mm512_dpbusd_epi32(total[r], early, repeat_four_wide(a + r * width + 4 * j));
            total[r] = _mm512_dpbusd_epi32(total[r], late, repeat_four_wide(a + r * width + 16 + 4 * j));
        }
    }
    for (int r = 0; r < R; ++r) dot[r].v = total[r];
}

template <int R>
inline void dot_q8(const std::uint8_t* w0, const std::uint8_t* w1, const std::int8_t* a, std::size_t width, int begin, int end,
                   IntPair (&dot)[R]) {
    const __m512i shift = _mm512_set1_epi8(-128);
    __m512i total[R], excess = _mm512_setzero_si512();
    for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 4 * begin; j < 4 * end; ++j) {
        const __m512i codes = load_bytes(w0 + 32 * j, w1 + 32 * j);
        excess = _mm512_dpbusd_epi32(excess, shift, codes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i four = _mm512_xor_si512(repeat_four_wide(a + r * width + 4 * j), shift);
            total[r] = _mm512_dpbusd_epi32(total[r], four, codes);
        }
    }
    for (int r = 0; r < R; ++r) dot[r].v = _mm512_sub_epi32(total[r], excess);
}

struct ByteSum {
    __m512i v;
};
constexpr std::size_t kBytesAtOnce = 64;
inline ByteSum bytes_of(int x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
inline void add_product(ByteSum& sum, ByteSum codes, ByteSum inputs) {
    sum.v = _mm512_dpbusd_epi32(sum.v, codes.v, inputs.v);
}
#ifdef __AVX512F__
inline void keep(ByteSum& sum) { __asm__ volatile("" : "+v"(sum.v)); }
#else
inline void keep(ByteSum&) {}  // tests emulate these instructions: there is no such register
#endif
