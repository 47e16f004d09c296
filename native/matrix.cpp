#include "matrix.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "half.h"

namespace branchline {
namespace {

constexpr std::size_t kAlignment = 64;

// Byte of input i (0 to 31) of channel c within the codes of a block.
std::size_t place(std::size_t c, std::size_t i) { return i / 4 * 32 + 4 * c + i % 4; }

}  // namespace

void Matrix::Free::operator()(std::uint8_t* memory) const { std::free(memory); }

Matrix::Matrix(Format format, std::size_t out, std::size_t in) {
    if (out == 0 || in == 0) throw std::invalid_argument("a matrix needs rows and columns");
    if (format.grouped() && in % kGroup != 0) throw std::invalid_argument("rows are not whole groups of 32");
    if (format.encoding == Encoding::q4 && (format.splits != 1 || !format.minima)) {
        throw std::invalid_argument("4-bit groups have one scale and a minimum");
    }
    if (format.splits != 1 && format.splits != 2) throw std::invalid_argument("a group has one or two scales");
    panels_ = {format, out, in, nullptr};
    // A vector may be read from the last bytes on: room for one behind the end.
    const std::size_t size = (bytes() + 32 + kAlignment - 1) / kAlignment * kAlignment;
    memory_.reset(static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, size)));
    if (!memory_) throw std::bad_alloc();
    std::memset(memory_.get(), 0, size);
    panels_.data = memory_.get();
}

void Matrix::put_numbers(std::size_t first, std::size_t rows, const void* numbers) {
    const Format& format = panels_.format;
    if (format.grouped() || first + rows > panels_.out) throw std::invalid_argument("these rows do not fit");
    const std::size_t size = format.encoding == Encoding::f32 ? 4 : 2;
    const std::uint8_t* from = static_cast<const std::uint8_t*>(numbers);
    for (std::size_t row = first; row < first + rows; ++row) {
        std::uint8_t* to = memory_.get() + row / kLanes * format.panel_bytes(panels_.in) + row % kLanes * size;
        for (std::size_t k = 0; k < panels_.in; ++k, from += size, to += kLanes * size) std::memcpy(to, from, size);
    }
}

void Matrix::put_groups(std::size_t first, std::size_t rows, const std::uint8_t* codes, const float* scales,
                        const float* minima) {
    const Format& format = panels_.format;
    if (!format.grouped() || first + rows > panels_.out) throw std::invalid_argument("these rows do not fit");
    if (format.minima != (minima != nullptr)) throw std::invalid_argument("minima are given exactly if the format has them");
    const bool four = format.encoding == Encoding::q4;
    for (std::size_t row = first; row < first + rows; ++row) {
        std::uint8_t* block = memory_.get() + row / kLanes * format.panel_bytes(panels_.in);
        const std::size_t c = row % kLanes;
        for (std::size_t group = 0; group < panels_.in / kGroup; ++group, codes += kGroup, block += format.block_bytes()) {
            for (std::size_t i = 0; i < (four ? kGroup / 2 : kGroup); ++i) {
                block[place(c, i)] = four ? static_cast<std::uint8_t>(codes[i] | codes[i + 16] << 4) : codes[i];
            }
            for (std::size_t split = 0; split < format.splits; ++split) put_scale(block, split * kLanes + c, *scales++);
            if (minima) put_scale(block, format.splits * kLanes + c, *minima++);
        }
    }
}

void Matrix::read(std::size_t row, float* out) const {
    const Format& format = panels_.format;
    const std::size_t c = row % kLanes;
    const std::uint8_t* panel = panels_.panel(row / kLanes);
    if (!format.grouped()) {
        const std::size_t size = format.encoding == Encoding::f32 ? 4 : 2;
        for (std::size_t k = 0; k < panels_.in; ++k) {
            const std::uint8_t* at = panel + (k * kLanes + c) * size;
            std::uint16_t bits;
            std::memcpy(&bits, at, sizeof bits);
            if (format.encoding == Encoding::f32) std::memcpy(out + k, at, sizeof(float));
            if (format.encoding == Encoding::f16) out[k] = half_to_float(bits);
            if (format.encoding == Encoding::bf16) out[k] = bfloat_to_float(bits);
        }
        return;
    }
    for (std::size_t group = 0; group < panels_.in / kGroup; ++group, panel += format.block_bytes(), out += kGroup) {
        const float minimum = format.minima ? get_scale(panel, format.splits * kLanes + c) : 0.0f;
        for (std::size_t i = 0; i < kGroup; ++i) {
            const float scale = get_scale(panel, i * format.splits / kGroup * kLanes + c);
            if (format.encoding == Encoding::q4) {
                out[i] = scale * static_cast<float>(panel[place(c, i % 16)] >> (i < 16 ? 0 : 4) & 15) + minimum;
            } else {
                out[i] = scale * static_cast<float>(static_cast<std::int8_t>(panel[place(c, i)])) + minimum;
            }
        }
    }
}

void Matrix::put_scale(std::uint8_t* block, std::size_t index, float value) const {
    std::uint8_t* at = block + panels_.format.code_bytes() + index * panels_.format.scale_bytes();
    if (!panels_.format.half) {
        std::memcpy(at, &value, sizeof value);
        return;
    }
    bool exact;
    const std::uint16_t bits = float_to_half(value, exact);
    if (!exact) throw std::invalid_argument("a scale is not a 16-bit float");
    std::memcpy(at, &bits, sizeof bits);
}

float Matrix::get_scale(const std::uint8_t* block, std::size_t index) const {
    const std::uint8_t* at = block + panels_.format.code_bytes() + index * panels_.format.scale_bytes();
    if (panels_.format.half) {
        std::uint16_t bits;
        std::memcpy(&bits, at, sizeof bits);
        return half_to_float(bits);
    }
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

}  // namespace branchline
