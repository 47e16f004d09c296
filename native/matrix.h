// A weight matrix in panels, filled once, slab by slab.
//
// Knows: layouts. Refuses to know: file formats (`models.repack` unpacks them), threads.
#pragma once

#include <memory>

#include "kernels.h"

namespace branchline {

class Matrix {
public:
    // Raises std::invalid_argument if the inputs of a grouped format are not whole groups.
    Matrix(Format format, std::size_t out, std::size_t in);

    // Rows [first, first + rows) as numbers of the encoding: f32, or the bits of f16 or bf16.
    void put_numbers(std::size_t first, std::size_t rows, const void* numbers);

    // The same as codes `[rows, in]`, scales `[rows, in / 32 * splits]` and minima `[rows, in / 32]` (or nullptr).
    // Raises std::invalid_argument if a scale or minimum is not exactly an f16 where the format says it is.
    void put_groups(std::size_t first, std::size_t rows, const std::uint8_t* codes, const float* scales,
                    const float* minima);

    // One row as floats.
    void read(std::size_t row, float* out) const;

    const Panels& panels() const { return panels_; }
    std::size_t bytes() const { return panels_.count() * panels_.format.panel_bytes(panels_.in); }

private:
    void put_scale(std::uint8_t* block, std::size_t index, float value) const;
    float get_scale(const std::uint8_t* block, std::size_t index) const;

    struct Free {
        void operator()(std::uint8_t* memory) const;
    };
    Panels panels_;
    std::unique_ptr<std::uint8_t, Free> memory_;
};

}  // namespace branchline
