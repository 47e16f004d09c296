// Sixteen lanes, as two vectors of eight: two panels side by side in `linear`, a vector of keys or values in attention.
// Included after the lanes; AVX512 has its own (pair_avx512.h), of the same bits.

struct Pair {
    F8 first, second;
};
using IntPair = I8[2];

inline Pair join(F8 first, F8 second) { return {first, second}; }
inline Pair both(float x) { return {set1(x), set1(x)}; }
inline Pair load_sixteen(const float* p) { return {load(p), load(p + 8)}; }
inline void store_sixteen(float* p, Pair a) {
    store(p, a.first);
    store(p + 8, a.second);
}
inline Pair add(Pair a, Pair b) { return {add(a.first, b.first), add(a.second, b.second)}; }
inline Pair sub(Pair a, Pair b) { return {sub(a.first, b.first), sub(a.second, b.second)}; }
inline Pair mul(Pair a, Pair b) { return {mul(a.first, b.first), mul(a.second, b.second)}; }
inline Pair fma(Pair a, Pair b, Pair c) { return {fma(a.first, b.first, c.first), fma(a.second, b.second, c.second)}; }
inline Pair div(Pair a, Pair b) { return {div(a.first, b.first), div(a.second, b.second)}; }
inline Pair min(Pair a, Pair b) { return {min(a.first, b.first), min(a.second, b.second)}; }
inline Pair max(Pair a, Pair b) { return {max(a.first, b.first), max(a.second, b.second)}; }
inline Pair between(Pair a, int first, int last, float other) {
    return {between(a.first, first, last, other), between(a.second, first - 8, last - 8, other)};
}
inline Pair zero_where_less(Pair a, Pair x, Pair bound) {
    return {zero_where_less(a.first, x.first, bound.first), zero_where_less(a.second, x.second, bound.second)};
}
inline Pair scale_by_power(Pair a, Pair n) { return {scale_by_power(a.first, n.first), scale_by_power(a.second, n.second)}; }
inline Pair exponent_of(Pair a) { return {exponent_of(a.first), exponent_of(a.second)}; }
inline Pair to_float(const IntPair& a) { return {to_float(a[0]), to_float(a[1])}; }
inline float sum(Pair a) { return sum(add(a.first, a.second)); }
inline float peak(Pair a) { return peak(max(a.first, a.second)); }
inline F8 first(Pair a) { return a.first; }
inline F8 second(Pair a) { return a.second; }

template <Encoding Kind>
inline F8 load_numbers(const std::uint8_t* p) {
    if constexpr (Kind == Encoding::f16) return load_half(p);
    if constexpr (Kind == Encoding::bf16) return load_bfloat(p);
    return load(reinterpret_cast<const float*>(p));  // not by memcpy: a copy in halves, read as a whole, stalls
}
// Eight numbers of each panel.
template <Encoding Kind>
inline Pair load_pair(const std::uint8_t* p0, const std::uint8_t* p1) {
    return {load_numbers<Kind>(p0), load_numbers<Kind>(p1)};
}
