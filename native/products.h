// Products of numbers of the pages, two at a time, in float32: sum + odd * odd, then + even * even, each a fused multiply-add.
// Keys and values of bf16 and bytes meet queries and weights that were rounded to bf16, so that instructions for bf16 give
// the same bits (products_bf16.h).

#include "products_f32.h"

template <class T>
using FactorOf = Factor;

template <class T>
inline Twos load_twos(const T* p, std::size_t) {
    const Two low = load_two(p), high = load_two(p + 16);
    return {join(low.even, high.even), join(low.odd, high.odd)};
}

// acc[r][v] += them * factor_of(r), for each r.
template <class T, int R, std::size_t V, class FactorAt>
inline void add_products(const T* p, std::size_t lanes, FactorAt factor_of, std::size_t v, Pair (&acc)[R][V]) {
    const Twos twos = load_twos(p, lanes);
    for (int r = 0; r < R; ++r) acc[r][v] = fma(both(factor_of(r).odd), twos.odd, acc[r][v]);
    for (int r = 0; r < R; ++r) acc[r][v] = fma(both(factor_of(r).even), twos.even, acc[r][v]);
}

// Sixteen numbers as eight factors.
template <class T>
inline void store_factors(Factor* to, Pair x) {
    if constexpr (sizeof(T) < sizeof(float)) x = join(round_bfloat(first(x)), round_bfloat(second(x)));
    store_sixteen(&to->even, x);
}
