// Two panels side by side, as two vectors of eight lanes: what `linear` computes with. Included after the lanes; an
// instruction set of sixteen lanes has its own (dot_avx512.h).

struct Pair {
    F8 first, second;
};
using IntPair = I8[2];

inline Pair both(float x) { return {set1(x), set1(x)}; }
inline Pair mul(Pair a, Pair b) { return {mul(a.first, b.first), mul(a.second, b.second)}; }
inline Pair fma(Pair a, Pair b, Pair c) { return {fma(a.first, b.first, c.first), fma(a.second, b.second, c.second)}; }
inline Pair to_float(const IntPair& a) { return {to_float(a[0]), to_float(a[1])}; }
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
