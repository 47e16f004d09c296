// The kernels, written once over eight lanes. Included inside the anonymous namespace of each instruction set, after its
// lanes; so no two translation units share a function, and none is ever linked for a processor that cannot run it.

// ---------------------------------------------------------------- functions

// exp, relative error below 3e-7 for x <= 88, larger x as 88; exactly 0 below -87; NaN stays NaN.
inline F8 exponential(F8 x) {
    const F8 low = set1(-87.0f);
    const F8 bounded = max(low, min(set1(88.0f), x));
    const F8 magic = set1(12582912.0f);
    const F8 n = sub(add(mul(bounded, set1(1.44269504f)), magic), magic);
    F8 r = fma(n, set1(-0.693359375f), bounded);
    r = fma(n, set1(2.12194440e-4f), r);
    F8 y = set1(1.9875691500e-4f);
    y = fma(y, r, set1(1.3981999507e-3f));
    y = fma(y, r, set1(8.3334519073e-3f));
    y = fma(y, r, set1(4.1665795894e-2f));
    y = fma(y, r, set1(1.6666665459e-1f));
    y = fma(y, r, set1(5.0000001201e-1f));
    y = add(fma(mul(r, r), y, r), set1(1.0f));
    return zero_where_less(scale_by_power(y, n), x, low);
}

inline F8 silu(F8 x) { return div(x, add(set1(1.0f), exponential(sub(set1(0.0f), x)))); }

// 0.5 x (1 + tanh(u)) = x - x / (exp(2 u) + 1), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline F8 gelu_tanh(F8 x) {
    const F8 cube = mul(mul(x, x), x);
    const F8 twice = mul(set1(1.5957691216f), fma(set1(0.044715f), cube, x));
    return sub(x, div(x, add(set1(1.0f), exponential(twice))));
}

inline F8 gated(Gate kind, F8 gate, F8 up) { return mul(kind == Gate::silu ? silu(gate) : gelu_tanh(gate), up); }

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

constexpr std::size_t kRowTile = 4;

template <bool Half>
inline F8 load_scale(const std::uint8_t* p) {
    if constexpr (Half) return load_half(p);
    float v[8];
    std::memcpy(v, p, sizeof v);
    return load(v);
}

// Each core computes R rows x two panels over all inputs: float accumulation in the order of the inputs.

template <Encoding Kind>
struct Plain {
    static F8 weights(const std::uint8_t* p, std::size_t k) {
        if constexpr (Kind == Encoding::f16) return load_half(p + 16 * k);
        if constexpr (Kind == Encoding::bf16) return load_bfloat(p + 16 * k);
        return load_scale<false>(p + 32 * k);
    }
    template <int R>
    static void run(const std::uint8_t* w0, const std::uint8_t* w1, const Rows& in, std::size_t row, F8 (&acc)[R][2]) {
        const float* x = in.x + row * in.width;
        for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set1(0.0f);
        for (std::size_t k = 0; k < in.width; ++k) {
            const F8 a = weights(w0, k), b = weights(w1, k);
            for (int r = 0; r < R; ++r) {
                const F8 each = set1(x[static_cast<std::size_t>(r) * in.width + k]);
                acc[r][0] = fma(each, a, acc[r][0]);
                acc[r][1] = fma(each, b, acc[r][1]);
            }
        }
    }
};

template <bool Four, bool Half, bool Minima, int Splits>
struct Grouped {
    static constexpr std::size_t kCodes = Four ? 128 : 256;
    static constexpr std::size_t kScales = kLanes * (Half ? 2 : 4);
    static constexpr std::size_t kBytes = kCodes + (Splits + Minima) * kScales;

    template <int R>
    static void run(const std::uint8_t* w0, const std::uint8_t* w1, const Rows& in, std::size_t row, F8 (&acc)[R][2]) {
        const std::size_t groups = in.width / kGroup;
        const std::int8_t* codes[R];
        const float *scales[R], *sums_of[R];
        for (int r = 0; r < R; ++r) {
            codes[r] = in.codes + (row + static_cast<std::size_t>(r)) * in.width;
            scales[r] = in.scales + (row + static_cast<std::size_t>(r)) * groups;
            sums_of[r] = in.sums + (row + static_cast<std::size_t>(r)) * groups;
            acc[r][0] = acc[r][1] = set1(0.0f);
        }
        for (std::size_t group = 0; group < groups; ++group) {
            for (int split = 0; split < Splits; ++split) {
                I8 dot[R][2];
                if constexpr (Four) {
                    dot_q4<R>(w0, w1, codes, dot);
                } else {
                    dot_q8<R>(w0, w1, codes, split * 2 / Splits, (split + 1) * 2 / Splits, dot);
                }
                const std::size_t at = kCodes + static_cast<std::size_t>(split) * kScales;
                const F8 d0 = load_scale<Half>(w0 + at), d1 = load_scale<Half>(w1 + at);
                for (int r = 0; r < R; ++r) {
                    const F8 scale = set1(scales[r][group]);
                    acc[r][0] = fma(to_float(dot[r][0]), mul(d0, scale), acc[r][0]);
                    acc[r][1] = fma(to_float(dot[r][1]), mul(d1, scale), acc[r][1]);
                }
            }
            if constexpr (Minima) {
                const F8 m0 = load_scale<Half>(w0 + kCodes + Splits * kScales);
                const F8 m1 = load_scale<Half>(w1 + kCodes + Splits * kScales);
                for (int r = 0; r < R; ++r) {
                    const F8 total = set1(sums_of[r][group]);
                    acc[r][0] = fma(m0, total, acc[r][0]);
                    acc[r][1] = fma(m1, total, acc[r][1]);
                }
            }
            for (int r = 0; r < R; ++r) codes[r] += kGroup;
            w0 += kBytes;
            w1 += kBytes;
        }
    }
};

inline void put(const LinearTask& task, std::size_t row, std::size_t panel, F8 y) {
    const std::size_t channel = panel * kLanes, left = task.weight->out - channel, count = left < 8 ? left : 8;
    float* out = task.out + row * task.out_stride + (panel - task.panel_begin) * kLanes;
    if (task.bias) y = add(y, load_up_to(task.bias + channel, count));
    if (task.add) y = add(load_up_to(out, count), y);
    store_up_to(out, y, count);
}

template <class Core, int R>
inline void tile(const LinearTask& task, std::size_t row, std::size_t panel, std::size_t other, const std::uint8_t* w0,
                 const std::uint8_t* w1) {
    F8 acc[R][2];
    Core::template run<R>(w0, w1, task.in, row, acc);
    for (int r = 0; r < R; ++r) {
        const std::size_t at = row + static_cast<std::size_t>(r);
        if (task.gate != Gate::none) {
            put(task, at, panel, gated(task.gate, acc[r][0], acc[r][1]));
            continue;
        }
        put(task, at, panel, acc[r][0]);
        if (other != panel) put(task, at, other, acc[r][1]);
    }
}

template <class Core>
void linear_of(const LinearTask& task) {
    const std::size_t step = task.gate == Gate::none ? 2 : 1;
    for (std::size_t panel = task.panel_begin; panel < task.panel_end; panel += step) {
        const bool paired = task.gate == Gate::none && panel + 1 < task.panel_end;
        const std::size_t other = paired ? panel + 1 : panel;
        const std::uint8_t* w0 = task.weight->panel(panel);
        const std::uint8_t* w1 = task.gate == Gate::none ? task.weight->panel(other) : task.second->panel(panel);
        std::size_t row = task.row_begin;
        for (; row + kRowTile <= task.row_end; row += kRowTile) tile<Core, kRowTile>(task, row, panel, other, w0, w1);
        switch (task.row_end - row) {
            case 3: tile<Core, 3>(task, row, panel, other, w0, w1); break;
            case 2: tile<Core, 2>(task, row, panel, other, w0, w1); break;
            case 1: tile<Core, 1>(task, row, panel, other, w0, w1); break;
            default: break;
        }
    }
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

// ---------------------------------------------------------------- attention

// Scores of one query with eight keys.
inline F8 score_eight(const float* q, const float* const* keys, std::size_t head_dim) {
    F8 acc[8];
    for (auto& a : acc) a = set1(0.0f);
    each_lanes(head_dim, [&](std::size_t i, std::size_t count) {
        const F8 part = load_up_to(q + i, count);
        for (int k = 0; k < 8; ++k) acc[k] = fma(part, load_up_to(keys[k] + i, count), acc[k]);
    });
    return sums(acc);
}

// out[0, 8 C) = out * shrink + sum of weights[k] * values[k], keys in order.
template <int C>
inline void mix(float* out, const float* weights, const float* const* values, std::size_t offset, std::size_t first,
                std::size_t last, F8 shrink) {
    F8 acc[C];
    for (int c = 0; c < C; ++c) acc[c] = mul(load(out + offset + 8 * c), shrink);
    for (std::size_t k = first; k < last; ++k) {
        const F8 weight = set1(weights[k]);
        for (int c = 0; c < C; ++c) acc[c] = fma(weight, load(values[k] + offset + 8 * c), acc[c]);
    }
    for (int c = 0; c < C; ++c) store(out + offset + 8 * c, acc[c]);
}

inline void mix_head(float* out, const float* weights, const float* const* values, std::size_t head_dim, std::size_t first,
                     std::size_t last, float shrink_by) {
    const F8 shrink = set1(shrink_by);
    std::size_t offset = 0;
    for (; offset + 64 <= head_dim; offset += 64) mix<8>(out, weights, values, offset, first, last, shrink);
    for (; offset + 8 <= head_dim; offset += 8) mix<1>(out, weights, values, offset, first, last, shrink);
    if (offset == head_dim) return;
    const std::size_t rest = head_dim - offset;
    F8 acc = mul(load_part(out + offset, rest), shrink);
    for (std::size_t k = first; k < last; ++k) acc = fma(set1(weights[k]), load_part(values[k] + offset, rest), acc);
    store_part(out + offset, acc, rest);
}

// One query against the keys of one block: what of it is visible, in positions of the block.
struct Sight {
    std::size_t first, last;
};

inline Sight sight(const AttendTask& task, std::size_t token, std::int64_t block_start) {
    const std::int64_t here = task.position + static_cast<std::int64_t>(token), size = static_cast<std::int64_t>(kBlock);
    std::int64_t first = task.window ? here - task.window + 1 - block_start : 0, last = here + 1 - block_start;
    first = first < 0 ? 0 : first;
    last = last > size ? size : last;
    return first < last ? Sight{static_cast<std::size_t>(first), static_cast<std::size_t>(last)} : Sight{0, 0};
}

// State of a query while it walks through the blocks: weights of the block, peak, total and what the block shrinks by.
struct Walk {
    float* weights;
    float& peak;
    float& total;
    float& shrink;
};

inline Walk walk(const AttendTask& task, std::size_t pair) {
    float* state = task.scratch + pair * (kBlock + 3);
    return {state, state[kBlock], state[kBlock + 1], state[kBlock + 2]};
}

inline void weigh(const AttendTask& task, const float* q, const float* const* keys, Sight seen, Walk at) {
    F8 scores[kBlock / 8], top = set1(at.peak);
    const std::size_t first = seen.first / 8, last = (seen.last + 7) / 8;
    for (std::size_t i = first; i < last; ++i) {
        const int from = static_cast<int>(seen.first) - static_cast<int>(8 * i), to = static_cast<int>(seen.last - 8 * i);
        scores[i] = mul(score_eight(q, keys + 8 * i, task.head_dim), set1(task.scale));
        if (from > 0 || to < 8) scores[i] = between(scores[i], from, to, bits_to_float(0xff800000u));
        top = max(top, scores[i]);
    }
    const float new_peak = peak(top);
    F8 total = set1(0.0f);
    for (std::size_t i = first; i < last; ++i) {
        const F8 weight = exponential(sub(scores[i], set1(new_peak)));
        store(at.weights + 8 * i, weight);
        total = add(total, weight);
    }
    float shrink[8];
    store(shrink, exponential(set1(at.peak - new_peak)));
    at.shrink = shrink[0];
    at.total = at.total * at.shrink + sum(total);
    at.peak = new_peak;
}

void attend(const AttendTask& task) {
    const std::size_t pairs = task.tokens * task.heads;
    for (std::size_t pair = 0; pair < pairs; ++pair) {
        Walk at = walk(task, pair);
        at.peak = -3.402823466e+38f;
        at.total = 0.0f;
        std::memset(task.out + pair / task.heads * task.stride + pair % task.heads * task.head_dim, 0,
                    task.head_dim * sizeof(float));
    }
    const std::int64_t end = task.position + static_cast<std::int64_t>(task.tokens), size = static_cast<std::int64_t>(kBlock);
    const std::int64_t begin = task.window && task.position >= task.window ? task.position - task.window + 1 : 0;
    for (std::int64_t start = begin / size * size; start < end; start += size) {
        const float *keys[kBlock], *values[kBlock];
        for (std::size_t i = 0; i < kBlock; ++i) {
            const std::int64_t known = start + static_cast<std::int64_t>(i) < end ? start + static_cast<std::int64_t>(i) : end - 1;
            const std::size_t position = static_cast<std::size_t>(known);
            const std::size_t page = static_cast<std::size_t>(task.pages[position / task.page_size]);
            const std::size_t place = (page * task.page_size + position % task.page_size) * task.head_dim;
            keys[i] = task.keys + place;
            values[i] = task.values + place;
        }
        for (std::size_t pair = 0; pair < pairs; ++pair) {
            const std::size_t token = pair / task.heads, at = token * task.stride + pair % task.heads * task.head_dim;
            const Sight seen = sight(task, token, start);
            if (seen.first < seen.last) weigh(task, task.q + at, keys, seen, walk(task, pair));
        }
        for (std::size_t pair = 0; pair < pairs; ++pair) {
            const std::size_t token = pair / task.heads, at = token * task.stride + pair % task.heads * task.head_dim;
            const Sight seen = sight(task, token, start);
            if (seen.first == seen.last) continue;
            const Walk state = walk(task, pair);
            mix_head(task.out + at, state.weights, values, task.head_dim, seen.first, seen.last, state.shrink);
        }
    }
    for (std::size_t pair = 0; pair < pairs; ++pair) {
        float* out = task.out + pair / task.heads * task.stride + pair % task.heads * task.head_dim;
        const F8 total = set1(walk(task, pair).total);
        each_lanes(task.head_dim, [&](std::size_t i, std::size_t n) {
            store_up_to(out + i, div(load_up_to(out + i, n), total), n);
        });
    }
}

const Kernels kTable = {kName, linear, quantize, norm, rotate, gate, add_rows, attend, argmax, multiply_bytes};
