// Sixteen lanes as one vector of AVX512F, after simd_avx2.h. Each function gives the bits of its namesake in pair.h.

struct Pair {
    __m512 v;
};
struct IntPair {
    __m512i v;
};

inline Pair join(F8 first, F8 second) {
    const __m512i lower = _mm512_castsi256_si512(_mm256_castps_si256(first.v));
    return {_mm512_castsi512_ps(_mm512_inserti64x4(lower, _mm256_castps_si256(second.v), 1))};
}
inline Pair both(float x) { return {_mm512_set1_ps(x)}; }
inline Pair load_sixteen(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_sixteen(float* p, Pair a) { _mm512_storeu_ps(p, a.v); }
inline Pair add(Pair a, Pair b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Pair sub(Pair a, Pair b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Pair div(Pair a, Pair b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Pair min(Pair a, Pair b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Pair max(Pair a, Pair b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Pair mul(Pair a, Pair b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Pair fma(Pair a, Pair b, Pair c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Pair between(Pair a, int first, int last, float other) {
    const auto lanes_below = [](int count) { return count <= 0 ? 0u : count >= 16 ? 0xffffu : (1u << count) - 1u; };
    const unsigned in = lanes_below(last) & ~lanes_below(first);
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(in), a.v)};
}
inline Pair zero_where_less(Pair a, Pair x, Pair bound) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ), a.v)};
}
inline Pair scale_by_power(Pair a, Pair n) {
    const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvttps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(bits))};
}
inline Pair exponent_of(Pair a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))}; }
inline Pair to_float(const IntPair& a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F8 first(Pair a) { return {_mm512_castps512_ps256(a.v)}; }
inline F8 second(Pair a) { return {_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1))}; }
inline float sum(Pair a) { return sum(add(first(a), second(a))); }
inline float peak(Pair a) { return peak(max(first(a), second(a))); }

// 32 bytes of each panel.
inline __m512i load_bytes(const std::uint8_t* p0, const std::uint8_t* p1) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_bytes(p0)), load_bytes(p1), 1);
}
// Eight numbers of each panel.
template <Encoding Kind>
inline Pair load_pair(const std::uint8_t* p0, const std::uint8_t* p1) {
    if constexpr (Kind == Encoding::f32) return {_mm512_castsi512_ps(load_bytes(p0, p1))};
    const __m256i words = _mm256_set_m128i(load_words(p1), load_words(p0));
    if constexpr (Kind == Encoding::f16) return {_mm512_cvtph_ps(words)};
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
}
