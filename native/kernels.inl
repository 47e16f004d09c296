// The kernels, written once over eight lanes, `linear` over pairs of them. Included inside the anonymous namespace of each
// instruction set, after its lanes, dot products and pairs; so no two translation units share a function, and none is ever
// linked for a processor that cannot run it.

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

// With few rows weights come straight from memory, faster than a processor foresees on its own across ends of pages and panels.
constexpr std::size_t kFewRows = 8, kLine = 64, kAhead = 8192;

// Each core computes R rows x a pair of panels over all inputs: float accumulation in the order of the inputs.

template <Encoding Kind>
struct Plain {
    static constexpr std::size_t kBytes = kLanes * (Kind == Encoding::f32 ? 4 : 2);

    template <int R>
    static void run(const std::uint8_t* w0, const std::uint8_t* w1, const Rows& in, std::size_t row, std::size_t, Pair (&out)[R]) {
        const float* x = in.x + row * in.width;
        Pair acc[R];
        for (Pair& a : acc) a = both(0.0f);
        for (std::size_t k = 0; k < in.width; ++k) {
            const Pair w = load_pair<Kind>(w0 + k * kBytes, w1 + k * kBytes);
            for (int r = 0; r < R; ++r) acc[r] = fma(both(x[static_cast<std::size_t>(r) * in.width + k]), w, acc[r]);
        }
        for (int r = 0; r < R; ++r) out[r] = acc[r];
    }
};

template <bool Four, bool Half, bool Minima, int Splits>
struct Grouped {
    static constexpr Encoding kScale = Half ? Encoding::f16 : Encoding::f32;
    static constexpr std::size_t kCodes = Four ? 128 : 256;
    static constexpr std::size_t kScales = kLanes * (Half ? 2 : 4);
    static constexpr std::size_t kBytes = kCodes + (Splits + Minima) * kScales;

    template <int R>
    static void run(const std::uint8_t* w0, const std::uint8_t* w1, const Rows& in, std::size_t row, std::size_t task_rows,
                    Pair (&out)[R]) {
        // One pointer and a stride, not a pointer for each row: compilers run out of registers, and write them back each time.
        const std::size_t groups = in.width / kGroup;
        const std::int8_t* codes = in.codes + row * in.width;
        const float *scales = in.scales + row * groups, *totals = in.sums + row * groups;
        const bool streams = task_rows <= kFewRows;
        Pair acc[R];
        for (Pair& a : acc) a = both(0.0f);
        for (std::size_t group = 0; group < groups; ++group) {
            for (int split = 0; split < Splits; ++split) {
                IntPair dot[R];
                if constexpr (Four) {
                    dot_q4<R>(w0, w1, codes, in.width, dot);
                } else {
                    dot_q8<R>(w0, w1, codes, in.width, split * 2 / Splits, (split + 1) * 2 / Splits, dot);
                }
                const std::size_t at = kCodes + static_cast<std::size_t>(split) * kScales;
                const Pair d = load_pair<kScale>(w0 + at, w1 + at);
                for (int r = 0; r < R; ++r) acc[r] = fma(to_float(dot[r]), mul(d, both(scales[r * groups + group])), acc[r]);
            }
            if constexpr (Minima) {
                const std::size_t at = kCodes + Splits * kScales;
                const Pair m = load_pair<kScale>(w0 + at, w1 + at);
                for (int r = 0; r < R; ++r) acc[r] = fma(m, both(totals[r * groups + group]), acc[r]);
            }
            if (streams) {
                for (std::size_t at = 0; at < kBytes; at += kLine) {
                    __builtin_prefetch(w0 + kAhead + at);
                    __builtin_prefetch(w1 + kAhead + at);
                }
            }
            codes += kGroup;
            w0 += kBytes;
            w1 += kBytes;
        }
        for (int r = 0; r < R; ++r) out[r] = acc[r];
    }
};

// Two panels that are computed side by side: neighbours, or with a gate the same one of both matrices. The last of an odd
// number of panels is its own neighbour.
struct Side {
    std::size_t panel, other;
    const std::uint8_t *w0, *w1;
};

template <class Visit>
inline void each_side(const LinearTask& task, Visit visit) {
    const bool alone = task.gate != Gate::none;
    for (std::size_t panel = task.panel_begin; panel < task.panel_end; panel += alone ? 1 : 2) {
        const std::size_t other = !alone && panel + 1 < task.panel_end ? panel + 1 : panel;
        visit(Side{panel, other, task.weight->panel(panel), (alone ? task.second : task.weight)->panel(other)});
    }
}

inline void put(const LinearTask& task, std::size_t row, std::size_t panel, F8 y) {
    const std::size_t channel = panel * kLanes, left = task.weight->out - channel, count = left < 8 ? left : 8;
    float* out = task.out + row * task.out_stride + (panel - task.panel_begin) * kLanes;
    if (task.bias) y = add(y, load_up_to(task.bias + channel, count));
    if (task.add) y = add(load_up_to(out, count), y);
    store_up_to(out, y, count);
}

// Not inlined: once per tile it costs nothing, and copied into every loop it would be most of this file's machine code.
[[gnu::noinline]] void finish(const LinearTask& task, const Side& side, std::size_t row, const Pair* sums,
                              std::size_t count) {
    for (std::size_t r = 0; r < count; ++r) {
        const F8 a = first(sums[r]), b = second(sums[r]);
        put(task, row + r, side.panel, task.gate == Gate::none ? a : gated(task.gate, a, b));
        if (side.other != side.panel) put(task, row + r, side.other, b);
    }
}

template <class Core, int R>
inline void tile(const LinearTask& task, const Side& side, std::size_t row) {
    Pair sums[R];
    Core::template run<R>(side.w0, side.w1, task.in, row, task.row_end - task.row_begin, sums);
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

// ---------------------------------------------------------------- attention

constexpr std::size_t kVectors = kBlock / kLanes;

struct BFloat {
    std::uint8_t bits[2];
};
inline F8 load_eight(const float* p) { return load(p); }
inline F8 load_eight(const BFloat* p) { return load_bfloat(p->bits); }
inline F8 load_eight(const std::int8_t* p) { return load_signed(p); }

// Where the keys and values of a block lie. Keys: vectors of eight positions, `stride` numbers from one dimension to the next.
template <class T>
struct Block {
    const T* keys[kVectors];
    const float* key_scales[kVectors];
    const T* values[kBlock];
    float value_scales[kBlock];
    std::size_t stride;
    std::size_t known;  // positions of the block that have a page
    // Where pages are not whole vectors.
    T staged[kBlock * kMostDims];
    float staged_scales[kBlock];
};

template <class T>
void find_block(const AttendTask& task, std::size_t start, std::size_t end, Block<T>& block) {
    const std::size_t dims = whole_lanes(task.head_dim), page_numbers = dims * task.page_size;
    const T *keys = reinterpret_cast<const T*>(task.kv.keys), *values = reinterpret_cast<const T*>(task.kv.values);
    const bool direct = task.page_size % kLanes == 0;
    block.known = end - start < kBlock ? end - start : kBlock;
    block.stride = direct ? task.page_size : kBlock;
    std::size_t page_index = start / task.page_size, offset = start % task.page_size;
    for (std::size_t i = 0; i < block.known; ++i) {
        const std::size_t page = static_cast<std::size_t>(task.pages[page_index]), place = page * task.page_size + offset;
        const T* key = keys + page * page_numbers + offset;
        block.values[i] = values + place * dims;
        if constexpr (sizeof(T) == 1) block.value_scales[i] = task.kv.value_scales[place];
        if (!direct) {
            for (std::size_t d = 0; d < task.head_dim; ++d) block.staged[d * kBlock + i] = key[d * task.page_size];
            if constexpr (sizeof(T) == 1) block.staged_scales[i] = task.kv.key_scales[place];
        } else if (i % kLanes == 0) {
            block.keys[i / kLanes] = key;
            if constexpr (sizeof(T) == 1) block.key_scales[i / kLanes] = task.kv.key_scales + place;
        }
        if (++offset == task.page_size) {
            offset = 0;
            ++page_index;
        }
    }
    for (std::size_t i = block.known; sizeof(T) == 1 && i < kBlock; ++i) block.value_scales[i] = 0.0f;
    for (std::size_t v = 0; v < kVectors; ++v) {
        const std::size_t behind = (block.known + kLanes - 1) / kLanes;
        if (!direct) {
            block.keys[v] = block.staged + v * kLanes;
            if constexpr (sizeof(T) == 1) block.key_scales[v] = block.staged_scales + v * kLanes;
        } else if (v >= behind) {  // never seen, but readable
            block.keys[v] = block.keys[behind - 1];
            if constexpr (sizeof(T) == 1) block.key_scales[v] = block.key_scales[behind - 1];
        }
    }
}

// Pages lie anywhere: a processor does not foresee the next one.
template <class T>
void prefetch_block(const AttendTask& task, std::size_t start, std::size_t end) {
    const std::size_t page_bytes = whole_lanes(task.head_dim) * task.page_size * sizeof(T);
    const std::size_t behind = start + kBlock < end ? start + kBlock : end;
    for (std::size_t index = start / task.page_size; index * task.page_size < behind; ++index) {
        const std::size_t place = static_cast<std::size_t>(task.pages[index]) * page_bytes;
        for (std::size_t at = 0; at < page_bytes; at += kLine) {
            __builtin_prefetch(task.kv.keys + place + at);
            __builtin_prefetch(task.kv.values + place + at);
        }
    }
}

// What a query sees of a block, in positions of the block.
struct Sight {
    std::size_t first, last;
};

inline Sight sight(const AttendTask& task, std::int64_t position, std::size_t block_start) {
    const std::int64_t here = position - static_cast<std::int64_t>(block_start), size = static_cast<std::int64_t>(kBlock);
    std::int64_t first = task.window ? here - task.window + 1 : 0, last = here + 1;
    first = first < 0 ? 0 : first;
    last = last > size ? size : last;
    return first < last ? Sight{static_cast<std::size_t>(first), static_cast<std::size_t>(last)} : Sight{0, 0};
}

// Scores of R queries with V vectors of keys, over the dimensions in order.
template <class T, int R, int V>
inline void score(const Query* queries, const T* const* keys, std::size_t stride, std::size_t head_dim, F8 (&acc)[R][V]) {
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) acc[r][v] = set1(0.0f);
    }
    for (std::size_t d = 0; d < head_dim; ++d) {
        F8 x[R];
        for (int r = 0; r < R; ++r) x[r] = set1(queries[r].q[d]);
        for (int v = 0; v < V; ++v) {  // one key at a time: 12 sums, 3 queries and a key fill the registers
            const F8 key = load_eight(keys[v] + d * stride);
            for (int r = 0; r < R; ++r) acc[r][v] = fma(x[r], key, acc[r][v]);
        }
    }
}

// Softmax weights of R queries for vectors [first, last) of a block; peak and total move on. shrink: by what earlier sums fall.
template <class T, int R>
inline void weigh(const AttendTask& task, const Block<T>& block, const Query* queries, const Sight (&seen)[R], std::size_t first,
                  std::size_t last, float (&weights)[R][kBlock], float (&shrink)[R]) {
    constexpr int V = R == 1 ? 8 : 4;
    F8 scores[R][kVectors];
    for (std::size_t v = first / V * V; v < last; v += V) {
        F8 acc[R][V];
        score<T, R, V>(queries, block.keys + v, block.stride, task.head_dim, acc);
        for (int r = 0; r < R; ++r) {
            for (int i = 0; i < V; ++i) {
                F8 one = mul(acc[r][i], set1(task.scale));
                if constexpr (sizeof(T) == 1) one = mul(one, load(block.key_scales[v + static_cast<std::size_t>(i)]));
                scores[r][v + static_cast<std::size_t>(i)] = one;
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        float* state = queries[r].state + whole_lanes(task.head_dim);
        F8 top = set1(state[0]);
        for (std::size_t v = first; v < last; ++v) {
            const int from = static_cast<int>(seen[r].first) - static_cast<int>(kLanes * v);
            const int to = static_cast<int>(seen[r].last) - static_cast<int>(kLanes * v);
            if (from > 0 || to < 8) scores[r][v] = between(scores[r][v], from, to, bits_to_float(0xff800000u));
            top = max(top, scores[r][v]);
        }
        const float peak_now = peak(top);
        F8 total = set1(0.0f);
        for (std::size_t v = first; v < last; ++v) {
            F8 weight = exponential(sub(scores[r][v], set1(peak_now)));
            total = add(total, weight);
            if constexpr (sizeof(T) == 1) weight = mul(weight, load(block.value_scales + kLanes * v));
            store(weights[r] + kLanes * v, weight);
        }
        float once[8];
        store(once, exponential(set1(state[0] - peak_now)));
        shrink[r] = once[0];
        state[1] = state[1] * shrink[r] + sum(total);
        state[0] = peak_now;
    }
}

// sums[offset, 8 C) = sums * shrink + sum of weights[k] * values[k], keys in order.
template <class T, int R, int C>
inline void mix(const Query* queries, const float (&weights)[R][kBlock], const float (&shrink)[R], const T* const* values,
                std::size_t offset, std::size_t first, std::size_t last) {
    F8 acc[R][C];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) acc[r][c] = mul(load(queries[r].state + offset + 8 * c), set1(shrink[r]));
    }
    for (std::size_t k = first; k < last; ++k) {
        F8 weight[R];
        for (int r = 0; r < R; ++r) weight[r] = set1(weights[r][k]);
        for (int c = 0; c < C; ++c) {
            const F8 value = load_eight(values[k] + offset + 8 * c);
            for (int r = 0; r < R; ++r) acc[r][c] = fma(weight[r], value, acc[r][c]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) store(queries[r].state + offset + 8 * c, acc[r][c]);
    }
}

// R queries through one block.
template <class T, int R>
void through(const AttendTask& task, const Block<T>& block, std::size_t start, const Query* queries) {
    constexpr int C = R == 1 ? 8 : 4;
    Sight seen[R];
    std::size_t first = kBlock, last = 0;
    for (int r = 0; r < R; ++r) {
        seen[r] = sight(task, queries[r].position, start);
        if (seen[r].first == seen[r].last) continue;
        first = seen[r].first < first ? seen[r].first : first;
        last = seen[r].last > last ? seen[r].last : last;
    }
    if (first >= last) return;
    float weights[R][kBlock], shrink[R];
    weigh<T, R>(task, block, queries, seen, first / kLanes, (last + kLanes - 1) / kLanes, weights, shrink);
    const std::size_t dims = whole_lanes(task.head_dim);
    std::size_t offset = 0;
    for (; offset + 8 * C <= dims; offset += 8 * C) mix<T, R, C>(queries, weights, shrink, block.values, offset, first, last);
    for (; offset < dims; offset += 8) mix<T, R, 1>(queries, weights, shrink, block.values, offset, first, last);
}

inline void begin(const AttendTask& task) {
    for (std::size_t i = 0; i < task.count; ++i) {
        float* state = task.queries[i].state;
        std::memset(state, 0, query_state(task.head_dim) * sizeof(float));
        state[whole_lanes(task.head_dim)] = -3.402823466e+38f;
    }
}

inline void finish(const AttendTask& task) {
    for (std::size_t i = 0; i < task.count; ++i) {
        const Query& query = task.queries[i];
        const F8 total = set1(query.state[whole_lanes(task.head_dim) + 1]);
        each_lanes(task.head_dim, [&](std::size_t d, std::size_t n) {
            store_up_to(query.out + d, div(load(query.state + d), total), n);
        });
    }
}

template <class T>
void attend_of(const AttendTask& task) {
    std::int64_t oldest = task.queries[0].position, newest = oldest;
    for (std::size_t i = 1; i < task.count; ++i) {
        oldest = task.queries[i].position < oldest ? task.queries[i].position : oldest;
        newest = task.queries[i].position > newest ? task.queries[i].position : newest;
    }
    const std::size_t end = static_cast<std::size_t>(newest) + 1;
    const std::size_t visible = task.window && oldest >= task.window ? static_cast<std::size_t>(oldest - task.window + 1) : 0;
    const std::size_t begin_at = visible / kBlock > task.block_begin ? visible / kBlock : task.block_begin;
    const bool streams = task.count <= kFewRows;
    if (task.first) begin(task);
    if (streams) prefetch_block<T>(task, begin_at * kBlock, end);
    Block<T> block;
    for (std::size_t index = begin_at; index < task.block_end && index * kBlock < end; ++index) {
        const std::size_t start = index * kBlock;
        find_block(task, start, end, block);
        if (streams && start + kBlock < end) prefetch_block<T>(task, start + kBlock, end);
        std::size_t i = 0;
        for (; i + 3 <= task.count; i += 3) through<T, 3>(task, block, start, task.queries + i);
        if (task.count - i == 2) through<T, 2>(task, block, start, task.queries + i);
        if (task.count - i == 1) through<T, 1>(task, block, start, task.queries + i);
    }
    if (task.last) finish(task);
}

void attend(const AttendTask& task) {
    switch (task.kind) {
        case KvKind::f32: return attend_of<float>(task);
        case KvKind::bf16: return attend_of<BFloat>(task);
        case KvKind::i8: return attend_of<std::int8_t>(task);
    }
}

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

// A unit that brings nothing but a better `linear` takes the rest from another one; then nothing refers to the functions
// here, and they are not compiled.
inline Kernels with_linear(Kernels others, void (*better)(const LinearTask&)) {
    others.name = kName;
    others.linear = better;
    others.multiply_bytes = multiply_bytes;
    return others;
}

const Kernels kTable = {kName, linear, quantize, norm, rotate, gate, add_rows, attend, argmax, multiply_bytes};
