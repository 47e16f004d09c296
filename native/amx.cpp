// The linear kernel for many rows of grouped weights on AMX tiles; few rows and all else are AVX512's. Compiled with these
// instructions, so nothing here may run before `isa.cpp` has looked and the system has granted the tile state.
//
// A tile product is 16 rows x 16 channels over one part of the inputs, a group or the half of one that has its own scale:
// integers, exact in any order. What is added up in floats, and in which order, is what `Grouped::run` does.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "kernels.h"

namespace branchline {
namespace {

constexpr const char* kName = "amx";
constexpr int kRowTile = 4;
constexpr std::size_t kPairs = 1;
constexpr int kQueries = 3, kVectors = 1;
#include "simd_avx2.h"
#include "pair_avx512.h"
#include "dot_avx512.h"
#include "products.h"
#include "kernels.inl"

constexpr std::size_t kTileRows = 16;
constexpr std::size_t kFewestRows = 32;  // fewer are faster without tiles, see docs/performance.md
constexpr std::size_t kStripRows = 128;  // rows for which weights are unpacked once
constexpr std::size_t kParts = 8;        // parts that are multiplied, then added up: their products stay in the cache

// gcc 12 does not know what tile instructions read: without this it may drop the stores before them.
inline void will_be_read(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// Products are in tiles 0 to 3, inputs in 4 and 5, weights in 6 and 7.
struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    explicit TileShapes(std::size_t part_inputs) {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = tile == 4 || tile == 5 ? static_cast<std::uint16_t>(part_inputs) : 64;
            rows[tile] = static_cast<std::uint8_t>(tile < 6 ? kTileRows : part_inputs / 4);
        }
    }
};

// Tiles are named by literals in the intrinsics, so this cannot be a function.
#define BRANCHLINE_MULTIPLY(PRODUCT, INPUT, WEIGHT, PART)                                           \
    do {                                                                                            \
        _tile_loadd(INPUT, codes + (PART) * kInputs, width);                                        \
        _tile_loadd(WEIGHT, weights.codes + (PART) * kInputs * 2 * kLanes, 64);                     \
        _tile_zero(PRODUCT);                                                                        \
        if constexpr (Four) _tile_dpbsud(PRODUCT, INPUT, WEIGHT);                                   \
        if constexpr (!Four) _tile_dpbssd(PRODUCT, INPUT, WEIGHT);                                  \
        _tile_stored(PRODUCT, products[PART], 64);                                                  \
    } while (false)

template <bool Four, bool Minima, int Splits>
struct Tiles {
    static constexpr std::size_t kInputs = kGroup / Splits;   // of a part
    static constexpr std::size_t kGroups = kParts / Splits;  // that are worked on together

    // Some groups of a pair of panels: row j of a part holds its inputs 4 j to 4 j + 3 for 16 channels.
    struct alignas(64) Weights {
        std::uint8_t codes[kGroups * kGroup * 2 * kLanes];
        Pair scales[kParts], minima[kGroups];
    };
    using Products = std::int32_t[kParts][kTileRows * 2 * kLanes];

    static Pair load_scales(const Format& format, const std::uint8_t* w0, const std::uint8_t* w1, std::size_t index) {
        const std::size_t at = format.code_bytes() + index * kLanes * format.scale_bytes();
        return format.half ? load_pair<Encoding::f16>(w0 + at, w1 + at) : load_pair<Encoding::f32>(w0 + at, w1 + at);
    }

    static void unpack(const Format& format, const Side& side, std::size_t first, std::size_t count, Weights& weights) {
        const __m512i low = _mm512_set1_epi8(15);
        for (std::size_t group = 0; group < count; ++group) {
            const std::uint8_t* w0 = side.weights.at[0] + (first + group) * format.block_bytes();
            const std::uint8_t* w1 = side.weights.at[1] + (first + group) * format.block_bytes();
            std::uint8_t* codes = weights.codes + group * kGroup * 2 * kLanes;
            for (std::size_t j = 0; j < (Four ? 4 : 8); ++j) {
                const __m512i bytes = load_bytes(w0 + 32 * j, w1 + 32 * j);
                if constexpr (Four) {
                    _mm512_storeu_si512(codes + 64 * j, _mm512_and_si512(bytes, low));
                    _mm512_storeu_si512(codes + 64 * (4 + j), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low));
                } else {
                    _mm512_storeu_si512(codes + 64 * j, bytes);
                }
            }
            for (std::size_t split = 0; split < Splits; ++split) {
                weights.scales[group * Splits + split] = load_scales(format, w0, w1, split);
            }
            if constexpr (Minima) weights.minima[group] = load_scales(format, w0, w1, Splits);
        }
    }

    static void multiply(const Weights& weights, const std::int8_t* codes, std::size_t width, std::size_t parts,
                         Products& products) {
        std::size_t part = 0;
        for (; part + 4 <= parts; part += 4) {
            BRANCHLINE_MULTIPLY(0, 4, 6, part);
            BRANCHLINE_MULTIPLY(1, 5, 7, part + 1);
            BRANCHLINE_MULTIPLY(2, 4, 6, part + 2);
            BRANCHLINE_MULTIPLY(3, 5, 7, part + 3);
        }
        for (; part < parts; ++part) BRANCHLINE_MULTIPLY(0, 4, 6, part);
    }

    // The sums of 16 rows stay in registers.
    static void add_up(const Weights& weights, const Products& products, const float* scales, const float* sums_of,
                       std::size_t row_groups, std::size_t count, Strip* sums) {
        Pair acc[kTileRows];
#pragma GCC unroll 16
        for (std::size_t r = 0; r < kTileRows; ++r) acc[r] = sums[r].v[0];
        for (std::size_t group = 0; group < count; ++group) {
            for (std::size_t part = group * Splits; part < (group + 1) * Splits; ++part) {
                const Pair d = weights.scales[part];
#pragma GCC unroll 16
                for (std::size_t r = 0; r < kTileRows; ++r) {
                    const IntPair dot = {_mm512_loadu_si512(products[part] + r * 2 * kLanes)};
                    acc[r] = fma(to_float(dot), mul(d, both(scales[r * row_groups + group])), acc[r]);
                }
            }
            if constexpr (Minima) {
                const Pair m = weights.minima[group];
#pragma GCC unroll 16
                for (std::size_t r = 0; r < kTileRows; ++r) acc[r] = fma(m, both(sums_of[r * row_groups + group]), acc[r]);
            }
        }
#pragma GCC unroll 16
        for (std::size_t r = 0; r < kTileRows; ++r) sums[r].v[0] = acc[r];
    }

    // Rows [row, row + count), count a multiple of 16 up to kStripRows.
    static void strip(const LinearTask& task, const Side& side, std::size_t row, std::size_t count) {
        Weights weights;
        alignas(64) Products products;
        Strip sums[kStripRows];
        const std::size_t width = task.in.width, groups = width / kGroup;
        for (std::size_t r = 0; r < count; ++r) sums[r].v[0] = both(0.0f);
        for (std::size_t first = 0; first < groups; first += kGroups) {
            const std::size_t together = groups - first < kGroups ? groups - first : kGroups;
            unpack(task.weight->format, side, first, together, weights);
            will_be_read(&weights);
            for (std::size_t r = 0; r < count; r += kTileRows) {
                const std::size_t at = (row + r) * groups + first;
                multiply(weights, task.in.codes + at * kGroup, width, together * Splits, products);
                add_up(weights, products, task.in.scales + at, task.in.sums + at, groups, together, sums + r);
            }
        }
        finish(task, side, row, sums, count);
    }

    // A multiple of 16 rows.
    static void run(const LinearTask& task) {
        const TileShapes shapes(kInputs);
        will_be_read(&shapes);
        _tile_loadconfig(&shapes);
        each_side(task, [&](const Side& side) {
            for (std::size_t row = task.row_begin; row < task.row_end; row += kStripRows) {
                strip(task, side, row, task.row_end - row < kStripRows ? task.row_end - row : kStripRows);
            }
        });
        _tile_release();
    }
};

#undef BRANCHLINE_MULTIPLY

void run_tiles(const LinearTask& task) {
    const Format& format = task.weight->format;
    if (format.encoding == Encoding::q4) return Tiles<true, true, 1>::run(task);
    if (format.splits == 2) return format.minima ? Tiles<false, true, 2>::run(task) : Tiles<false, false, 2>::run(task);
    return format.minima ? Tiles<false, true, 1>::run(task) : Tiles<false, false, 1>::run(task);
}

void linear_on_tiles(const LinearTask& task) {
    LinearTask many = task, few = task;
    const std::size_t rows = task.row_end - task.row_begin;
    if (task.weight->format.grouped() && rows >= kFewestRows) many.row_end = few.row_begin = task.row_end - rows % kTileRows;
    if (few.row_begin > task.row_begin) run_tiles(many);
    if (few.row_begin < task.row_end) avx512_kernels()->linear(few);
}

}  // namespace

const Kernels* amx_kernels() {
    static const Kernels table = with_linear(*avx512bf16_kernels(), linear_on_tiles);
    return &table;
}

}  // namespace branchline
