// Paged attention, written once over sixteen lanes: online softmax over blocks of keys, several queries at a time. Included
// by kernels.inl.
//
// A unit says how many queries share what is loaded (kQueries), how many vectors of keys or values they meet at a time
// (kVectors), and what a product is (products.h).

constexpr std::size_t kBlockVectors = kBlock / kKvLanes;
constexpr std::size_t kFewQueries = 8;  // which wait for pages from memory: they fetch the next block while they pass one

template <class T>
constexpr bool kNeighbours = sizeof(T) < sizeof(float);

// The same row, `lanes` numbers further.
template <class T>
inline const T* along(const T* p, std::size_t lanes) {
    return p + (kNeighbours<T> ? 2 * lanes : lanes);
}

// Where the keys and values of a block lie, two by two.
template <class T>
struct Block {
    const T* keys[kBlockVectors];
    const float* key_scales[kBlockVectors];
    const T* values[kBlock / 2];
    float value_scales[kBlock];
    std::size_t key_lanes, value_lanes;  // numbers side by side
    std::size_t known;                   // positions of the block that have a page
    // Where pages are not whole vectors, and beside the last value if it has no neighbour.
    T staged_keys[kBlock * kMostDims], staged_values[kBlock * kMostDims], last_values[2 * kMostDims];
    float staged_scales[kBlock];
};

// Whole vectors of positions are read where they are.
template <class T>
void find_in_place(const AttendTask& task, const KvHead& kv, std::size_t start, Block<T>& block) {
    const std::size_t dims = kv_dims(task.head_dim), numbers = kv.records * kv_page(task.head_dim, task.page_size);
    block.key_lanes = task.page_size;
    for (std::size_t i = 0; i < block.known; i += kKvLanes) {
        const std::size_t page = static_cast<std::size_t>(task.pages[(start + i) / task.page_size]);
        const std::size_t offset = (start + i) % task.page_size;
        block.keys[i / kKvLanes] = along(reinterpret_cast<const T*>(kv.keys) + page * numbers, offset);
        const T* values = reinterpret_cast<const T*>(kv.values) + page * numbers + offset * dims;
        for (std::size_t k = 0; k < kKvLanes; k += 2) block.values[(i + k) / 2] = values + k * dims;
        if constexpr (sizeof(T) == 1) block.key_scales[i / kKvLanes] = kv.key_scales + page * kv.records * task.page_size + offset;
    }
}

// Of any other pages the block is put together.
template <class T>
void stage(const AttendTask& task, const KvHead& kv, std::size_t start, Block<T>& block) {
    const std::size_t dims = kv_dims(task.head_dim), numbers = kv.records * kv_page(task.head_dim, task.page_size);
    block.key_lanes = kBlock;
    for (std::size_t i = 0; i < block.known; ++i) {
        const std::size_t page = static_cast<std::size_t>(task.pages[(start + i) / task.page_size]);
        const std::size_t offset = (start + i) % task.page_size;
        const T* keys = reinterpret_cast<const T*>(kv.keys) + page * numbers;
        const T* values = reinterpret_cast<const T*>(kv.values) + page * numbers;
        for (std::size_t d = 0; d < task.head_dim; ++d) {
            block.staged_keys[kv_place(kNeighbours<T>, d, i, kBlock)] = keys[kv_place(kNeighbours<T>, d, offset, task.page_size)];
            block.staged_values[kv_place(kNeighbours<T>, i, d, dims)] = values[kv_place(kNeighbours<T>, offset, d, dims)];
        }
        if (task.head_dim % 2 == 1) block.staged_keys[kv_place(kNeighbours<T>, task.head_dim, i, kBlock)] = {};
        if constexpr (sizeof(T) == 1) block.staged_scales[i] = kv.key_scales[page * kv.records * task.page_size + offset];
    }
    for (std::size_t v = 0; v < kBlockVectors; ++v) {
        block.keys[v] = along(block.staged_keys, v * kKvLanes);
        if constexpr (sizeof(T) == 1) block.key_scales[v] = block.staged_scales + v * kKvLanes;
    }
    for (std::size_t i = 0; i < kBlock; i += 2) block.values[i / 2] = block.staged_values + i * dims;
}

template <class T>
void find_block(const AttendTask& task, const KvHead& kv, std::size_t start, std::size_t end, Block<T>& block) {
    const std::size_t dims = kv_dims(task.head_dim);
    block.known = end - start < kBlock ? end - start : kBlock;
    block.value_lanes = dims;
    task.page_size % kKvLanes == 0 ? find_in_place(task, kv, start, block) : stage(task, kv, start, block);
    for (std::size_t v = (block.known + kKvLanes - 1) / kKvLanes; v < kBlockVectors; ++v) {  // never seen, but readable
        block.keys[v] = block.keys[v - 1];
        if constexpr (sizeof(T) == 1) block.key_scales[v] = block.key_scales[v - 1];
        for (std::size_t i = v * kKvLanes / 2; i < (v + 1) * kKvLanes / 2; ++i) block.values[i] = block.values[i - 1];
    }
    if (block.known % 2 == 1) {  // what nobody wrote may be anything, and times zero it need not be zero
        const T*& last = block.values[block.known / 2];
        for (std::size_t d = 0; d < dims; ++d) {
            block.last_values[kv_place(kNeighbours<T>, 0, d, dims)] = last[kv_place(kNeighbours<T>, 0, d, dims)];
            block.last_values[kv_place(kNeighbours<T>, 1, d, dims)] = {};
        }
        last = block.last_values;
    }
    if constexpr (sizeof(T) == 1) {
        for (std::size_t i = 0; i < kBlock; ++i) {
            const std::size_t at = start + i;
            const auto page = [&] { return static_cast<std::size_t>(task.pages[at / task.page_size]) * kv.records; };
            block.value_scales[i] = i < block.known ? kv.value_scales[page() * task.page_size + at % task.page_size] : 0.0f;
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

// Behind the sums of a query.
inline float* total_of(const AttendTask& task, const Query& query) { return query.state + kv_dims(task.head_dim); }
inline float* peak_of(const AttendTask& task, const Query& query) { return total_of(task, query) + kKvLanes; }

// 2^x for x <= 0, relative error below 4e-7; exactly 0 below -126.5; NaN stays NaN.
inline Pair power_of_two(Pair x) {
    // This sum is a whole number in its lowest bits: that of x, with the bias of an exponent. The smallest stands for 0.
    const Pair magic = both(12582912.0f + 127.0f), bounded = max(both(-127.0f), x), biased = add(bounded, magic);
    const Pair r = sub(bounded, sub(biased, magic));
    Pair y = fma(both(1.339086681e-3f), r, both(9.666373953e-3f));
    y = fma(y, r, both(5.550356954e-2f));
    y = fma(y, r, both(2.402234823e-1f));
    y = fma(y, r, both(6.931471825e-1f));
    y = fma(y, r, both(1.0f));
    return mul(y, exponent_of(biased));
}

// A query, as factors of keys: scaled, so that scores are exponents of 2.
template <class T>
inline void prepare(const AttendTask& task, const float* q, FactorOf<T>* factors) {
    const Pair scale = both(task.scale * 1.44269504f);
    for (std::size_t d = 0; d < task.head_dim; d += kKvLanes) {
        store_factors<T>(factors + d / 2, mul(load_up_to(q, d, task.head_dim), scale));
    }
}

// Scores of R queries with V vectors of keys, over the dimensions two by two.
template <class T, int R, std::size_t V>
inline void score(const FactorOf<T>* const (&queries)[R], const T* const* keys, const T* const* next, std::size_t lanes,
                  std::size_t dims, Pair (&acc)[R][V]) {
    for (int r = 0; r < R; ++r) {
        for (std::size_t v = 0; v < V; ++v) acc[r][v] = both(0.0f);
    }
    for (std::size_t d = 0; d < dims; d += 2) {
        for (std::size_t v = 0; v < V; ++v) {
            if (next) __builtin_prefetch(next[v] + d * lanes, 0, 2);
            add_products<T>(keys[v] + d * lanes, lanes, [&](int r) { return queries[r][d / 2]; }, v, acc);
        }
    }
}

// Softmax weights of R queries for vectors [first, last) of a block; peak and total move on. shrink: by what earlier sums fall.
template <class T, int R>
inline void weigh(const AttendTask& task, const Block<T>& block, const Block<T>* next, const Query* queries,
                  const FactorOf<T>* const (&factors)[R], const Sight (&seen)[R], std::size_t first, std::size_t last, FactorOf<T> (&weights)[R][kBlock / 2],
                  float (&shrink)[kKvLanes]) {
    constexpr std::size_t V = R == 1 ? 4 : kVectors;
    Pair scores[R][kBlockVectors];
    for (std::size_t v = first / V * V; v < last; v += V) {
        Pair acc[R][V];
        score<T, R, V>(factors, block.keys + v, next ? next->keys + v : nullptr, block.key_lanes, task.head_dim, acc);
        for (int r = 0; r < R; ++r) {
            for (std::size_t i = 0; i < V; ++i) {
                scores[r][v + i] = sizeof(T) == 1 ? mul(acc[r][i], load_sixteen(block.key_scales[v + i])) : acc[r][i];
            }
        }
    }
    float peaks[kKvLanes] = {}, falls[kKvLanes] = {};
    for (int r = 0; r < R; ++r) {
        const float before = *peak_of(task, queries[r]);
        Pair top = both(before);
        for (std::size_t v = first; v < last; ++v) {
            const int from = static_cast<int>(seen[r].first) - static_cast<int>(kKvLanes * v);
            const int to = static_cast<int>(seen[r].last) - static_cast<int>(kKvLanes * v);
            if (from > 0 || to < static_cast<int>(kKvLanes)) scores[r][v] = between(scores[r][v], from, to, bits_to_float(0xff800000u));
            top = max(top, scores[r][v]);
        }
        peaks[r] = *peak_of(task, queries[r]) = peak(top);
        falls[r] = before - peaks[r];
    }
    store_sixteen(shrink, power_of_two(load_sixteen(falls)));
    for (int r = 0; r < R; ++r) {
        float* total_at = total_of(task, queries[r]);
        Pair total = mul(load_sixteen(total_at), both(shrink[r]));
        for (std::size_t v = first; v < last; ++v) {
            FactorOf<T>* to = weights[r] + kKvLanes / 2 * v;
            const Pair weight = power_of_two(sub(scores[r][v], both(peaks[r])));
            store_factors<T>(to, sizeof(T) == 1 ? mul(weight, load_sixteen(block.value_scales + kKvLanes * v)) : weight);
            total = add(total, weight);
        }
        store_sixteen(total_at, total);
    }
}

// sums[offset, 16 C) = sums * shrink + sum of weights[k] * values[k], keys two by two.
template <class T, int R, std::size_t C>
inline void mix(const Query* queries, const FactorOf<T> (&weights)[R][kBlock / 2], const float (&shrink)[kKvLanes],
                const Block<T>& block, const Block<T>* next, std::size_t offset, std::size_t first, std::size_t last) {
    Pair acc[R][C];
    for (int r = 0; r < R; ++r) {
        for (std::size_t c = 0; c < C; ++c) {
            acc[r][c] = mul(load_sixteen(queries[r].state + offset + kKvLanes * c), both(shrink[r]));
        }
    }
    for (std::size_t k = first / 2; k < (last + 1) / 2; ++k) {
        for (std::size_t c = 0; c < C; ++c) {
            if (next) __builtin_prefetch(along(next->values[k], offset + kKvLanes * c), 0, 2);
            add_products<T>(along(block.values[k], offset + kKvLanes * c), block.value_lanes,
                            [&](int r) { return weights[r][k]; }, c, acc);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (std::size_t c = 0; c < C; ++c) store_sixteen(queries[r].state + offset + kKvLanes * c, acc[r][c]);
    }
}

// R queries through one block.
template <class T, int R>
void through(const AttendTask& task, const Block<T>& block, const Block<T>* next, std::size_t start, const Query* queries,
             const FactorOf<T>* prepared) {
    constexpr std::size_t C = R == 1 ? 4 : kVectors;
    const std::size_t dims = kv_dims(task.head_dim);
    Sight seen[R];
    const FactorOf<T>* factors[R];
    std::size_t first = kBlock, last = 0;
    for (int r = 0; r < R; ++r) {
        factors[r] = prepared + static_cast<std::size_t>(r) * dims / 2;
        seen[r] = sight(task, queries[r].position, start);
        if (seen[r].first == seen[r].last) continue;
        first = seen[r].first < first ? seen[r].first : first;
        last = seen[r].last > last ? seen[r].last : last;
    }
    if (first >= last) return;
    FactorOf<T> weights[R][kBlock / 2];
    float shrink[kKvLanes];
    weigh<T, R>(task, block, next, queries, factors, seen, first / kKvLanes, (last + kKvLanes - 1) / kKvLanes, weights, shrink);
    std::size_t offset = 0;
    for (; offset + kKvLanes * C <= dims; offset += kKvLanes * C) mix<T, R, C>(queries, weights, shrink, block, next, offset, first, last);
    for (; offset < dims; offset += kKvLanes) mix<T, R, 1>(queries, weights, shrink, block, next, offset, first, last);
}

// As many at a time as there are, R at most.
template <class T, int R>
inline void all_through(const AttendTask& task, const Block<T>& block, const Block<T>* next, std::size_t start,
                        const FactorOf<T>* prepared, std::size_t from) {
    for (; from + R <= task.count; from += R) {
        through<T, R>(task, block, from == 0 ? next : nullptr, start, task.queries + from, prepared + from * kv_dims(task.head_dim) / 2);
    }
    constexpr int kFewer = R > 3 ? 3 : R - 1;
    if constexpr (kFewer > 0) {
        if (from < task.count) all_through<T, kFewer>(task, block, next, start, prepared, from);
    }
}

inline void begin(const AttendTask& task) {
    for (std::size_t i = 0; i < task.count; ++i) {
        std::memset(task.queries[i].state, 0, query_state(task.head_dim) * sizeof(float));
        *peak_of(task, task.queries[i]) = -3.402823466e+38f;
    }
}

inline void finish(const AttendTask& task) {
    for (std::size_t i = 0; i < task.count; ++i) {
        const Query& query = task.queries[i];
        const F8 total = set1(sum(load_sixteen(total_of(task, query))));
        each_lanes(task.head_dim, [&](std::size_t d, std::size_t n) {
            store_up_to(query.out + d, div(load(query.state + d), total), n);
        });
    }
}

template <class T>
void attend_of(const AttendTask& task) {
    std::int64_t oldest = task.queries[0].position, newest = oldest;
    FactorOf<T> prepared[kMostQueries * kMostDims / 2];
    for (std::size_t i = 0; i < task.count; ++i) {
        oldest = task.queries[i].position < oldest ? task.queries[i].position : oldest;
        newest = task.queries[i].position > newest ? task.queries[i].position : newest;
        prepare<T>(task, task.queries[i].q, prepared + i * kv_dims(task.head_dim) / 2);
    }
    const std::size_t end = static_cast<std::size_t>(newest) + 1;
    const std::size_t visible = task.window && oldest >= task.window ? static_cast<std::size_t>(oldest - task.window + 1) : 0;
    const std::size_t begin_at = visible / kBlock > task.block_begin ? visible / kBlock : task.block_begin;
    if (task.first) begin(task);
    const std::size_t blocks = (end + kBlock - 1) / kBlock, end_at = task.block_end < blocks ? task.block_end : blocks;
    const bool fetches = task.count <= kFewQueries && task.page_size % kKvLanes == 0;
    Block<T> block[2];
    if (begin_at < end_at) find_block(task, task.kv, begin_at * kBlock, end, block[begin_at % 2]);
    for (std::size_t index = begin_at; index < end_at; ++index) {
        Block<T>& next = block[(index + 1) % 2];
        const bool more = index + 1 < end_at, known = fetches && (more || task.then);
        if (more) find_block(task, task.kv, (index + 1) * kBlock, end, next);
        if (!more && known) find_block(task, *task.then, begin_at * kBlock, end, next);
        all_through<T, kQueries>(task, block[index % 2], known ? &next : nullptr, index * kBlock, prepared, 0);
    }
    if (task.last) finish(task);
}

// Nothing but what scores are made of: queries at hand times keys of bf16 at hand.
std::uint64_t multiply_pages(std::size_t rounds) {
    constexpr std::size_t kDims = 64, kKeys = kVectors * kKvLanes;
    const BFloat stored[kDims * kKeys] = {};
    const FactorOf<BFloat> factors[kDims / 2] = {};
    const BFloat* keys[kVectors];
    const FactorOf<BFloat>* queries[kQueries];
    for (std::size_t v = 0; v < kVectors; ++v) keys[v] = along(stored, v * kKvLanes);
    for (const auto*& query : queries) query = factors;
    float sums[kKvLanes];
    for (std::size_t round = 0; round < rounds; ++round) {
        Pair acc[kQueries][kVectors], total = both(0.0f);
        score<BFloat, kQueries, kVectors>(queries, keys, nullptr, kKeys, kDims, acc);
        for (const auto& of : acc) {
            for (const Pair& sum : of) total = add(total, sum);
        }
        store_sixteen(sums, total);
        __asm__ volatile("" : : "r"(sums), "r"(stored), "r"(factors) : "memory");  // all may have changed, all may be read
    }
    return rounds * kQueries * kKeys * kDims;
}

void attend(const AttendTask& task) {
    switch (task.kind) {
        case KvKind::f32: return attend_of<float>(task);
        case KvKind::bf16: return attend_of<BFloat>(task);
        case KvKind::i8: return attend_of<std::int8_t>(task);
    }
}
