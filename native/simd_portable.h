// Eight lanes in plain C++. The meaning of every operation is defined here; other instruction sets must give the same bits.
// Included inside an anonymous namespace, after <cmath>, <cstring>, "kernels.h" and "half.h".

struct F8 {
    float v[8];
};
struct I8 {
    std::int32_t v[8];
};

template <class F>
inline F8 lanes(F f) {
    F8 out;
    for (int i = 0; i < 8; ++i) out.v[i] = f(i);
    return out;
}

inline F8 set1(float x) {
    return lanes([&](int) { return x; });
}
inline F8 load(const float* p) {
    F8 out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline void store(float* p, F8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F8 load_part(const float* p, std::size_t count) {
    F8 out = {};
    std::memcpy(out.v, p, count * sizeof(float));
    return out;
}
inline void store_part(float* p, F8 a, std::size_t count) { std::memcpy(p, a.v, count * sizeof(float)); }

inline F8 load_half(const std::uint8_t* p) {
    std::uint16_t bits[8];
    std::memcpy(bits, p, sizeof bits);
    return lanes([&](int i) { return half_to_float(bits[i]); });
}
inline F8 load_bfloat(const std::uint8_t* p) {
    std::uint16_t bits[8];
    std::memcpy(bits, p, sizeof bits);
    return lanes([&](int i) { return bfloat_to_float(bits[i]); });
}

// Eight times two neighbours.
struct Two {
    F8 even, odd;
};
inline Two load_two(const BFloat* p) {
    std::uint16_t bits[16];
    std::memcpy(bits, p, sizeof bits);
    return {lanes([&](int i) { return bfloat_to_float(bits[2 * i]); }),
            lanes([&](int i) { return bfloat_to_float(bits[2 * i + 1]); })};
}
inline Two load_two(const std::int8_t* p) {
    return {lanes([&](int i) { return static_cast<float>(p[2 * i]); }),
            lanes([&](int i) { return static_cast<float>(p[2 * i + 1]); })};
}
// To the nearest number of bf16, ties to even; what is too small for a full mantissa becomes a zero, NaN stays NaN.
inline F8 round_bfloat(F8 a) {
    return lanes([&](int i) { return bfloat_to_float(float_to_bfloat(a.v[i])); });
}

inline F8 add(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline F8 sub(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline F8 mul(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline F8 div(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline F8 fma(F8 a, F8 b, F8 c) {
    return lanes([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
// A NaN in `b` stays, one in `a` does not.
inline F8 max(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F8 min(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F8 zero_where_less(F8 a, F8 x, F8 bound) {
    return lanes([&](int i) { return x.v[i] < bound.v[i] ? 0.0f : a.v[i]; });
}
// Lanes [first, last) of `a`, `other` elsewhere.
inline F8 between(F8 a, int first, int last, float other) {
    return lanes([&](int i) { return i >= first && i < last ? a.v[i] : other; });
}
inline float sum(F8 a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline float peak(F8 a) {
    const auto larger = [](float x, float y) { return x > y ? x : y; };
    return larger(larger(larger(a.v[0], a.v[4]), larger(a.v[2], a.v[6])), larger(larger(a.v[1], a.v[5]), larger(a.v[3], a.v[7])));
}
inline F8 to_float(I8 a) {
    return lanes([&](int i) { return static_cast<float>(a.v[i]); });
}
// a * 2^n for whole n, -126 <= n <= 127
inline F8 scale_by_power(F8 a, F8 n) {
    return lanes([&](int i) {
        const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(n.v[i]) + 127) << 23;
        float power;
        std::memcpy(&power, &bits, sizeof power);
        return a.v[i] * power;
    });
}

// The lowest bits of each number, as the exponent of another one.
inline F8 exponent_of(F8 a) {
    return lanes([&](int i) {
        std::uint32_t bits;
        std::memcpy(&bits, &a.v[i], sizeof bits);
        return bits_to_float(bits << 23);
    });
}

// The largest magnitude of 32 numbers, as bits: NaN is above infinity, infinity above the rest.
inline std::uint32_t magnitude_bits(const float* x) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < kGroup; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}
// Round 32 products x * factor (|.| <= 127) to bytes, ties to even; returns their sum.
inline std::int32_t round_group(const float* x, float factor, std::int8_t* codes) {
    std::int32_t total = 0;
    for (std::size_t i = 0; i < kGroup; ++i) {
        const float rounded = (x[i] * factor + 12582912.0f) - 12582912.0f;
        const std::int32_t code = static_cast<std::int32_t>(rounded);
        codes[i] = static_cast<std::int8_t>(code);
        total += code;
    }
    return total;
}
inline bool all_finite(F8 a) {
    for (float x : a.v) {
        std::uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        if ((bits & 0x7f800000u) == 0x7f800000u) return false;
    }
    return true;
}

// Exact dot products of one group: R rows of 32 bytes with 8 channels of each of two panels.
template <int R>
inline void dot_q4(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, I8 (*dot)[2]) {
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < 2; ++p) {
                        for (int c = 0; c < 8; ++c) {
                std::int32_t total = 0;
                for (int j = 0; j < 4; ++j) {
                    for (int i = 0; i < 4; ++i) {
                        const int code = w[p][32 * j + 4 * c + i];
                        total += (code & 15) * a[r * width + 4 * j + i] + (code >> 4) * a[r * width + 16 + 4 * j + i];
                    }
                }
                dot[r][p].v[c] = total;
            }
        }
    }
}
// The same for inputs [16 begin, 16 end) of a group of signed bytes.
template <int R>
inline void dot_q8(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, int begin, int end,
                   I8 (*dot)[2]) {
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < 2; ++p) {
                        for (int c = 0; c < 8; ++c) {
                std::int32_t total = 0;
                for (int j = 4 * begin; j < 4 * end; ++j) {
                    for (int i = 0; i < 4; ++i) {
                        total += static_cast<std::int8_t>(w[p][32 * j + 4 * c + i]) * a[r * width + 4 * j + i];
                    }
                }
                dot[r][p].v[c] = total;
            }
        }
    }
}

// One multiply-add of bytes as it comes, for the limit of the machine.
struct ByteSum {
    std::int32_t v;
};
constexpr std::size_t kBytesAtOnce = 1;
inline ByteSum bytes_of(int x) { return {x}; }
inline void add_product(ByteSum& sum, ByteSum codes, ByteSum inputs) { sum.v += codes.v * inputs.v; }
inline void keep(ByteSum& sum) { __asm__ volatile("" : "+r"(sum.v)); }
