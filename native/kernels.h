// The door between the program (what is computed, in which order, by whom) and the kernels (how, on which instructions).
//
// Every instruction set has one translation unit that fills one table of function pointers; the table is chosen at run
// time. All tables give the same bits: integer dot products are exact, float operations have one order, and every
// multiply-add is a fused one.
//
// Knows: layouts and signatures. Refuses to know: threads, Python, models.
#pragma once

#include <cstddef>
#include <cstdint>

namespace branchline {

constexpr std::size_t kLanes = 8;   // output channels of a panel
constexpr std::size_t kGroup = 32;  // inputs that share a scale
constexpr std::size_t kBlock = 64;  // key positions between two updates of the online softmax
constexpr std::size_t kMostDims = 256;  // numbers of a head
constexpr std::size_t kKvLanes = 16;    // of a vector of keys or values
constexpr std::size_t kMostQueries = 128;  // of a task

enum class Encoding : std::uint8_t { f32, f16, bf16, q4, q8 };

// How a panel of 8 output channels is laid out.
//
// f32, f16, bf16: [in][8] numbers.
// q4: per group of 32 inputs 4 x 32 bytes, then 8 scales, then 8 minima. Byte 32 j + 4 c + i holds input 4 j + i of
//     channel c in its low half and input 16 + 4 j + i in its high half; weight = scale * q + minimum, 0 <= q < 16.
// q8: per group 8 x 32 bytes, then `splits` x 8 scales, then 8 minima if there are any. Byte 32 j + 4 c + i is input
//     4 j + i of channel c; weight = scale * q + minimum, -128 <= q < 128. With two splits each half group has a scale.
// Scales and minima are f16 (`half`) or f32.
struct Format {
    Encoding encoding = Encoding::f32;
    bool half = false;
    bool minima = false;
    std::size_t splits = 1;

    // Always inlined: a copy that one instruction set's unit leaves behind must not serve the others.
    [[gnu::always_inline]] bool grouped() const { return encoding == Encoding::q4 || encoding == Encoding::q8; }
    [[gnu::always_inline]] std::size_t code_bytes() const { return encoding == Encoding::q4 ? 128 : 256; }
    [[gnu::always_inline]] std::size_t scale_bytes() const { return half ? 2 : 4; }
    [[gnu::always_inline]] std::size_t block_bytes() const {
        return code_bytes() + kLanes * scale_bytes() * (splits + (minima ? 1 : 0));
    }
    [[gnu::always_inline]] std::size_t panel_bytes(std::size_t in) const {
        if (grouped()) return in / kGroup * block_bytes();
        return in * kLanes * (encoding == Encoding::f32 ? 4 : 2);
    }
};

struct Panels {
    Format format;
    std::size_t out = 0, in = 0;
    const std::uint8_t* data = nullptr;

    [[gnu::always_inline]] std::size_t count() const { return (out + kLanes - 1) / kLanes; }
    [[gnu::always_inline]] const std::uint8_t* panel(std::size_t index) const {
        return data + index * format.panel_bytes(in);
    }
};

// Inputs of a linear operator: `width` numbers a row, and the same as bytes with a scale and a scaled sum per group.
struct Rows {
    const float* x = nullptr;
    const std::int8_t* codes = nullptr;
    const float* scales = nullptr;
    const float* sums = nullptr;
    std::size_t width = 0;
};

enum class Gate : std::uint8_t { none, silu, gelu_tanh };

// Rows [row_begin, row_end) x panels [panel_begin, panel_end). With a gate: out = gate(weight x) * (second x).
struct LinearTask {
    const Panels* weight;
    const Panels* second;
    Gate gate;
    std::size_t panel_begin, panel_end, row_begin, row_end;
    Rows in;
    float* out;  // row 0, first channel of panel_begin
    std::size_t out_stride;
    const float* bias;  // of channel 0, or nullptr
    bool add;           // out += instead of out =
};

enum class KvKind : std::uint8_t { f32, bf16, i8 };

[[gnu::always_inline]] constexpr std::size_t kv_bytes(KvKind kind) { return kind == KvKind::f32 ? 4 : kind == KvKind::bf16 ? 2 : 1; }
[[gnu::always_inline]] constexpr std::size_t whole(std::size_t count, std::size_t of) { return (count + of - 1) / of * of; }

// Keys and values of one head. Of i8 each position has a scale. What a page holds of a layer is one piece of memory, keys and
// values of a head next to each other: from one page of the head to the next are `records` times a page's numbers, or scales.
//
// Attention adds up products two at a time, and two by two the numbers lie: of keys two dimensions, for all positions of the
// page side by side; of values two positions, for all dimensions side by side (dimensions in whole vectors, positions even).
// The two of bf16 and i8 are neighbours, as instructions for bf16 want them; the two of f32 are in rows of their own.
struct KvHead {
    const std::uint8_t* keys;
    const std::uint8_t* values;
    const float* key_scales;
    const float* value_scales;
    std::size_t records;
};

// Numbers that a head takes in a page, and a page as a whole.
[[gnu::always_inline]] constexpr std::size_t kv_dims(std::size_t head_dim) { return whole(head_dim, kKvLanes); }
[[gnu::always_inline]] constexpr std::size_t kv_page(std::size_t head_dim, std::size_t page_size) {
    return kv_dims(head_dim) * whole(page_size, 2);
}
// Where number `lane` of row `row` is; `lanes` numbers are side by side. Of keys rows are dimensions, of values positions.
[[gnu::always_inline]] constexpr std::size_t kv_place(bool neighbours, std::size_t row, std::size_t lane, std::size_t lanes) {
    return row / 2 * 2 * lanes + (neighbours ? 2 * lane + row % 2 : row % 2 * lanes + lane);
}
[[gnu::always_inline]] constexpr bool neighbours(KvKind kind) { return kind != KvKind::f32; }

// One query on its way through the blocks. `state`: kv_dims(head_dim) sums, then the total of the softmax in kKvLanes parts,
// then its peak.
struct Query {
    const float* q;
    float* state;
    float* out;
    std::int64_t position;
};

[[gnu::always_inline]] constexpr std::size_t query_state(std::size_t head_dim) { return kv_dims(head_dim) + kKvLanes + 1; }

// Queries that see the same pages, for one key head, through blocks [block_begin, block_end). Each query takes the blocks in
// order and by itself: who walks beside it changes none of its bits.
struct AttendTask {
    const Query* queries;
    std::size_t count, head_dim;
    KvKind kind;
    KvHead kv;
    const KvHead* then;  // the head whose turn comes next with the same pages, or nullptr
    const std::int64_t* pages;
    std::size_t page_size;
    float scale;
    std::int64_t window;  // 0: none
    std::size_t block_begin, block_end;
    bool first, last;  // the state begins here; it ends here, and `out` gets the result
};

struct Kernels {
    const char* name;
    void (*linear)(const LinearTask&);
    // One row: bytes, scale and scaled sum of each group of 32. A group with a number that is not finite gets the scale NaN.
    void (*quantize)(const float* x, std::size_t width, std::int8_t* codes, float* scales, float* sums);
    // One row: root mean square norm over groups of `group`.
    void (*norm)(const float* x, const float* weight, std::size_t width, std::size_t group, float eps, float* out);
    // One row, in place allowed: rotate heads by `half` cosines and sines.
    void (*rotate)(const float* x, const float* cos, const float* sin, std::size_t width, std::size_t head_dim,
                   std::size_t half, bool interleaved, float* out);
    void (*gate)(Gate kind, const float* gate, const float* up, std::size_t count, float* out);
    void (*add)(const float* a, const float* b, std::size_t count, float* out);
    void (*attend)(const AttendTask&);
    // Index of the first largest number, or -1 if one is not finite.
    std::int64_t (*argmax)(const float* x, std::size_t count);
    // Nothing but the multiply-adds of bytes that `linear` is made of, on data at hand: what they could do at best. Returns
    // how many there were.
    std::uint64_t (*multiply_bytes)(std::size_t rounds);
    // The same of numbers of bf16 pages, as `attend` is made of.
    std::uint64_t (*multiply_pages)(std::size_t rounds);
};

// Only those that the compiler could build are linked: `isa.cpp` knows.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();     // AVX2, FMA, F16C
const Kernels* avxvnni_kernels();  // AVX-VNNI beside AVX2
const Kernels* avx512_kernels();   // AVX512 F, BW, VL, VNNI
const Kernels* avx512bf16_kernels();  // AVX512-BF16 beside those
const Kernels* amx_kernels();         // AMX-TILE, AMX-INT8 beside those
const Kernels* neon_kernels();        // AArch64 with dot products

}  // namespace branchline
