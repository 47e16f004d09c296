// Every kernel of the unit named on the command line against the portable unit, bit by bit, over shapes that fit no tile.
// Prints what differs; the exit status says whether anything did.
//
// UNITS lists the units that are linked beside the portable one: UNITS(visit) visit(avx2) visit(neon) ...
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "matrix.h"

namespace {

using namespace branchline;

using Floats = std::vector<float>;

// ---------------------------------------------------------------- random data

class Random {
public:
    explicit Random(unsigned seed) : engine_(seed) {}

    std::size_t below(std::size_t end) { return engine_() % end; }
    bool coin() { return below(2) == 1; }
    float number() { return static_cast<float>(below(2000001)) / 1e6f - 1.0f; }
    Floats numbers(std::size_t count, float size = 1.0f) {
        Floats out(count);
        for (float& x : out) x = size * number();
        return out;
    }
    // Exactly representable in 16 bits.
    Floats halves(std::size_t count) {
        Floats out(count);
        for (float& x : out) x = (static_cast<float>(below(2048)) - 1024.0f) / 4096.0f;
        return out;
    }
    std::vector<std::uint8_t> bytes(std::size_t count, unsigned end) {
        std::vector<std::uint8_t> out(count);
        for (std::uint8_t& x : out) x = static_cast<std::uint8_t>(below(end));
        return out;
    }

private:
    std::mt19937 engine_;
};

Matrix random_matrix(Random& random, const Format& format, std::size_t out, std::size_t in) {
    Matrix matrix(format, out, in);
    if (format.grouped()) {
        std::vector<std::uint8_t> codes = random.bytes(out * in, format.encoding == Encoding::q4 ? 16 : 256);
        // Some groups of extremes: the largest sums that there can be.
        for (std::size_t i = 0; i < out * in; ++i) {
            if (i / kGroup % 7 == 3) codes[i] = format.encoding == Encoding::q4 ? 15 : 128;
        }
        const Floats scales = random.halves(out * in / kGroup * format.splits), minima = random.halves(out * in / kGroup);
        matrix.put_groups(0, out, codes.data(), scales.data(), format.minima ? minima.data() : nullptr);
    } else if (format.encoding == Encoding::f32) {
        matrix.put_numbers(0, out, random.numbers(out * in).data());
    } else {
        std::vector<std::uint16_t> bits(out * in);
        for (std::uint16_t& x : bits) {
            x = static_cast<std::uint16_t>(random.below(0x10000));
            // No infinities and NaN, but zeros and denormals.
            const unsigned exponent = format.encoding == Encoding::f16 ? 0x7c00u : 0x7f80u;
            if ((x & exponent) == exponent) x = 1;
        }
        matrix.put_numbers(0, out, bits.data());
    }
    return matrix;
}

// ---------------------------------------------------------------- comparing

const Kernels *portable, *unit;
std::size_t compared = 0, failed = 0;

// NaN equals NaN: which of them an operation makes is the processor's own business.
bool same(const Floats& a, const Floats& b, std::size_t& at) {
    for (at = 0; at < a.size(); ++at) {
        if (std::isnan(a[at]) && std::isnan(b[at])) continue;
        if (std::memcmp(&a[at], &b[at], sizeof(float)) != 0) return false;
    }
    return true;
}

void expect_same(const Floats& wanted, const Floats& got, const std::string& what) {
    std::size_t at;
    ++compared;
    if (same(wanted, got, at)) return;
    ++failed;
    std::printf("%s: number %zu is %.9g, portable %.9g\n", what.c_str(), at, got[at], wanted[at]);
}

// ---------------------------------------------------------------- linear

struct Operand {
    std::size_t rows, width;
    Floats x, scales, sums;
    std::vector<std::int8_t> codes;

    // The last row but one holds a NaN, the one before it an infinity.
    Operand(Random& random, std::size_t rows, std::size_t width, bool grouped)
        : rows(rows), width(width), x(random.numbers(rows * width, 3.0f)) {
        if (rows > 2) x[(rows - 2) * width + random.below(width)] = NAN;
        if (rows > 3) x[(rows - 3) * width + random.below(width)] = INFINITY;
        if (!grouped) return;
        if (rows > 4) std::fill(x.end() - static_cast<std::ptrdiff_t>(width), x.end(), -2.5f);  // bytes of -127
        const std::size_t groups = width / kGroup;
        codes.resize(rows * width);
        scales.resize(rows * groups);
        sums.resize(rows * groups);
        for (std::size_t row = 0; row < rows; ++row) {
            portable->quantize(&x[row * width], width, &codes[row * width], &scales[row * groups], &sums[row * groups]);
        }
    }
    Rows view() const { return {x.data(), codes.data(), scales.data(), sums.data(), width}; }
};

void check_linear(Random& random, const Format& format, std::size_t rows, std::size_t out, std::size_t in) {
    const Matrix weight = random_matrix(random, format, out, in), second = random_matrix(random, format, out, in);
    const Operand operand(random, rows, in, format.grouped());
    const Floats bias = random.numbers(out);
    for (const Gate gate : {Gate::none, Gate::silu, Gate::gelu_tanh}) {
        const std::size_t first = random.below(weight.panels().count()), skipped = rows > 4 ? random.below(4) : 0;
        const bool all = random.coin();
        const LinearTask task{&weight.panels(), gate == Gate::none ? nullptr : &second.panels(), gate, all ? 0 : first,
                              weight.panels().count(), skipped, rows, operand.view(), nullptr, out + 3,
                              random.coin() ? bias.data() : nullptr, random.coin()};
        // What must not be written is compared like the rest.
        const Floats before = random.numbers(rows * task.out_stride);
        Floats wanted = before, got = before;
        LinearTask on_portable = task, on_unit = task;
        on_portable.out = wanted.data();
        on_unit.out = got.data();
        portable->linear(on_portable);
        unit->linear(on_unit);
        char what[160];
        std::snprintf(what, sizeof what, "linear encoding %d half %d minima %d splits %zu: %zu rows %zu -> %zu, gate %d",
                      static_cast<int>(format.encoding), format.half, format.minima, format.splits, rows, in, out,
                      static_cast<int>(gate));
        expect_same(wanted, got, what);
    }
}

std::vector<Format> all_formats() {
    std::vector<Format> out = {{Encoding::f32}, {Encoding::f16}, {Encoding::bf16}};
    for (const bool half : {false, true}) {
        out.push_back({Encoding::q4, half, true, 1});
        for (const bool minima : {false, true}) {
            for (const std::size_t splits : {1, 2}) out.push_back({Encoding::q8, half, minima, splits});
        }
    }
    return out;
}

void check_all_linear(Random& random) {
    for (const Format& format : all_formats()) {
        const auto width = [&](std::size_t groups) { return groups * kGroup + (format.grouped() ? 0 : 5); };
        // Rows around what four, sixteen and a strip of tiles take; groups around what is unpacked together.
        check_linear(random, format, 1, 8, width(1));
        check_linear(random, format, 2, 24, width(9));
        check_linear(random, format, 3, 5, width(2));
        check_linear(random, format, 17, 41, width(3));
        check_linear(random, format, 36, 20, width(8));
        check_linear(random, format, 51, 16, width(11));
        check_linear(random, format, 150, 13, width(5));
    }
}

// ---------------------------------------------------------------- rows

void check_quantize(Random& random) {
    for (const std::size_t groups : {1, 2, 7}) {
        const std::size_t width = groups * kGroup;
        Floats x = random.numbers(width, 5.0f);
        if (groups == 7) {
            x[3] = NAN;
            x[kGroup] = -INFINITY;
            std::fill(x.begin() + 2 * kGroup, x.begin() + 3 * kGroup, 0.0f);
            std::fill(x.begin() + 3 * kGroup, x.begin() + 4 * kGroup, 1e-31f);
            for (std::size_t i = 4 * kGroup; i < 5 * kGroup; ++i) x[i] = static_cast<float>(i % 8) + 0.5f;  // ties
            x[4 * kGroup] = 127.0f;
        }
        Floats wanted[3], got[3];
        const auto run = [&](const Kernels* kernels, Floats (&out)[3]) {
            std::vector<std::int8_t> codes(width);
            out[1].resize(groups);
            out[2].resize(groups);
            kernels->quantize(x.data(), width, codes.data(), out[1].data(), out[2].data());
            out[0].assign(codes.begin(), codes.end());
        };
        run(portable, wanted);
        run(unit, got);
        for (int i = 0; i < 3; ++i) expect_same(wanted[i], got[i], "quantize");
    }
}

template <class Run>
void check_rows(const char* what, std::size_t numbers, Run run) {
    Floats wanted(numbers, 7.0f), got(numbers, 7.0f);
    run(portable, wanted.data());
    run(unit, got.data());
    expect_same(wanted, got, what);
}

void check_elementwise(Random& random) {
    for (const std::size_t count : {1, 7, 8, 37, 64}) {
        Floats a = random.numbers(count, 30.0f), b = random.numbers(count), weight = random.numbers(count);
        if (count > 8) {
            a[2] = NAN;
            a[5] = INFINITY;
            a[6] = -INFINITY;
            a[7] = -0.0f;
            a[9] = 88.5f;
            a[10] = -87.5f;
        }
        for (const Gate kind : {Gate::silu, Gate::gelu_tanh}) {
            check_rows("gate", count + 1, [&](const Kernels* k, float* out) {
                k->gate(kind, a.data(), b.data(), count, out);
            });
        }
        check_rows("add", count + 1, [&](const Kernels* k, float* out) { k->add(a.data(), b.data(), count, out); });
        const Floats x = random.numbers(3 * count);
        check_rows("norm", 3 * count + 1, [&](const Kernels* k, float* out) {
            k->norm(x.data(), weight.data(), 3 * count, count, 1e-5f, out);
        });
        check_rows("argmax", 2, [&](const Kernels* k, float* out) {
            out[0] = static_cast<float>(k->argmax(b.data(), count));
            out[1] = static_cast<float>(k->argmax(a.data(), count));
        });
    }
    const Floats x = random.numbers(80), cos = random.numbers(9), sin = random.numbers(9);
    for (const bool interleaved : {false, true}) {
        check_rows("rotate", 81, [&](const Kernels* k, float* out) {
            k->rotate(x.data(), cos.data(), sin.data(), 80, 20, 9, interleaved, out);
        });
    }
}

// ---------------------------------------------------------------- attention

void check_attend(Random& random, KvKind kind, std::size_t page_size, std::size_t head_dim, std::size_t tokens,
                  std::int64_t position, std::int64_t window) {
    const std::size_t heads = 3, stride = heads * head_dim + 4, size = query_state(head_dim);
    const std::size_t pages = (static_cast<std::size_t>(position) + tokens) / page_size + 1;
    std::vector<std::int64_t> table(pages);
    for (std::size_t i = 0; i < pages; ++i) table[i] = static_cast<std::int64_t>(pages - 1 - i);
    const std::size_t numbers = pages * kv_page(head_dim, page_size);
    const Floats q = random.numbers(tokens * stride, 4.0f), scales = random.numbers(pages * page_size, 0.01f);
    // Floats as they are, or their upper halves as bf16, or their bytes as codes.
    const Floats whole[2] = {random.numbers(numbers), random.numbers(numbers)};
    std::vector<std::uint8_t> stored[2];
    for (int i = 0; i < 2; ++i) {
        for (const float x : whole[i]) {
            std::uint8_t bytes[4];
            std::memcpy(bytes, &x, sizeof bytes);
            stored[i].insert(stored[i].end(), bytes + (kind == KvKind::f32 ? 0 : kind == KvKind::bf16 ? 2 : 3), bytes + 4);
        }
    }
    check_rows("attend", tokens * stride, [&](const Kernels* kernels, float* out) {
        Floats states(tokens * heads * size);
        std::vector<Query> queries;
        for (std::size_t token = 0; token < tokens; ++token) {
            for (std::size_t head = 0; head < heads; ++head) {
                const std::size_t at = token * stride + head * head_dim;
                queries.push_back({&q[at], &states[(token * heads + head) * size], out + at,
                                   position + static_cast<std::int64_t>(token)});
            }
        }
        const KvHead kv{stored[0].data(), stored[1].data(), scales.data(), scales.data(), 1};
        // In two pieces, as rows do that share their first block.
        AttendTask task{queries.data(), queries.size(), head_dim, kind, kv, &kv, table.data(), page_size, 0.3f, window, 0, 1, true, false};
        kernels->attend(task);
        task.block_begin = 1, task.block_end = pages * page_size, task.first = false, task.last = true;
        kernels->attend(task);
    });
}

void check_all_attend(Random& random) {
    for (const KvKind kind : {KvKind::f32, KvKind::bf16, KvKind::i8}) {
        for (const std::size_t head_dim : {8, 20, 64, 72}) {
            check_attend(random, kind, 16, head_dim, 1, 0, 0);
            check_attend(random, kind, 12, head_dim, 5, 61, 0);
            check_attend(random, kind, 16, head_dim, 1, 200, 0);
            check_attend(random, kind, 16, head_dim, 4, 150, 33);
            check_attend(random, kind, 32, head_dim, 9, 250, 0);
        }
    }
}

const Kernels* find(const std::string& name) {
#define BRANCHLINE_VISIT(unit) \
    if (name == #unit) return unit##_kernels();
    UNITS(BRANCHLINE_VISIT)
    return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
    usable_kernels();  // asks the system for the tile state, where there is one
    portable = portable_kernels();
    unit = argc == 2 ? find(argv[1]) : nullptr;
    if (!unit || argv[1] != std::string(unit->name)) {
        std::printf("name one of the units that were linked\n");
        return 2;
    }
    Random random(1);
    check_all_linear(random);
    check_quantize(random);
    check_elementwise(random);
    check_all_attend(random);
    std::printf("%s: %zu comparisons, %zu differ\n", unit->name, compared, failed);
    return failed ? 1 : 0;
}
