// The kernels, written once over eight lanes, `linear` over pairs of them. Included inside the anonymous namespace of each
// instruction set, after its lanes, dot products and pairs; so no two translation units share a function, and none is ever
// linked for a processor that cannot run it.

// ---------------------------------------------------------------- functions

// Of eight lanes or of sixteen.
template <class V>
inline V all(float x) {
    if constexpr (std::is_same_v<V, Pair>) return both(x);
    if constexpr (std::is_same_v<V, F8>) return set1(x);
}

// exp, relative error below 3e-7 for x <= 88, larger x as 88; exactly 0 below -87; NaN stays NaN.
template <class V>
inline V exponential(V x) {
    const V low = all<V>(-87.0f);
    const V bounded = max(low, min(all<V>(88.0f), x));
    const V magic = all<V>(12582912.0f);
    const V n = sub(add(mul(bounded, all<V>(1.44269504f)), magic), magic);
    V r = fma(n, all<V>(-0.693359375f), bounded);
    r = fma(n, all<V>(2.12194440e-4f), r);
    V y = all<V>(1.9875691500e-4f);
    y = fma(y, r, all<V>(1.3981999507e-3f));
    y = fma(y, r, all<V>(8.3334519073e-3f));
    y = fma(y, r, all<V>(4.1665795894e-2f));
    y = fma(y, r, all<V>(1.6666665459e-1f));
    y = fma(y, r, all<V>(5.0000001201e-1f));
    y = add(fma(mul(r, r), y, r), all<V>(1.0f));
    return zero_where_less(scale_by_power(y, n), x, low);
}

template <class V>
inline V silu(V x) {
    return div(x, add(all<V>(1.0f), exponential(sub(all<V>(0.0f), x))));
}

// 0.5 x (1 + tanh(u)) = x - x / (exp(2 u) + 1), u = sqrt(2 / pi) (x + 0.044715 x^3)
template <class V>
inline V gelu_tanh(V x) {
    const V cube = mul(mul(x, x), x);
    const V twice = mul(all<V>(1.5957691216f), fma(all<V>(0.044715f), cube, x));
    return sub(x, div(x, add(all<V>(1.0f), exponential(twice))));
}

template <class V>
inline V gated(Gate kind, V gate, V up) {
    return mul(kind == Gate::silu ? silu(gate) : gelu_tanh(gate), up);
}

// Calls visit(offset, load, store) for whole lanes and once for the rest.
template <class Visit>
inline void each_lanes(std::size_t count, Visit visit) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) visit(i, std::size_t{8});
    if (i < count) visit(i, count - i);
}
inline F8 load_up_to(const float* p, std::size_t count) { return count == 8 ? load(p) : load_part(p, count); }
inline void store_up_to(float* p, F8 a, std::size_t count) { count == 8 ? store(p, a) : store_part(p, a, count); }

// ---------------------------------------------------------------- rows

void quantize(const float* x, std::size_t width, std::int8_t* codes, float* scales, float* sums_out) {
    for (std::size_t group = 0; group < width / kGroup; ++group, x += kGroup, codes += kGroup) {
        const std::uint32_t bits = magnitude_bits(x);
        const float largest = bits_to_float(bits);
        if (bits >= 0x7f800000u || largest < 1e-30f) {
            std::memset(codes, 0, kGroup);
            scales[group] = sums_out[group] = bits >= 0x7f800000u ? bits_to_float(0x7fc00000u) : 0.0f;
            continue;
        }
        const std::int32_t total = round_group(x, 127.0f / largest, codes);
        scales[group] = largest / 127.0f;
        sums_out[group] = scales[group] * static_cast<float>(total);
    }
}

void norm(const float* x, const float* weight, std::size_t width, std::size_t group, float eps, float* out) {
    for (std::size_t start = 0; start < width; start += group, x += group, out += group) {
        F8 squares = set1(0.0f);
        each_lanes(group, [&](std::size_t i, std::size_t count) {
            const F8 a = load_up_to(x + i, count);
            squares = fma(a, a, squares);
        });
        const F8 factor = set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(group) + eps));
        each_lanes(group, [&](std::size_t i, std::size_t count) {
            const F8 a = load_up_to(x + i, count), w = load_up_to(weight + i, count);
            store_up_to(out + i, mul(mul(a, factor), w), count);
        });
    }
}

void rotate(const float* x, const float* cos, const float* sin, std::size_t width, std::size_t head_dim, std::size_t half,
            bool interleaved, float* out) {
    for (std::size_t head = 0; head < width; head += head_dim) {
        const float* from = x + head;
        float* to = out + head;
        for (std::size_t i = 0; i < half; ++i) {
            const std::size_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
            const float a = from[first], b = from[second];
            to[first] = a * cos[i] - b * sin[i];
            to[second] = b * cos[i] + a * sin[i];
        }
        if (to != from) std::memcpy(to + 2 * half, from + 2 * half, (head_dim - 2 * half) * sizeof(float));
    }
}

void gate(Gate kind, const float* gate, const float* up, std::size_t count, float* out) {
    each_lanes(count, [&](std::size_t i, std::size_t n) {
        store_up_to(out + i, gated(kind, load_up_to(gate + i, n), load_up_to(up + i, n)), n);
    });
}

void add_rows(const float* a, const float* b, std::size_t count, float* out) {
    each_lanes(count, [&](std::size_t i, std::size_t n) {
        store_up_to(out + i, add(load_up_to(a + i, n), load_up_to(b + i, n)), n);
    });
}

std::int64_t argmax(const float* x, std::size_t count) {
    bool finite = true;
    F8 best = set1(x[0]);
    each_lanes(count, [&](std::size_t i, std::size_t n) {
        const F8 a = load_up_to(x + i, n);
        finite = finite && all_finite(a);
        best = max(best, n == 8 ? a : between(a, 0, static_cast<int>(n), x[0]));
    });
    if (!finite) return -1;
    const float largest = peak(best);
    std::size_t index = 0;
    while (x[index] != largest) ++index;
    return static_cast<std::int64_t>(index);
}

// ---------------------------------------------------------------- linear

constexpr std::size_t kLine = 64;  // of a cache

// What a row adds up while weights pass by: a strip of 2 x kPairs panels, side by side.
constexpr std::size_t kStrip = 2 * kPairs;

struct Strip {
    Pair v[kPairs];
};

template <class Visit>
inline void each_pair(Visit visit) {
#pragma GCC unroll 2
    for (std::size_t i = 0; i < kPairs; ++i) visit(i);
}
inline Strip mul(const Strip& a, Pair b) {
    Strip out;
    each_pair([&](std::size_t i) { out.v[i] = mul(a.v[i], b); });
    return out;
}
inline F8 panel_of(const Strip& a, std::size_t index) {
    return index % 2 == 0 ? first(a.v[index / 2]) : second(a.v[index / 2]);
}
// With a gate panels of both matrices take turns in a strip.
inline Pair gate_of(Gate kind, const Strip& a, std::size_t pair) {
    const std::size_t i = 4 * pair, j = i + 2 < kStrip ? i + 2 : i;  // of one panel twice, where a strip has no second
    return gated(kind, join(panel_of(a, i), panel_of(a, j)), join(panel_of(a, i + 1), panel_of(a, j + 1)));
}

// Where the weights of a strip are, and how far behind them those of the next strip.
struct Sources {
    const std::uint8_t* at[kStrip];
    std::size_t ahead;

    void advance(std::size_t bytes) {
        for (const std::uint8_t*& p : at) p += bytes;
    }
};
template <Encoding Kind>
inline Strip load_strip(const Sources& w, std::size_t offset) {
    Strip out;
    each_pair([&](std::size_t i) { out.v[i] = load_pair<Kind>(w.at[2 * i] + offset, w.at[2 * i + 1] + offset); });
    return out;
}

// Each core computes R rows x a strip over all inputs: float accumulation in the order of the inputs. The first rows to pass a
// strip fetch the next one: a processor does not foresee it.

template <Encoding Kind>
struct Plain {
    static constexpr std::size_t kBytes = kLanes * (Kind == Encoding::f32 ? 4 : 2);

    template <int R>
    static void run(const Sources& weights, const Rows& in, std::size_t row, bool, Strip (&acc)[R]) {
        const float* x = in.x + row * in.width;
        for (std::size_t k = 0; k < in.width; ++k) {
            const Strip w = load_strip<Kind>(weights, k * kBytes);
            for (int r = 0; r < R; ++r) {
                const Pair input = both(x[static_cast<std::size_t>(r) * in.width + k]);
                each_pair([&](std::size_t i) { acc[r].v[i] = fma(input, w.v[i], acc[r].v[i]); });
            }
        }
    }
};

template <bool Four, bool Half, bool Minima, int Splits>
struct Grouped {
    static constexpr Encoding kScale = Half ? Encoding::f16 : Encoding::f32;
    static constexpr std::size_t kCodes = Four ? 128 : 256;
    static constexpr std::size_t kScales = kLanes * (Half ? 2 : 4);
    static constexpr std::size_t kBytes = kCodes + (Splits + Minima) * kScales;

    template <int R>
    static void run(const Sources& weights, const Rows& in, std::size_t row, bool fetches, Strip (&acc)[R]) {
        // One pointer and a stride, not a pointer for each row: compilers run out of registers, and write them back each time.
        const std::size_t groups = in.width / kGroup;
        const std::int8_t* codes = in.codes + row * in.width;
        const float *scales = in.scales + row * groups, *totals = in.sums + row * groups;
        Sources w = weights;
        for (std::size_t group = 0; group < groups; ++group) {
            for (int split = 0; split < Splits; ++split) {
                IntPair dot[R][kPairs];
                if constexpr (Four) {
                    dot_q4<R>(w.at, codes, in.width, dot[0]);
                } else {
                    dot_q8<R>(w.at, codes, in.width, split * 2 / Splits, (split + 1) * 2 / Splits, dot[0]);
                }
                const Strip d = load_strip<kScale>(w, kCodes + static_cast<std::size_t>(split) * kScales);
                for (int r = 0; r < R; ++r) {
                    const Strip factor = mul(d, both(scales[r * groups + group]));
                    each_pair([&](std::size_t i) { acc[r].v[i] = fma(to_float(dot[r][i]), factor.v[i], acc[r].v[i]); });
                }
            }
            if constexpr (Minima) {
                const Strip m = load_strip<kScale>(w, kCodes + Splits * kScales);
                for (int r = 0; r < R; ++r) {
                    const Pair total = both(totals[r * groups + group]);
                    each_pair([&](std::size_t i) { acc[r].v[i] = fma(m.v[i], total, acc[r].v[i]); });
                }
            }
            if (fetches) {  // into the second cache
                for (const std::uint8_t* p : w.at) {
                    for (std::size_t at = 0; at < kBytes; at += kLine) __builtin_prefetch(p + w.ahead + at, 0, 2);
                }
            }
            codes += kGroup;
            w.advance(kBytes);
        }
    }
};

// Panels that are computed side by side: neighbours, or with a gate the same ones of both matrices in turn. Behind the last
// panel the strip is filled up with it.
struct Side {
    std::size_t panel, count;  // the first, how many there are
    Sources weights;
};

template <class Visit>
inline void each_side(const LinearTask& task, Visit visit) {
    const bool gated = task.gate != Gate::none;
    const std::size_t most = gated ? kStrip / 2 : kStrip;
    for (std::size_t panel = task.panel_begin; panel < task.panel_end; panel += most) {
        const std::size_t left = task.panel_end - panel;
        Side side{panel, left < most ? left : most, {{}, most * task.weight->format.panel_bytes(task.weight->in)}};
        for (std::size_t i = 0; i < kStrip; ++i) {
            const std::size_t index = gated ? i / 2 : i;
            const Panels* of = gated && i % 2 == 1 ? task.second : task.weight;
            side.weights.at[i] = of->panel(panel + (index < side.count ? index : side.count - 1));
        }
        visit(side);
    }
}

// Where a row's outputs for a strip begin.
inline float* out_of(const LinearTask& task, const Side& side, std::size_t row) {
    return task.out + row * task.out_stride + (side.panel - task.panel_begin) * kLanes;
}

inline Pair load_up_to(const float* p, std::size_t from, std::size_t count) {
    const auto half = [&](std::size_t at) {
        return from + at + 8 <= count ? load(p + from + at) : load_part(p + from + at, count > from + at ? count - from - at : 0);
    };
    return join(half(0), half(8));
}
inline void store_up_to(float* p, Pair a, std::size_t from, std::size_t count) {
    const auto half = [&](F8 of, std::size_t at) {
        if (from + at + 8 <= count) store(p + from + at, of);
        else if (from + at < count) store_part(p + from + at, of, count - from - at);
    };
    half(first(a), 0);
    half(second(a), 8);
}

// Not inlined: once per tile it costs nothing, and copied into every loop it would be most of this file's machine code.
[[gnu::noinline]] void finish(const LinearTask& task, const Side& side, std::size_t row, const Strip* sums,
                              std::size_t count) {
    const std::size_t channel = side.panel * kLanes, left = task.weight->out - channel;
    const std::size_t outputs = left < side.count * kLanes ? left : side.count * kLanes;
    for (std::size_t r = 0; r < count; ++r) {
        float* out = out_of(task, side, row + r);
        for (std::size_t from = 0; from < outputs; from += 2 * kLanes) {
            const std::size_t pair = from / (2 * kLanes);
            Pair y = task.gate == Gate::none ? sums[r].v[pair] : gate_of(task.gate, sums[r], pair);
            if (task.bias) y = add(y, load_up_to(task.bias + channel, from, outputs));
            if (task.add) y = add(load_up_to(out, from, outputs), y);
            store_up_to(out, y, from, outputs);
        }
    }
}

template <class Core, int R>
inline void tile(const LinearTask& task, const Side& side, std::size_t row) {
    Strip sums[R];
    for (Strip& sum : sums) each_pair([&](std::size_t i) { sum.v[i] = both(0.0f); });
    for (std::size_t r = 0; r < R; ++r) {  // or `finish` would wait
        for (std::size_t at = 0; at < side.count * kLanes; at += 2 * kLanes) {
            __builtin_prefetch(out_of(task, side, row + r) + at, 1);
        }
    }
    Core::template run<R>(side.weights, task.in, row, row == task.row_begin, sums);
    finish(task, side, row, sums, R);
}

// The last rows, at most R of them.
template <class Core, int R>
inline void tail(const LinearTask& task, const Side& side, std::size_t row) {
    if constexpr (R > 0) task.row_end - row == R ? tile<Core, R>(task, side, row) : tail<Core, R - 1>(task, side, row);
}

template <class Core>
void linear_of(const LinearTask& task) {
    each_side(task, [&](const Side& side) {
        std::size_t row = task.row_begin;
        for (; row + kRowTile <= task.row_end; row += kRowTile) tile<Core, kRowTile>(task, side, row);
        tail<Core, kRowTile - 1>(task, side, row);
    });
}

template <bool Half>
void linear_q8(const LinearTask& task) {
    const Format& format = task.weight->format;
    if (format.splits == 2) {
        format.minima ? linear_of<Grouped<false, Half, true, 2>>(task) : linear_of<Grouped<false, Half, false, 2>>(task);
    } else {
        format.minima ? linear_of<Grouped<false, Half, true, 1>>(task) : linear_of<Grouped<false, Half, false, 1>>(task);
    }
}

void linear(const LinearTask& task) {
    const Format& format = task.weight->format;
    switch (format.encoding) {
        case Encoding::f32: return linear_of<Plain<Encoding::f32>>(task);
        case Encoding::f16: return linear_of<Plain<Encoding::f16>>(task);
        case Encoding::bf16: return linear_of<Plain<Encoding::bf16>>(task);
        case Encoding::q4:
            return format.half ? linear_of<Grouped<true, true, true, 1>>(task) : linear_of<Grouped<true, false, true, 1>>(task);
        case Encoding::q8: return format.half ? linear_q8<true>(task) : linear_q8<false>(task);
    }
}

#include "attention.inl"

// ---------------------------------------------------------------- limits

// Eight sums, as in a tile of dot_q4, by name: compilers leave arrays of them in memory. The codes are made unknown in each
// round, or the products would be made once only.
std::uint64_t multiply_bytes(std::size_t rounds) {
    ByteSum a = bytes_of(0), b = a, c = a, d = a, e = a, f = a, g = a, h = a;
    ByteSum code0 = bytes_of(1), code1 = bytes_of(2);
    const ByteSum x = bytes_of(1), y = bytes_of(3), z = bytes_of(-1), w = bytes_of(-3);
    const auto add = [](ByteSum& sum, ByteSum code, ByteSum inputs) {
        add_product(sum, code, inputs);
        keep(sum);
    };
    for (std::size_t round = 0; round < rounds; ++round) {
        keep(code0);
        keep(code1);
        add(a, code0, x);
        add(b, code1, x);
        add(c, code0, y);
        add(d, code1, y);
        add(e, code0, z);
        add(f, code1, z);
        add(g, code0, w);
        add(h, code1, w);
    }
    return rounds * 8 * kBytesAtOnce;
}

// A unit that brings nothing but a better `linear` or `attend` takes the rest from another one; then nothing refers to the functions
// here, and they are not compiled.
inline Kernels with_attention(Kernels others) {
    others.name = kName;
    others.attend = attend;
    others.multiply_pages = multiply_pages;
    return others;
}

inline Kernels with_linear(Kernels others, void (*better)(const LinearTask&)) {
    others.name = kName;
    others.linear = better;
    others.multiply_bytes = multiply_bytes;
    return others;
}

const Kernels kTable = {kName, linear, quantize, norm, rotate, gate, add_rows, attend, argmax, multiply_bytes, multiply_pages};
