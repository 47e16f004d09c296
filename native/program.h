// A model as a straight line of closures over values, run once per step by all threads.
//
// Knows: order, memory of values, how work is cut into tasks. Refuses to know: how a kernel computes, Python, file formats.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "pool.h"
#include "sample.h"

namespace branchline {

// Where keys and values live: [layer][page][kv_head][keys, values], as `KvHead` says. `scales`, only of i8:
// [layer][page][kv_head][keys, values][position].
struct Pages {
    std::uint8_t* data;
    float* scales;
    KvKind kind;
    std::size_t layers, kv_heads, page_count, page_size, head_dim;

    std::size_t records() const { return 2 * kv_heads; }
    std::size_t numbers() const { return layers * page_count * records() * kv_page(head_dim, page_size); }
    std::uint8_t* at(std::size_t layer, std::size_t page, std::size_t record) const {
        return data + index(layer, page, record) * kv_page(head_dim, page_size) * kv_bytes(kind);
    }
    float* scales_at(std::size_t layer, std::size_t page, std::size_t record) const {
        return scales ? scales + index(layer, page, record) * page_size : nullptr;
    }
    KvHead head(std::size_t layer, std::size_t kv_head) const {
        const std::size_t keys = 2 * kv_head, values = keys + 1;
        return {at(layer, 0, keys), at(layer, 0, values), scales_at(layer, 0, keys), scales_at(layer, 0, values), records()};
    }
    // Store key and value of one position (`place`: page * page_size + offset), rounded to the nearest number there is.
    void write(std::size_t layer, std::size_t kv_head, std::size_t place, const float* key, const float* value) const;

private:
    std::size_t index(std::size_t layer, std::size_t page, std::size_t record) const {
        return (layer * page_count + page) * records() + record;
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

// What is asked of a step: columns as in `ops.batch.SamplingColumns` and `ops.batch.Scored`.
struct Asked {
    std::size_t limit;                     // ids below it can be chosen
    std::span<const std::int64_t> rows;    // after each of these comes a new token
    std::span<const Sampling> samplings;   // one for each
    std::span<const std::int64_t> places;  // after each of these tokens of the step
    std::span<const std::int64_t> tokens;  // such a token is scored
    std::span<const std::int64_t> tops;    // beside so many of the most likely ones
};

struct Outcome {
    std::vector<std::uint8_t> finite;      // of each row of the step: all that was computed for it is a number
    std::vector<Choice> choices, scores;
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

    // Raises std::invalid_argument if the step names a token or a page that does not exist, or the questions a row, a token
    // or an id that does not exist.
    Outcome run(const Step& step, const Asked& asked);

    // To look inside. `hidden`: what the head reads, [tokens, hidden_width].
    void forward(const Step& step, float* hidden);
    void logits(const float* hidden, std::size_t rows, float* out);

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
    struct Tile {  // tokens that walk through the same blocks of the same pages together
        std::size_t row;           // whose page table is read
        std::size_t begin, count;  // in `walkers_`
        std::size_t block_begin, block_end;
        bool first, last;
    };
    struct RopeTable {
        Turns turns;
        std::vector<float> cos, sin;  // [position][half]
        void reserve(std::size_t positions);
    };

    struct Op {
        const char* kind;
        std::function<void()> run;                   // for the whole step, or
        std::size_t numbers;                         // so many for each token, by
        std::function<void(std::size_t)> run_token;  // which no other token depends on
    };

    void add_op(const char* kind, std::function<void()> run);
    void add_token_op(const char* kind, std::size_t numbers, std::function<void(std::size_t)> run);
    void run_ops();
    template <class Run>
    void timed(const char* kind, const Run& run);
    void compute(const Step& step);
    std::vector<std::uint8_t> finite_rows(const Step& step);
    std::vector<Choice> sample(const Step& step, const Asked& asked);
    std::vector<Choice> score(const Asked& asked);
    void choose(std::span<const std::size_t> places, std::size_t limit, std::int64_t* out);
    template <class Visit>
    void each_logits(std::span<const std::size_t> places, std::size_t limit, const char* kind, Visit visit);
    Value& define(std::size_t index, std::size_t width);
    void need_groups(std::size_t index, const Matrix& weight);
    template <class Visit>
    void each_token(std::size_t numbers_per_token, Visit visit);
    void cut(const LinearTask& whole);
    void run_tasks();
    void check(const Step& step) const;
    void check(const Step& step, const Asked& asked) const;
    void make_tiles(const Step& step);
    void add_tiles(std::vector<Tile>& tiles, Tile of) const;
    bool share_block(const Step& step, std::size_t one, std::size_t other, std::size_t block) const;
    void share_blocks(const Step& step, std::size_t begin, std::size_t end, std::size_t block, std::size_t depth);
    void run_attention(Value& out, Value& q, const Heads& heads);
    void attend_tile(const Tile& tile, Value& out, Value& q, const Heads& heads, std::size_t head, std::size_t count,
                     const KvHead* then);
    Rows head_rows(const float* hidden, std::span<const std::size_t> places);
    const float* hidden() const { return values_[head_value_]->x.data(); }

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
    std::vector<std::size_t> walkers_;          // tokens, in the order in which tiles name them
    std::vector<std::vector<Tile>> phases_;     // shared blocks, outermost first; then what each row sees alone
    bool windowed_ = false;                     // some layer has a window
    std::vector<Tile> unshared_;                // everything in one phase, for such layers
    std::vector<std::size_t> sharing_;          // rows of one token, neighbours have the same first pages
    std::vector<std::size_t> alone_from_;       // of each row: the first block that it walks through alone
    std::vector<std::size_t> places_;           // of each token of the step: page * page_size + offset
    std::size_t state_numbers_ = 0;             // of one token of the widest layer
    std::vector<float> states_;                 // of each query of a layer, see `Query`
    std::vector<LinearTask> tasks_;
    Pool pool_;
};

}  // namespace branchline
