// A model as a straight line of closures over values, run once per step by all threads.
//
// Knows: order, memory of values, how work is cut into tasks. Refuses to know: how a kernel computes, Python, file formats.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "pool.h"
#include "sample.h"

namespace branchline {

// Keys and values: [layer][keys, values][kv_head][page][position][head_dim].
struct Pages {
    float* data;
    std::size_t layers, kv_heads, page_count, page_size, head_dim;

    float* at(std::size_t layer, std::size_t values, std::size_t kv_head) const {
        return data + ((layer * 2 + values) * kv_heads + kv_head) * page_count * page_size * head_dim;
    }
};

// One step: flat arrays as in `ops.batch.Batch`.
struct Step {
    const std::int64_t* tokens;
    const std::int64_t* positions;
    std::size_t token_count;
    const std::int64_t* row_offsets;
    std::size_t row_count;
    const std::int64_t* page_tables;
    std::size_t table_width;
};

struct Part {  // of a joined linear operator
    std::shared_ptr<Matrix> weight;
    std::vector<float> bias;  // empty: none
    std::size_t out;
    bool add;
};

struct Heads {
    std::size_t layer, heads, kv_heads, head_dim;
    float scale;
    std::int64_t window;  // 0: none
};

struct Turns {  // rotary embedding
    std::size_t head_dim;
    std::vector<double> frequencies;
    bool interleaved;
    double magnitude;
};

class Program {
public:
    Program(Pages pages, std::size_t threads, const Kernels* kernels);

    // Values are numbered by the caller; a value has one width.
    void embed(std::size_t out, std::shared_ptr<Matrix> table);
    void norm(std::size_t out, std::size_t x, std::vector<float> weight, std::size_t width, float eps);
    void linear(std::size_t x, std::vector<Part> parts);
    void gated_linear(std::size_t out, std::size_t x, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up, Gate kind);
    void rotate(std::size_t out, std::size_t x, const Turns& turns);
    void attend(std::size_t out, std::size_t q, std::size_t k, std::size_t v, Heads heads);
    void gate(std::size_t out, std::size_t gate, std::size_t up, Gate kind);
    void add(std::size_t out, std::size_t a, std::size_t b);
    void head(std::size_t x, std::shared_ptr<Matrix> weight);

    // Raises std::invalid_argument if the step names a token or a page that does not exist. `hidden`: [tokens, hidden_width].
    void forward(const Step& step, float* hidden);
    void logits(const float* hidden, std::size_t rows, float* out);
    // A choice among ids below `limit` for each row of `hidden`.
    std::vector<Choice> sample(const float* hidden, const std::vector<Sampling>& rows, std::size_t limit);
    // Log probabilities of a given token, and of the `top` most likely ones, for each row of `hidden`.
    std::vector<Choice> score(const float* hidden, const std::int64_t* tokens, std::size_t rows, std::size_t top,
                              std::size_t limit);

    // Nanoseconds since the last call, by kind of operator; the first call begins to watch.
    std::map<std::string, double> take_times();

    std::size_t hidden_width() const { return head_->panels().in; }
    std::size_t vocab_size() const { return head_->panels().out; }
    const char* isa() const { return kernels_->name; }

private:
    struct Value {
        std::size_t width = 0;
        std::vector<float> x;
        // The same as bytes, where a grouped linear operator reads it.
        std::vector<std::int8_t> codes;
        std::vector<float> scales, sums;
        bool grouped = false;
        bool fresh = false;  // while the program is built: the bytes belong to the numbers

        float* row(std::size_t index) { return x.data() + index * width; }
        Rows rows() const { return {x.data(), codes.data(), scales.data(), sums.data(), width}; }
        void reserve(std::size_t tokens);
    };
    struct Tile {  // of queries of one row
        std::size_t row, token, count;
    };
    struct RopeTable {
        Turns turns;
        std::vector<float> cos, sin;  // [position][half]
        void reserve(std::size_t positions);
    };

    struct Op {
        const char* kind;
        std::function<void()> run;
    };

    void add_op(const char* kind, std::function<void()> run);
    template <class Run>
    void timed(const char* kind, const Run& run);
    void choose(const float* hidden, std::size_t rows, std::size_t limit, std::int64_t* out);
    template <class Visit>
    void each_logits(const float* hidden, std::size_t rows, std::size_t limit, const char* kind, Visit visit);
    Value& define(std::size_t index, std::size_t width);
    void need_groups(std::size_t index, const Matrix& weight);
    template <class Visit>
    void each_token(std::size_t numbers_per_token, Visit visit);
    void cut(const LinearTask& whole);
    void run_tasks();
    void check(const Step& step) const;
    void make_tiles(const Step& step);
    void write_pages(Value& k, Value& v, const Heads& heads);
    void run_attention(Value& out, Value& q, const Heads& heads);
    Rows head_rows(const float* hidden, std::size_t rows);

    Pages pages_;
    const Kernels* kernels_;
    std::vector<std::unique_ptr<Value>> values_;
    std::vector<std::unique_ptr<RopeTable>> ropes_;
    std::vector<Op> ops_;
    bool watched_ = false;
    std::map<std::string, double> taken_ns_;
    std::shared_ptr<Matrix> embedding_, head_;
    std::size_t head_value_ = 0;
    Value head_input_;
    std::vector<float> slab_;        // logits of some rows
    std::vector<Sampler> samplers_;  // one for each thread
    const Step* step_ = nullptr;
    std::vector<Tile> tiles_;
    std::vector<std::size_t> places_;  // of each token of the step: page * page_size + offset
    std::vector<LinearTask> tasks_;
    Pool pool_;
};

}  // namespace branchline
