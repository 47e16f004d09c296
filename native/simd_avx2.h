// Eight lanes on AVX2, FMA and F16C. Each function gives the bits of its namesake in simd_portable.h.
// Dot products are in files of their own (dot_avx2.h, dot_vnni.h, dot_avx512.h).

struct F8 {
    __m256 v;
};
struct I8 {
    __m256i v;
};

inline F8 set1(float x) { return {_mm256_set1_ps(x)}; }
inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline __m256i lanes_below(std::size_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F8 load_part(const float* p, std::size_t count) { return {_mm256_maskload_ps(p, lanes_below(count))}; }
inline void store_part(float* p, F8 a, std::size_t count) { _mm256_maskstore_ps(p, lanes_below(count), a.v); }
inline __m128i load_words(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline F8 load_half(const std::uint8_t* p) { return {_mm256_cvtph_ps(load_words(p))}; }
inline F8 load_bfloat(const std::uint8_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(p)), 16))};
}
struct Two {
    F8 even, odd;
};
inline Two load_two(const BFloat* p) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))}, {_mm256_castsi256_ps(_mm256_and_si256(words, upper))}};
}
inline Two load_two(const std::int8_t* p) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16), odd = _mm256_srai_epi32(words, 16);
    return {{_mm256_cvtepi32_ps(even)}, {_mm256_cvtepi32_ps(odd)}};
}
inline F8 round_bfloat(F8 a) {
    const __m256i bits = _mm256_castps_si256(a.v), sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i size = _mm256_andnot_si256(sign, bits);
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), size);
    const __m256i nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f800000));
    const __m256i or_zero = _mm256_blendv_epi8(up, _mm256_and_si256(bits, sign), small);
    const __m256i or_nan = _mm256_blendv_epi8(or_zero, _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000)), nan);
    return {_mm256_castsi256_ps(_mm256_and_si256(or_nan, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}

inline F8 add(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 sub(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 mul(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 div(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 max(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F8 min(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F8 zero_where_less(F8 a, F8 x, F8 bound) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, bound.v, _CMP_LT_OQ), a.v)};
}
inline F8 between(F8 a, int first, int last, float other) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(index, _mm256_set1_epi32(first - 1)),
                                        _mm256_cmpgt_epi32(_mm256_set1_epi32(last), index));
    return {_mm256_blendv_ps(_mm256_set1_ps(other), a.v, _mm256_castsi256_ps(in))};
}
inline __m128 halves(F8 a) { return _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1)); }
inline float sum(F8 a) {
    const __m128 four = halves(a);
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float peak(F8 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline F8 to_float(I8 a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline F8 scale_by_power(F8 a, F8 n) {
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(bits))};
}
inline F8 exponent_of(F8 a) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.v), 23))}; }

inline std::uint32_t magnitude_bits(const float* x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (std::size_t i = 0; i < kGroup; i += 8) {
        const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, mask));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
}
inline std::int32_t round_group(const float* x, float factor, std::int8_t* codes) {
    const __m256 by = _mm256_set1_ps(factor);
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), by));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), by));
    const __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16), by));
    const __m256i d = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 24), by));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    const __m256i in_order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), in_order);
    const __m256i total = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtsi128_si32(four);
}
inline bool all_finite(F8 a) {
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    const __m256i same = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(a.v), exponent), exponent);
    return _mm256_testz_si256(same, same);
}

inline __m256i load_bytes(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i repeat_four(const std::int8_t* p) {
    std::int32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return _mm256_set1_epi32(bytes);
}

// Calls visit(codes of one panel, of the other, first input) for every four inputs of a group of 4-bit codes.
template <class Visit>
inline void each_four_inputs(const std::uint8_t* w0, const std::uint8_t* w1, Visit visit) {
    const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m256i both0 = load_bytes(w0 + 32 * j), both1 = load_bytes(w1 + 32 * j);
        visit(_mm256_and_si256(both0, low), _mm256_and_si256(both1, low), 4 * j);
        visit(_mm256_and_si256(_mm256_srli_epi16(both0, 4), low), _mm256_and_si256(_mm256_srli_epi16(both1, 4), low),
              16 + 4 * j);
    }
}
