// Dot products of bytes with 512-bit VNNI, both panels of a pair in one instruction, after pair_avx512.h. Each function
// gives the bits of its namesake in simd_portable.h; dot_vnni.h says why.

inline __m512i repeat_four_wide(const std::int8_t* p) {
    std::int32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return _mm512_set1_epi32(bytes);
}

// Sixteen channels and four inputs of each pair of the strip.
template <class Make>
inline void each_codes(__m512i (&codes)[kPairs], Make make) {
#pragma GCC unroll 2
    for (std::size_t i = 0; i < kPairs; ++i) codes[i] = make(i);
}

template <int R>
[[gnu::always_inline]] inline void dot_q4(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, IntPair* dot) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i total[R][kPairs], early[kPairs], late[kPairs];
    for (int r = 0; r < R; ++r) each_codes(total[r], [&](std::size_t) { return _mm512_setzero_si512(); });
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        each_codes(late, [&](std::size_t i) { return load_bytes(w[2 * i] + 32 * j, w[2 * i + 1] + 32 * j); });
        each_codes(early, [&](std::size_t i) { return _mm512_and_si512(late[i], low); });
        each_codes(late, [&](std::size_t i) { return _mm512_and_si512(_mm512_srli_epi16(late[i], 4), low); });
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i first = repeat_four_wide(a + r * width + 4 * j);
            each_codes(total[r], [&](std::size_t i) { return _mm512_dpbusd_epi32(total[r][i], early[i], first); });
            const __m512i second = repeat_four_wide(a + r * width + 16 + 4 * j);
            each_codes(total[r], [&](std::size_t i) { return _mm512_dpbusd_epi32(total[r][i], late[i], second); });
        }
    }
    for (int r = 0; r < R; ++r) {
        for (std::size_t i = 0; i < kPairs; ++i) dot[r * kPairs + i].v = total[r][i];
    }
}

template <int R>
[[gnu::always_inline]] inline void dot_q8(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, int begin,
                                          int end, IntPair* dot) {
    const __m512i shift = _mm512_set1_epi8(-128);
    __m512i total[R][kPairs], codes[kPairs], excess[kPairs];
    for (int r = 0; r < R; ++r) each_codes(total[r], [&](std::size_t) { return _mm512_setzero_si512(); });
    each_codes(excess, [&](std::size_t) { return _mm512_setzero_si512(); });
#pragma GCC unroll 8
    for (int j = 4 * begin; j < 4 * end; ++j) {
        each_codes(codes, [&](std::size_t i) { return load_bytes(w[2 * i] + 32 * j, w[2 * i + 1] + 32 * j); });
        each_codes(excess, [&](std::size_t i) { return _mm512_dpbusd_epi32(excess[i], shift, codes[i]); });
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i four = _mm512_xor_si512(repeat_four_wide(a + r * width + 4 * j), shift);
            each_codes(total[r], [&](std::size_t i) { return _mm512_dpbusd_epi32(total[r][i], four, codes[i]); });
        }
    }
    for (int r = 0; r < R; ++r) {
        for (std::size_t i = 0; i < kPairs; ++i) dot[r * kPairs + i].v = _mm512_sub_epi32(total[r][i], excess[i]);
    }
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
