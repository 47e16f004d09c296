// What Python sees: matrices that are filled once, and a program that runs steps without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>

#include "half.h"
#include "isa.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace branchline {
namespace {

template <class T, class Shape>
using Input = nb::ndarray<const T, Shape, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = Input<T, nb::ndim<1>>;
template <class T>
using Table = Input<T, nb::ndim<2>>;
template <class T, class Shape>
using Output = nb::ndarray<nb::numpy, T, Shape>;

void require(bool truth, const char* message) {
    if (!truth) throw std::invalid_argument(message);
}

template <class T>
std::vector<T> copied(const Vector<T>& array) {
    return std::vector<T>(array.data(), array.data() + array.shape(0));
}

template <class T, class Shape>
Output<T, Shape> fresh(std::initializer_list<std::size_t> shape) {
    std::size_t count = 1;
    for (std::size_t extent : shape) count *= extent;
    T* data = new T[count];
    return Output<T, Shape>(data, shape, nb::capsule(data, [](void* memory) noexcept { delete[] static_cast<T*>(memory); }));
}

Encoding encoding_of(const std::string& name) {
    static const std::map<std::string, Encoding> names = {{"f32", Encoding::f32}, {"f16", Encoding::f16},
                                                          {"bf16", Encoding::bf16}, {"q4", Encoding::q4},
                                                          {"q8", Encoding::q8}};
    const auto found = names.find(name);
    require(found != names.end(), "there is no such encoding");
    return found->second;
}

Gate gate_of(const std::string& name) {
    require(name == "silu" || name == "gelu_tanh", "there is no such gate");
    return name == "silu" ? Gate::silu : Gate::gelu_tanh;
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
    return names;
}

// ---------------------------------------------------------------- matrices

template <class T>
void put_numbers(Matrix& matrix, std::size_t first, const Table<T>& rows) {
    const bool wide = matrix.panels().format.encoding == Encoding::f32;
    require(rows.shape(1) == matrix.panels().in && wide == (sizeof(T) == 4), "these rows do not fit the matrix");
    matrix.put_numbers(first, rows.shape(0), rows.data());
}

void put_groups(Matrix& matrix, std::size_t first, const Table<std::uint8_t>& codes, const Table<float>& scales,
                std::optional<Table<float>> minima) {
    const Panels& panels = matrix.panels();
    const std::size_t rows = codes.shape(0), groups = panels.in / kGroup;
    require(codes.shape(1) == panels.in, "these rows do not fit the matrix");
    require(scales.shape(0) == rows && scales.shape(1) == groups * panels.format.splits, "these scales do not fit the matrix");
    require(!minima || (minima->shape(0) == rows && minima->shape(1) == groups), "these minima do not fit the matrix");
    matrix.put_groups(first, rows, codes.data(), scales.data(), minima ? minima->data() : nullptr);
}

Output<float, nb::ndim<2>> read_matrix(const Matrix& matrix) {
    auto out = fresh<float, nb::ndim<2>>({matrix.panels().out, matrix.panels().in});
    for (std::size_t row = 0; row < matrix.panels().out; ++row) matrix.read(row, out.data() + row * matrix.panels().in);
    return out;
}

// ---------------------------------------------------------------- programs

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scales = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct PagesShape {
    std::size_t layers, kv_heads, page_count, page_size, head_dim;
};

KvKind kv_kind_of(const std::string& name) {
    static const std::map<std::string, KvKind> names = {{"f32", KvKind::f32}, {"bf16", KvKind::bf16}, {"int8", KvKind::i8}};
    const auto found = names.find(name);
    require(found != names.end(), "there are no such pages");
    return found->second;
}

// Keeps the memory of the pages alive as long as the program.
class Model {
public:
    Model(Bytes pages, Scales scales, const std::string& kind, const PagesShape& shape, std::size_t threads,
          const std::string& isa)
        : pages_(pages), scales_(scales), program(checked(pages, scales, kv_kind_of(kind), shape), threads, choose_kernels(isa)) {}

private:
    static Pages checked(const Bytes& bytes, const Scales& scales, KvKind kind, const PagesShape& shape) {
        const Pages pages{bytes.data(), kind == KvKind::i8 ? scales.data() : nullptr, kind, shape.layers, shape.kv_heads,
                          shape.page_count, shape.page_size, shape.head_dim};
        const std::size_t count = shape.layers * 2 * shape.kv_heads * shape.page_count;
        require(bytes.shape(0) == pages.numbers() * kv_bytes(kind), "these bytes are not these pages");
        require(kind != KvKind::i8 || scales.shape(0) == count * shape.page_size, "these scales are not these pages'");
        return pages;
    }

    Bytes pages_;
    Scales scales_;

public:
    Program program;
};

// A field of a record. Arrays are never converted: what Python writes into them later must be seen here.
template <class Field>
Field column(nb::handle record, const char* name) {
    Field field;
    if (!nb::try_cast(record.attr(name), field, false)) {
        throw nb::type_error((std::string(name) + " is not of the right type, or not contiguous").c_str());
    }
    return field;
}

template <class T>
std::span<const T> span(const Vector<T>& array) {
    return {array.data(), array.shape(0)};
}

class Batch {  // `ops.batch.Batch`
public:
    explicit Batch(nb::handle batch)
        : tokens(column<Vector<std::int64_t>>(batch, "tokens")),
          positions(column<Vector<std::int64_t>>(batch, "positions")),
          row_offsets(column<Vector<std::int64_t>>(batch, "row_offsets")),
          page_tables(column<Table<std::int64_t>>(batch, "page_tables")) {
        require(tokens.shape(0) == positions.shape(0) && row_offsets.shape(0) == page_tables.shape(0) + 1,
                "the arrays of a step do not fit each other");
    }

    Step step() const {
        return {tokens.data(), positions.data(), tokens.shape(0), row_offsets.data(), page_tables.shape(0),
                page_tables.data(), page_tables.shape(1)};
    }

private:
    Vector<std::int64_t> tokens, positions, row_offsets;
    Table<std::int64_t> page_tables;
};

Output<float, nb::ndim<2>> forward(Model& model, nb::handle arrays) {
    const Batch batch(arrays);
    const Step step = batch.step();
    auto hidden = fresh<float, nb::ndim<2>>({step.token_count, model.program.hidden_width()});
    const nb::gil_scoped_release unlocked;
    model.program.forward(step, hidden.data());
    return hidden;
}

Output<float, nb::ndim<2>> logits(Model& model, const Table<float>& hidden) {
    require(hidden.shape(1) == model.program.hidden_width(), "these are not hidden rows of this model");
    auto out = fresh<float, nb::ndim<2>>({hidden.shape(0), model.program.vocab_size()});
    const nb::gil_scoped_release unlocked;
    model.program.logits(hidden.data(), hidden.shape(0), out.data());
    return out;
}

// ---------------------------------------------------------------- whole steps

template <class T>
struct Ragged {  // `ops.batch.Ragged`
    Vector<std::int64_t> offsets;
    Vector<T> values;

    Ragged(nb::handle columns, const char* name, std::size_t rows)
        : offsets(column<Vector<std::int64_t>>(columns.attr(name), "offsets")),
          values(column<Vector<T>>(columns.attr(name), "values")) {
        bool fits = offsets.shape(0) == rows + 1 && offsets.data()[0] == 0;
        for (std::size_t i = 0; fits && i < rows; ++i) fits = offsets.data()[i] <= offsets.data()[i + 1];
        require(fits && offsets.data()[rows] == static_cast<std::int64_t>(values.shape(0)), "a ragged column does not fit");
    }

    std::span<const T> operator[](std::size_t row) const {
        return {values.data() + offsets.data()[row], values.data() + offsets.data()[row + 1]};
    }
};

// Rows that read from the arrays of `ops.batch.SamplingColumns`, which are kept alive with them.
class Columns {
public:
    Columns(nb::handle columns, std::size_t rows)
        : limit(column<std::size_t>(columns, "token_limit")),
          known_(columns, "known", rows),
          bias_ids_(columns, "bias_ids", rows),
          forbidden_(columns, "forbidden", rows),
          bias_values_(columns, "bias_values", rows),
          mask_(columns, "mask", rows),
          rows(rows) {
        put<double>(columns, "temperature", &Sampling::temperature);
        put<double>(columns, "top_p", &Sampling::top_p);
        put<double>(columns, "min_p", &Sampling::min_p);
        put<double>(columns, "repetition_penalty", &Sampling::repetition_penalty);
        put<double>(columns, "presence_penalty", &Sampling::presence_penalty);
        put<double>(columns, "frequency_penalty", &Sampling::frequency_penalty);
        put<std::int64_t>(columns, "top_k", &Sampling::top_k);
        put<std::int64_t>(columns, "logprobs", &Sampling::logprobs);
        put<std::int64_t>(columns, "prompt_count", &Sampling::prompt_count);
        put<std::int64_t>(columns, "position", &Sampling::position);
        put<std::uint64_t>(columns, "seed", &Sampling::seed);
        for (std::size_t i = 0; i < rows; ++i) {
            Sampling& row = this->rows[i];
            row.known = known_[i], row.forbidden = forbidden_[i], row.mask = mask_[i];
            row.bias_ids = bias_ids_[i], row.bias_values = bias_values_[i];
            require(row.bias_ids.size() == row.bias_values.size(), "biases do not fit their ids");
            require(row.mask.empty() || row.mask.size() * 32 >= limit, "a mask is too short");
            for (const auto& ids : {row.bias_ids, row.forbidden}) {
                for (std::int64_t id : ids) require(id >= 0 && static_cast<std::size_t>(id) < limit, "there is no such id");
            }
        }
    }

    std::size_t limit;

private:
    template <class T>
    void put(nb::handle columns, const char* name, T Sampling::*field) {
        const auto values = column<Vector<T>>(columns, name);
        require(values.shape(0) == rows.size(), "the columns are not equally long");
        for (std::size_t i = 0; i < rows.size(); ++i) rows[i].*field = values.data()[i];
    }

    Ragged<std::int64_t> known_, bias_ids_, forbidden_;
    Ragged<float> bias_values_;
    Ragged<std::uint32_t> mask_;

public:
    std::vector<Sampling> rows;
};

// The arrays of `ops.batch.Choices`.
nb::tuple told(const std::vector<Choice>& choices) {
    std::size_t widest = 0;
    for (const Choice& choice : choices) widest = std::max(widest, choice.top.size());
    auto tokens = fresh<std::int64_t, nb::ndim<1>>({choices.size()});
    auto logprobs = fresh<double, nb::ndim<1>>({choices.size()});
    auto top_tokens = fresh<std::int64_t, nb::ndim<2>>({choices.size(), widest});
    auto top_logprobs = fresh<double, nb::ndim<2>>({choices.size(), widest});
    for (std::size_t row = 0; row < choices.size(); ++row) {
        const Choice& choice = choices[row];
        tokens.data()[row] = choice.token;
        logprobs.data()[row] = choice.logprob;
        for (std::size_t i = 0; i < widest; ++i) {
            const bool is = i < choice.top.size();
            top_tokens.data()[row * widest + i] = is ? choice.top[i].id : -1;
            top_logprobs.data()[row * widest + i] = is ? choice.top[i].value : std::numeric_limits<double>::quiet_NaN();
        }
    }
    return nb::make_tuple(tokens, logprobs, top_tokens, top_logprobs);
}

// A whole step. All of its arrays have been looked at before it is run: that may be done while another one runs.
class Prepared {
public:
    Prepared(Model& model, nb::handle batch, nb::handle columns, nb::handle scored)
        : model_(model),
          batch_(batch),
          row_(column<Vector<std::int64_t>>(columns, "row")),
          place_(column<Vector<std::int64_t>>(scored, "place")),
          token_(column<Vector<std::int64_t>>(scored, "token")),
          top_(column<Vector<std::int64_t>>(scored, "top")),
          columns_(columns, row_.shape(0)) {}

    // The arrays of `ops.batch.Outcome`.
    nb::tuple run() {
        const Step step = batch_.step();
        Outcome outcome;
        {
            const nb::gil_scoped_release unlocked;
            outcome = model_.program.run(
                step, {columns_.limit, span(row_), columns_.rows, span(place_), span(token_), span(top_)});
        }
        auto finite = fresh<bool, nb::ndim<1>>({step.row_count});
        std::copy(outcome.finite.begin(), outcome.finite.end(), finite.data());
        return nb::make_tuple(finite, told(outcome.choices), told(outcome.scores));
    }

private:
    Model& model_;
    Batch batch_;
    Vector<std::int64_t> row_, place_, token_, top_;
    Columns columns_;
};

void add_linear(Model& model, std::size_t x, const std::vector<std::shared_ptr<Matrix>>& weights,
                const std::vector<std::optional<Vector<float>>>& biases, const std::vector<std::size_t>& outs, bool add) {
    require(weights.size() == outs.size() && biases.size() == outs.size(), "parts of a linear operator do not fit");
    std::vector<Part> parts;
    for (std::size_t i = 0; i < outs.size(); ++i) {
        parts.push_back({weights[i], biases[i] ? copied(*biases[i]) : std::vector<float>{}, outs[i], add});
    }
    model.program.linear(x, std::move(parts));
}

// ---------------------------------------------------------------- single kernels, for tests

Output<float, nb::ndim<2>> linear_alone(const std::string& isa, std::shared_ptr<Matrix> matrix, const Table<float>& x) {
    const Kernels& kernels = *choose_kernels(isa);
    const Panels& panels = matrix->panels();
    const std::size_t rows = x.shape(0), groups = panels.in / kGroup;
    require(x.shape(1) == panels.in, "these rows do not fit the matrix");
    std::vector<std::int8_t> codes(rows * panels.in);
    std::vector<float> scales(rows * groups), sums(rows * groups);
    for (std::size_t row = 0; panels.format.grouped() && row < rows; ++row) {
        kernels.quantize(x.data() + row * panels.in, panels.in, &codes[row * panels.in], &scales[row * groups],
                         &sums[row * groups]);
    }
    auto out = fresh<float, nb::ndim<2>>({rows, panels.out});
    kernels.linear({&panels, nullptr, Gate::none, 0, panels.count(), 0, rows,
                    {x.data(), codes.data(), scales.data(), sums.data(), panels.in}, out.data(), panels.out, nullptr, false});
    return out;
}

nb::tuple quantize_alone(const std::string& isa, const Vector<float>& x) {
    const std::size_t width = x.shape(0);
    require(width % kGroup == 0, "not whole groups");
    auto codes = fresh<std::int8_t, nb::ndim<1>>({width});
    auto scales = fresh<float, nb::ndim<1>>({width / kGroup}), sums = fresh<float, nb::ndim<1>>({width / kGroup});
    choose_kernels(isa)->quantize(x.data(), width, codes.data(), scales.data(), sums.data());
    return nb::make_tuple(codes, scales, sums);
}

Output<float, nb::ndim<1>> gate_alone(const std::string& isa, const std::string& kind, const Vector<float>& gate,
                                      const Vector<float>& up) {
    require(gate.shape(0) == up.shape(0), "gate and up are not equally wide");
    auto out = fresh<float, nb::ndim<1>>({gate.shape(0)});
    choose_kernels(isa)->gate(gate_of(kind), gate.data(), up.data(), gate.shape(0), out.data());
    return out;
}

Output<float, nb::ndim<1>> norm_alone(const std::string& isa, const Vector<float>& x, const Vector<float>& weight, float eps) {
    const std::size_t width = x.shape(0), group = weight.shape(0);
    require(group > 0 && width % group == 0, "the norm does not fit");
    auto out = fresh<float, nb::ndim<1>>({width});
    choose_kernels(isa)->norm(x.data(), weight.data(), width, group, eps, out.data());
    return out;
}

nb::tuple sample_alone(const Table<float>& logits, nb::handle columns) {
    const Columns how(columns, logits.shape(0));
    require(how.limit <= logits.shape(1), "there are no such ids");
    Sampler sampler;
    std::vector<Choice> choices;
    std::vector<float> row(how.limit);
    for (std::size_t i = 0; i < how.rows.size(); ++i) {
        std::copy_n(logits.data() + i * logits.shape(1), how.limit, row.data());
        choices.push_back(sampler.choose(row.data(), how.limit, how.rows[i]));
    }
    return told(choices);
}

std::int64_t argmax_alone(const std::string& isa, const Vector<float>& x) {
    require(x.shape(0) > 0, "nothing to choose from");
    return choose_kernels(isa)->argmax(x.data(), x.shape(0));
}

template <auto Multiply>
std::uint64_t multiply_alone(const std::string& isa, std::size_t rounds) {
    const Kernels* kernels = choose_kernels(isa);
    const nb::gil_scoped_release unlocked;
    return (kernels->*Multiply)(rounds);
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Native kernels. `ops.native` is their Python face.";
    module.def("isas", &isas, "Names of the kernels that this processor can run, best first.");
    module.def("linear", &linear_alone, "isa"_a, "matrix"_a, "x"_a);
    module.def("quantize", &quantize_alone, "isa"_a, "x"_a);
    module.def("gate", &gate_alone, "isa"_a, "kind"_a, "gate"_a, "up"_a);
    module.def("norm", &norm_alone, "isa"_a, "x"_a, "weight"_a, "eps"_a);
    module.def("argmax", &argmax_alone, "isa"_a, "x"_a);
    module.def("sample", &sample_alone, "logits"_a, "columns"_a);
    module.def("multiply_bytes", &multiply_alone<&Kernels::multiply_bytes>, "isa"_a, "rounds"_a,
               "Multiply-adds of bytes, as fast as this thread can; returns their number. Does not hold the lock.");
    module.def("multiply_pages", &multiply_alone<&Kernels::multiply_pages>, "isa"_a, "rounds"_a,
               "The same with numbers of bf16 pages.");

    nb::class_<Matrix>(module, "Matrix")
        .def("__init__",
             [](Matrix* self, const std::string& encoding, std::size_t out, std::size_t in, bool half, bool minima,
                std::size_t splits) { new (self) Matrix({encoding_of(encoding), half, minima, splits}, out, in); },
             "encoding"_a, "out"_a, "in_"_a, "half"_a = false, "minima"_a = false, "splits"_a = 1)
        .def("put_numbers", &put_numbers<float>, "first"_a, "rows"_a)
        .def("put_bits", &put_numbers<std::uint16_t>, "first"_a, "rows"_a)
        .def("put_groups", &put_groups, "first"_a, "codes"_a, "scales"_a, "minima"_a.none())
        .def("read", &read_matrix)
        .def_prop_ro("nbytes", &Matrix::bytes);

    nb::class_<Prepared>(module, "Step").def("run", &Prepared::run, "Does not hold the lock.");

    nb::class_<Model>(module, "Program")
        .def("__init__",
             [](Model* self, Bytes pages, Scales scales, const std::string& kind, std::size_t layers, std::size_t kv_heads,
                std::size_t page_count, std::size_t page_size, std::size_t head_dim, std::size_t threads, const std::string& isa) {
                 new (self) Model(pages, scales, kind, {layers, kv_heads, page_count, page_size, head_dim}, threads, isa);
             },
             "pages"_a, "scales"_a, "kind"_a, "layers"_a, "kv_heads"_a, "page_count"_a, "page_size"_a, "head_dim"_a, "threads"_a,
             "isa"_a)
        .def("embed", [](Model& model, std::size_t out, std::shared_ptr<Matrix> table) { model.program.embed(out, table); },
             "out"_a, "table"_a)
        .def("norm",
             [](Model& model, std::size_t out, std::size_t x, const Vector<float>& weight, std::size_t width, float eps) {
                 model.program.norm(out, x, copied(weight), width, eps);
             },
             "out"_a, "x"_a, "weight"_a, "width"_a, "eps"_a)
        .def("linear", &add_linear, "x"_a, "weights"_a, "biases"_a, "outs"_a, "add"_a)
        .def("gated_linear",
             [](Model& model, std::size_t out, std::size_t x, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up,
                const std::string& kind) { model.program.gated_linear(out, x, gate, up, gate_of(kind)); },
             "out"_a, "x"_a, "gate"_a, "up"_a, "kind"_a)
        .def("rotate",
             [](Model& model, std::size_t out, std::size_t x, std::size_t head_dim, std::vector<double> frequencies,
                bool interleaved, double magnitude) {
                 model.program.rotate(out, x, {head_dim, std::move(frequencies), interleaved, magnitude});
             },
             "out"_a, "x"_a, "head_dim"_a, "frequencies"_a, "interleaved"_a, "magnitude"_a)
        .def("attend",
             [](Model& model, std::size_t out, std::size_t q, std::size_t k, std::size_t v, std::size_t layer, std::size_t heads,
                std::size_t kv_heads, std::size_t head_dim, float scale, std::int64_t window) {
                 model.program.attend(out, q, k, v, {layer, heads, kv_heads, head_dim, scale, window});
             },
             "out"_a, "q"_a, "k"_a, "v"_a, "layer"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a)
        .def("gate",
             [](Model& model, std::size_t out, std::size_t gate, std::size_t up, const std::string& kind) {
                 model.program.gate(out, gate, up, gate_of(kind));
             },
             "out"_a, "gate"_a, "up"_a, "kind"_a)
        .def("add", [](Model& model, std::size_t out, std::size_t a, std::size_t b) { model.program.add(out, a, b); }, "out"_a,
             "a"_a, "b"_a)
        .def("head", [](Model& model, std::size_t x, std::shared_ptr<Matrix> weight) { model.program.head(x, weight); }, "x"_a,
             "weight"_a)
        .def("prepare",
             [](Model& model, nb::handle batch, nb::handle columns, nb::handle scored) {
                 return std::make_unique<Prepared>(model, batch, columns, scored);
             },
             "batch"_a, "columns"_a, "scored"_a, nb::keep_alive<0, 1>())
        .def("forward", &forward, "batch"_a)
        .def("logits", &logits, "hidden"_a)
        .def("take_times", [](Model& model) { return model.program.take_times(); })
        .def_prop_ro("isa", [](const Model& model) { return std::string(model.program.isa()); });
}

}  // namespace branchline
