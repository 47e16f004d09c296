// Dot products of bytes with 256-bit VNNI, after simd_avx2.h. Each function gives the bits of its namesake in
// simd_portable.h: the instruction adds four exact products to a 32-bit sum and never saturates.

// Unsigned 4-bit times signed bytes: what the instruction is made for.
template <int R>
[[gnu::always_inline]] inline void dot_q4(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, I8 (*dot)[2]) {
    __m256i total[R][2];
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_si256();
    each_four_inputs(w[0], w[1], [&](__m256i code0, __m256i code1, int input) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256i four = repeat_four(a + r * width + input);
            total[r][0] = _mm256_dpbusd_avx_epi32(total[r][0], code0, four);
            total[r][1] = _mm256_dpbusd_avx_epi32(total[r][1], code1, four);
        }
    });
    for (int r = 0; r < R; ++r) {
        dot[r][0].v = total[r][0];
        dot[r][1].v = total[r][1];
    }
}

// Signed times signed, where the instruction wants one factor unsigned: sum (a + 128) w - 128 sum w. It is the activations
// that are shifted, because then the correction belongs to the weights and all rows share it.
template <int R>
[[gnu::always_inline]] inline void dot_q8(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, int begin, int end,
                   I8 (*dot)[2]) {
    const __m256i shift = _mm256_set1_epi8(-128);  // as a signed byte; unsigned it is 128
    __m256i total[R][2], excess[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 4 * begin; j < 4 * end; ++j) {
        const __m256i code0 = load_bytes(w[0] + 32 * j), code1 = load_bytes(w[1] + 32 * j);
        excess[0] = _mm256_dpbusd_avx_epi32(excess[0], shift, code0);
        excess[1] = _mm256_dpbusd_avx_epi32(excess[1], shift, code1);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256i four = _mm256_xor_si256(repeat_four(a + r * width + 4 * j), shift);
            total[r][0] = _mm256_dpbusd_avx_epi32(total[r][0], four, code0);
            total[r][1] = _mm256_dpbusd_avx_epi32(total[r][1], four, code1);
        }
    }
    for (int r = 0; r < R; ++r) {
        dot[r][0].v = _mm256_sub_epi32(total[r][0], excess[0]);
        dot[r][1].v = _mm256_sub_epi32(total[r][1], excess[1]);
    }
}

struct ByteSum {
    __m256i v;
};
constexpr std::size_t kBytesAtOnce = 32;
inline ByteSum bytes_of(int x) { return {_mm256_set1_epi8(static_cast<char>(x))}; }
inline void add_product(ByteSum& sum, ByteSum codes, ByteSum inputs) {
    sum.v = _mm256_dpbusd_avx_epi32(sum.v, codes.v, inputs.v);
}
inline void keep(ByteSum& sum) { __asm__ volatile("" : "+x"(sum.v)); }
