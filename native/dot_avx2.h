// Dot products of bytes on AVX2, after simd_avx2.h. Each function gives the bits of its namesake in simd_portable.h.

// Keeps a sum in its register: left alone, compilers reorder integer sums and spill every product.
inline void pin(__m256i& sum) { __asm__("" : "+x"(sum)); }

// Unsigned 4-bit times signed bytes: sums of pairs stay below 3,810, of eight of them below 30,480, so 16 bits hold a group.
template <int R>
[[gnu::always_inline]] inline void dot_q4(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, I8 (*dot)[2]) {
    __m256i total[R][2];
    each_four_inputs(w[0], w[1], [&](__m256i code0, __m256i code1, int input) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256i four = repeat_four(a + r * width + input);
            const __m256i p0 = _mm256_maddubs_epi16(code0, four), p1 = _mm256_maddubs_epi16(code1, four);
            total[r][0] = input == 0 ? p0 : _mm256_add_epi16(total[r][0], p0);
            total[r][1] = input == 0 ? p1 : _mm256_add_epi16(total[r][1], p1);
            pin(total[r][0]);
            pin(total[r][1]);
        }
    });
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        dot[r][0].v = _mm256_madd_epi16(total[r][0], ones);
        dot[r][1].v = _mm256_madd_epi16(total[r][1], ones);
    }
}

// Signed times signed: |w| * (sign(w) a). Sums of pairs stay below 128 * 127 * 2 = 32,512.
template <int R>
[[gnu::always_inline]] inline void dot_q8(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, int begin, int end,
                   I8 (*dot)[2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total[R][2];
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 4 * begin; j < 4 * end; ++j) {
        const __m256i code0 = load_bytes(w[0] + 32 * j), code1 = load_bytes(w[1] + 32 * j);
        const __m256i size0 = _mm256_abs_epi8(code0), size1 = _mm256_abs_epi8(code1);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256i four = repeat_four(a + r * width + 4 * j);
            const __m256i p0 = _mm256_maddubs_epi16(size0, _mm256_sign_epi8(four, code0));
            const __m256i p1 = _mm256_maddubs_epi16(size1, _mm256_sign_epi8(four, code1));
            total[r][0] = _mm256_add_epi32(total[r][0], _mm256_madd_epi16(p0, ones));
            total[r][1] = _mm256_add_epi32(total[r][1], _mm256_madd_epi16(p1, ones));
            pin(total[r][0]);
            pin(total[r][1]);
        }
    }
    for (int r = 0; r < R; ++r) {
        dot[r][0].v = total[r][0];
        dot[r][1].v = total[r][1];
    }
}

struct ByteSum {
    __m256i v;
};
constexpr std::size_t kBytesAtOnce = 32;
inline ByteSum bytes_of(int x) { return {_mm256_set1_epi8(static_cast<char>(x))}; }
inline void add_product(ByteSum& sum, ByteSum codes, ByteSum inputs) {
    sum.v = _mm256_add_epi16(sum.v, _mm256_maddubs_epi16(codes.v, inputs.v));
}
inline void keep(ByteSum& sum) { __asm__ volatile("" : "+x"(sum.v)); }
