// Two panels side by side, as one vector of sixteen lanes on AVX512F, after simd_avx2.h. Does what pair.h does.

struct Pair {
    __m512 v;
};
struct IntPair {
    __m512i v;
};

inline Pair both(float x) { return {_mm512_set1_ps(x)}; }
inline Pair mul(Pair a, Pair b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Pair fma(Pair a, Pair b, Pair c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Pair to_float(const IntPair& a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F8 first(Pair a) { return {_mm512_castps512_ps256(a.v)}; }
inline F8 second(Pair a) { return {_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1))}; }

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
