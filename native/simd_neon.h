// Eight lanes on AArch64 with dot products, as two vectors of four. Each function gives the bits of its namesake in
// simd_portable.h.

struct F8 {
    float32x4_t low, high;
};
struct I8 {
    int32x4_t low, high;
};

inline F8 set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, F8 a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
}
inline F8 load_part(const float* p, std::size_t count) {
    float v[8] = {};
    std::memcpy(v, p, count * sizeof(float));
    return load(v);
}
inline void store_part(float* p, F8 a, std::size_t count) {
    float v[8];
    store(v, a);
    std::memcpy(p, v, count * sizeof(float));
}
inline uint16x8_t load_words(const std::uint8_t* p) { return vreinterpretq_u16_u8(vld1q_u8(p)); }
inline F8 load_half(const std::uint8_t* p) {
    const float16x8_t words = vreinterpretq_f16_u16(load_words(p));
    return {vcvt_f32_f16(vget_low_f16(words)), vcvt_high_f32_f16(words)};
}

struct Two {
    F8 even, odd;
};
inline F8 widen_bfloat(uint16x8_t words) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(words), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(words, 16))};
}
inline F8 widen_signed(int8x8_t bytes) {
    const int16x8_t wide = vmovl_s8(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}
inline F8 load_bfloat(const std::uint8_t* p) { return widen_bfloat(load_words(p)); }
inline Two load_two(const BFloat* p) {
    const uint16x8x2_t words = vld2q_u16(reinterpret_cast<const std::uint16_t*>(p));
    return {widen_bfloat(words.val[0]), widen_bfloat(words.val[1])};
}
inline Two load_two(const std::int8_t* p) {
    const int8x8x2_t bytes = vld2_s8(p);
    return {widen_signed(bytes.val[0]), widen_signed(bytes.val[1])};
}
inline float32x4_t round_bfloat(float32x4_t a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a), sign = vdupq_n_u32(0x80000000u);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), size = vbicq_u32(bits, sign);
    const uint32x4_t or_zero = vbslq_u32(vcltq_u32(size, vdupq_n_u32(0x00800000u)), vandq_u32(bits, sign), up);
    const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x00400000u));
    const uint32x4_t or_nan = vbslq_u32(vcgtq_u32(size, vdupq_n_u32(0x7f800000u)), nan, or_zero);
    return vreinterpretq_f32_u32(vandq_u32(or_nan, vdupq_n_u32(0xffff0000u)));
}
inline F8 round_bfloat(F8 a) { return {round_bfloat(a.low), round_bfloat(a.high)}; }

inline F8 add(F8 a, F8 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline F8 sub(F8 a, F8 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline F8 mul(F8 a, F8 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline F8 div(F8 a, F8 b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
// vmaxq would keep a NaN of either side.
inline F8 max(F8 a, F8 b) {
    return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
}
inline F8 min(F8 a, F8 b) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
}
inline F8 zero_where_less(F8 a, F8 x, F8 bound) {
    const float32x4_t zero = vdupq_n_f32(0.0f);
    return {vbslq_f32(vcltq_f32(x.low, bound.low), zero, a.low), vbslq_f32(vcltq_f32(x.high, bound.high), zero, a.high)};
}
inline F8 between(F8 a, int first, int last, float other) {
    float v[8];
    store(v, a);
    for (int i = 0; i < 8; ++i) v[i] = i >= first && i < last ? v[i] : other;
    return load(v);
}
// Lanes 0 + 4 + (2 + 6) and 1 + 5 + (3 + 7).
inline float32x2_t halves(F8 a) {
    const float32x4_t four = vaddq_f32(a.low, a.high);
    return vadd_f32(vget_low_f32(four), vget_high_f32(four));
}
inline float sum(F8 a) {
    const float32x2_t two = halves(a);
    return vget_lane_f32(vpadd_f32(two, two), 0);
}
inline float peak(F8 a) {
    const auto larger = [](float32x2_t x, float32x2_t y) { return vbsl_f32(vcgt_f32(x, y), x, y); };
    const float32x4_t four = vbslq_f32(vcgtq_f32(a.low, a.high), a.low, a.high);
    const float32x2_t two = larger(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(larger(two, vdup_lane_f32(two, 1)), 0);
}
inline F8 to_float(I8 a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
inline F8 scale_by_power(F8 a, F8 n) {
    const int32x4_t bias = vdupq_n_s32(127);
    const int32x4_t low = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.low), bias), 23);
    const int32x4_t high = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.high), bias), 23);
    return mul(a, {vreinterpretq_f32_s32(low), vreinterpretq_f32_s32(high)});
}
inline F8 exponent_of(F8 a) {
    return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a.low), 23)),
            vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a.high), 23))};
}

inline std::uint32_t magnitude_bits(const float* x) {
    const uint32x4_t mask = vdupq_n_u32(0x7fffffffu);
    uint32x4_t largest = vdupq_n_u32(0);
    for (std::size_t i = 0; i < kGroup; i += 4) {
        largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), mask));
    }
    return vmaxvq_u32(largest);
}
inline std::int32_t round_group(const float* x, float factor, std::int8_t* codes) {
    int32x4_t total = vdupq_n_s32(0);
    const auto four = [&](std::size_t i) {
        const int32x4_t rounded = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), factor));
        total = vaddq_s32(total, rounded);
        return vmovn_s32(rounded);
    };
    for (std::size_t i = 0; i < kGroup; i += 8) {
        const int16x4_t low = four(i), high = four(i + 4);
        vst1_s8(codes + i, vmovn_s16(vcombine_s16(low, high)));
    }
    return vaddvq_s32(total);
}
inline bool all_finite(F8 a) {
    const uint32x4_t exponent = vdupq_n_u32(0x7f800000u);
    const uint32x4_t low = vceqq_u32(vandq_u32(vreinterpretq_u32_f32(a.low), exponent), exponent);
    const uint32x4_t high = vceqq_u32(vandq_u32(vreinterpretq_u32_f32(a.high), exponent), exponent);
    return vmaxvq_u32(vorrq_u32(low, high)) == 0;
}

// Four inputs times 8 channels of a panel; the inputs are the four bytes `Lane` of sixteen.
template <int Lane>
inline I8 add_products(I8 total, int8x16_t low, int8x16_t high, int8x16_t inputs) {
    return {vdotq_laneq_s32(total.low, low, inputs, Lane), vdotq_laneq_s32(total.high, high, inputs, Lane)};
}

// Adds inputs 4 J to 4 J + 3 of sixteen, and for 4-bit codes those of the sixteen behind them.
template <int J, int R>
inline void add_four_q4(const std::uint8_t* const* w, const int8x16_t (&early)[R], const int8x16_t (&late)[R],
                        I8 (*dot)[2]) {
    const uint8x16_t mask = vdupq_n_u8(15);
    for (int p = 0; p < 2; ++p) {
        const uint8x16_t low = vld1q_u8(w[p] + 32 * J), high = vld1q_u8(w[p] + 32 * J + 16);
        const int8x16_t low_early = vreinterpretq_s8_u8(vandq_u8(low, mask));
        const int8x16_t low_late = vreinterpretq_s8_u8(vshrq_n_u8(low, 4));
        const int8x16_t high_early = vreinterpretq_s8_u8(vandq_u8(high, mask));
        const int8x16_t high_late = vreinterpretq_s8_u8(vshrq_n_u8(high, 4));
        for (int r = 0; r < R; ++r) {
            dot[r][p] = add_products<J>(dot[r][p], low_early, high_early, early[r]);
            dot[r][p] = add_products<J>(dot[r][p], low_late, high_late, late[r]);
        }
    }
}
template <int R>
inline void dot_q4(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, I8 (*dot)[2]) {
    int8x16_t early[R], late[R];
    for (int r = 0; r < R; ++r) {
        early[r] = vld1q_s8(a + r * width);
        late[r] = vld1q_s8(a + r * width + 16);
        dot[r][0] = dot[r][1] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    }
    add_four_q4<0>(w, early, late, dot);
    add_four_q4<1>(w, early, late, dot);
    add_four_q4<2>(w, early, late, dot);
    add_four_q4<3>(w, early, late, dot);
}

template <int J, int R>
inline void add_four_q8(const std::uint8_t* const* w, const int8x16_t (&inputs)[R], I8 (*dot)[2]) {
    for (int p = 0; p < 2; ++p) {
        const int8x16_t low = vreinterpretq_s8_u8(vld1q_u8(w[p] + 32 * J));
        const int8x16_t high = vreinterpretq_s8_u8(vld1q_u8(w[p] + 32 * J + 16));
        for (int r = 0; r < R; ++r) dot[r][p] = add_products<J>(dot[r][p], low, high, inputs[r]);
    }
}
template <int R>
inline void dot_q8(const std::uint8_t* const* w, const std::int8_t* a, std::size_t width, int begin, int end,
                   I8 (*dot)[2]) {
    for (int r = 0; r < R; ++r) dot[r][0] = dot[r][1] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    for (int half = begin; half < end; ++half) {
        const std::uint8_t* const here[2] = {w[0] + 128 * half, w[1] + 128 * half};
        int8x16_t inputs[R];
        for (int r = 0; r < R; ++r) inputs[r] = vld1q_s8(a + r * width + 16 * half);
        add_four_q8<0>(here, inputs, dot);
        add_four_q8<1>(here, inputs, dot);
        add_four_q8<2>(here, inputs, dot);
        add_four_q8<3>(here, inputs, dot);
    }
}

struct ByteSum {
    int32x4_t v;
};
constexpr std::size_t kBytesAtOnce = 16;
inline ByteSum bytes_of(int x) { return {vreinterpretq_s32_s8(vdupq_n_s8(static_cast<std::int8_t>(x)))}; }
inline void add_product(ByteSum& sum, ByteSum codes, ByteSum inputs) {
    sum.v = vdotq_s32(sum.v, vreinterpretq_s8_s32(codes.v), vreinterpretq_s8_s32(inputs.v));
}
inline void keep(ByteSum& sum) { __asm__ volatile("" : "+w"(sum.v)); }
