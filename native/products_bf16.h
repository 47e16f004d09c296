// Products of numbers of the pages with AVX512-BF16, after pair_avx512.h: the instruction does what products.h says, two
// multiply-adds on each lane, odd numbers first, except that it takes what is too small for a full mantissa for zero. Of such
// numbers no score and no sum of values shows anything.

#include "products_f32.h"

struct Halves {
    __m512bh v;
};
struct HalfFactor {
    std::uint16_t even, odd;
};
template <class T>
using FactorOf = std::conditional_t<sizeof(T) == sizeof(float), Factor, HalfFactor>;

inline Pair add(Pair sum, const Twos& a, Factor b) { return fma(both(b.even), a.even, fma(both(b.odd), a.odd, sum)); }
inline Pair add(Pair sum, Halves a, const HalfFactor& b) {
    std::int32_t two;
    std::memcpy(&two, &b, sizeof two);
    return {_mm512_dpbf16_ps(sum.v, a.v, (__m512bh)_mm512_set1_epi32(two))};
}

inline Halves load_twos(const BFloat* p, std::size_t) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline Halves load_twos(const std::int8_t* p, std::size_t) {
    const auto widen = [](const std::int8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    };
    return {_mm512_cvtne2ps_pbh(widen(p + 16), widen(p))};
}
template <class T, int R, std::size_t V, class FactorAt>
inline void add_products(const T* p, std::size_t lanes, FactorAt factor_of, std::size_t v, Pair (&acc)[R][V]) {
    const auto twos = load_twos(p, lanes);
    for (int r = 0; r < R; ++r) acc[r][v] = add(acc[r][v], twos, factor_of(r));
}

template <class T>
inline void store_factors(FactorOf<T>* to, Pair x) {
    if constexpr (sizeof(T) == sizeof(float)) return store_sixteen(&to->even, x);
    if constexpr (sizeof(T) < sizeof(float)) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x.v));
    }
}
