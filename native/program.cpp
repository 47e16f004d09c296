#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "half.h"

namespace branchline {
namespace {

constexpr std::size_t kQueryTile = 8;             // tokens that walk through the keys together
constexpr std::size_t kHeadTile = kMostQueries / kQueryTile;  // heads of a token that do
constexpr std::size_t kEveryBlock = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kSerialNumbers = 16384;     // below this many numbers waking others costs more than it saves
constexpr std::size_t kRowBytes = 192 * 1024;     // inputs of a linear task: they stay in the second cache
constexpr std::size_t kTasksPerThread = 4;
constexpr std::size_t kPanelStep = 4;            // the most panels that a kernel computes side by side
constexpr std::size_t kHeadChannels = 1024;       // logits of a task of the greedy head
constexpr std::size_t kSlabRows = 32;             // whose logits exist at the same time

std::size_t over(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

void require(bool truth, const char* message) {
    if (!truth) throw std::invalid_argument(message);
}

}  // namespace

// ---------------------------------------------------------------- building

Program::Program(Pages pages, std::size_t threads, const Kernels* kernels)
    : pages_(pages), kernels_(kernels), samplers_(std::max<std::size_t>(1, threads)), pool_(samplers_.size()) {}

void Program::Value::reserve(std::size_t tokens) {
    if (x.size() < tokens * width) x.resize(tokens * width);
    if (!grouped || codes.size() >= tokens * width) return;
    codes.resize(tokens * width);
    scales.resize(tokens * width / kGroup);
    sums.resize(tokens * width / kGroup);
}

Program::Value& Program::define(std::size_t index, std::size_t width) {
    if (index >= values_.size()) values_.resize(index + 1);
    if (!values_[index]) values_[index] = std::make_unique<Value>();
    Value& value = *values_[index];
    require(value.width == 0 || value.width == width, "a value has two widths");
    value.width = width;
    value.fresh = false;
    return value;
}

void Program::add_op(const char* kind, std::function<void()> run) { ops_.push_back({kind, std::move(run), 0, {}}); }

void Program::add_token_op(const char* kind, std::size_t numbers, std::function<void(std::size_t)> run) {
    ops_.push_back({kind, {}, numbers, std::move(run)});
}

// Small steps are done by the caller alone: for them a barrier is the greater cost.
template <class Visit>
void Program::each_token(std::size_t numbers_per_token, Visit visit) {
    const std::size_t count = step_->token_count;
    if (count * numbers_per_token < kSerialNumbers) {
        for (std::size_t token = 0; token < count; ++token) visit(token);
        return;
    }
    const std::size_t tasks = std::min(count, pool_.threads() * kTasksPerThread);
    pool_.run(tasks, [&](std::size_t task) {
        for (std::size_t token = count * task / tasks; token < count * (task + 1) / tasks; ++token) visit(token);
    });
}

void Program::need_groups(std::size_t index, const Matrix& weight) {
    Value& value = *values_.at(index);
    require(value.width == weight.panels().in, "a matrix has not as many inputs as its operand is wide");
    if (!weight.panels().format.grouped() || value.fresh) return;
    value.grouped = value.fresh = true;
    add_token_op("Quantize", value.width, [this, &value](std::size_t token) {
        const std::size_t group = token * value.width / kGroup;
        kernels_->quantize(value.row(token), value.width, &value.codes[token * value.width], &value.scales[group],
                           &value.sums[group]);
    });
}

void Program::embed(std::size_t out, std::shared_ptr<Matrix> table) {
    Value& value = define(out, table->panels().in);
    embedding_ = table;
    add_token_op("Embed", value.width * 4, [this, &value, table](std::size_t token) {
        table->read(static_cast<std::size_t>(step_->tokens[token]), value.row(token));
    });
}

void Program::norm(std::size_t out, std::size_t x, std::vector<float> weight, std::size_t width, float eps) {
    Value& from = *values_.at(x);
    Value& to = define(out, from.width);
    require(width > 0 && from.width % width == 0 && weight.size() == width, "a norm does not fit its operand");
    add_token_op("Norm", to.width, [this, &from, &to, weight = std::move(weight), width, eps](std::size_t token) {
        kernels_->norm(from.row(token), weight.data(), from.width, width, eps, to.row(token));
    });
}

void Program::linear(std::size_t x, std::vector<Part> parts) {
    for (const Part& part : parts) {
        need_groups(x, *part.weight);
        const std::size_t out = part.weight->panels().out;
        require(part.bias.empty() || part.bias.size() == out, "a bias is not as wide as its matrix");
        require(part.out != x, "a linear operator cannot overwrite its operand");
        define(part.out, out);
    }
    Value& from = *values_.at(x);
    add_op("Linear", [this, &from, parts = std::move(parts)] {
        for (const Part& part : parts) {
            Value& to = *values_[part.out];
            const Panels& panels = part.weight->panels();
            cut({&panels, nullptr, Gate::none, 0, panels.count(), 0, step_->token_count, from.rows(), to.x.data(), to.width,
                 part.bias.empty() ? nullptr : part.bias.data(), part.add});
        }
        run_tasks();
    });
}

void Program::gated_linear(std::size_t out, std::size_t x, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up,
                           Gate kind) {
    require(out != x, "a linear operator cannot overwrite its operand");
    require(gate->panels().out == up->panels().out, "gate and up are not equally wide");
    need_groups(x, *gate);
    need_groups(x, *up);
    Value& from = *values_.at(x);
    Value& to = define(out, gate->panels().out);
    add_op("GatedLinear", [this, &from, &to, gate, up, kind] {
        const Panels& panels = gate->panels();
        cut({&panels, &up->panels(), kind, 0, panels.count(), 0, step_->token_count, from.rows(), to.x.data(), to.width,
             nullptr, false});
        run_tasks();
    });
}

void Program::rotate(std::size_t out, std::size_t x, const Turns& turns) {
    Value& from = *values_.at(x);
    Value& to = define(out, from.width);
    const std::size_t half = turns.frequencies.size();
    require(turns.head_dim > 0 && from.width % turns.head_dim == 0 && 2 * half <= turns.head_dim, "a rope does not fit");
    RopeTable* table = nullptr;
    for (const auto& known : ropes_) {
        const Turns& other = known->turns;
        if (other.frequencies == turns.frequencies && other.magnitude == turns.magnitude) table = known.get();
    }
    if (!table) table = ropes_.emplace_back(std::make_unique<RopeTable>(RopeTable{turns, {}, {}})).get();
    const auto turn = [this, &from, &to, table, half, head_dim = turns.head_dim, interleaved = turns.interleaved](
                          std::size_t token) {
        const std::size_t at = static_cast<std::size_t>(step_->positions[token]) * half;
        kernels_->rotate(from.row(token), table->cos.data() + at, table->sin.data() + at, from.width, head_dim, half,
                         interleaved, to.row(token));
    };
    add_token_op("Rope", to.width, turn);
}

// Angles in double: positions may be large.
void Program::RopeTable::reserve(std::size_t positions) {
    const std::size_t half = turns.frequencies.size(), known = half ? cos.size() / half : positions;
    if (known >= positions) return;
    const std::size_t wanted = std::max(positions, 2 * known);
    cos.resize(wanted * half);
    sin.resize(wanted * half);
    for (std::size_t i = known * half; i < wanted * half; ++i) {
        const double angle = static_cast<double>(i / half) * turns.frequencies[i % half];
        cos[i] = static_cast<float>(std::cos(angle) * turns.magnitude);
        sin[i] = static_cast<float>(std::sin(angle) * turns.magnitude);
    }
}

void Program::attend(std::size_t out, std::size_t q, std::size_t k, std::size_t v, Heads heads) {
    Value &queries = *values_.at(q), &keys = *values_.at(k), &values = *values_.at(v);
    require(heads.layer < pages_.layers && heads.kv_heads == pages_.kv_heads && heads.head_dim == pages_.head_dim,
            "attention does not fit the pages");
    require(heads.head_dim <= kMostDims, "heads of more than 256 numbers are not supported");
    require(heads.heads % heads.kv_heads == 0 && queries.width == heads.heads * heads.head_dim &&
                keys.width == heads.kv_heads * heads.head_dim && values.width == keys.width,
            "attention does not fit its operands");
    require(out != q, "attention cannot overwrite its queries");
    Value& to = define(out, queries.width);
    windowed_ = windowed_ || heads.window;
    state_numbers_ = std::max(state_numbers_, heads.heads * query_state(heads.head_dim));
    add_token_op("PagedAttention", 2 * keys.width, [this, &keys, &values, heads](std::size_t token) {
        for (std::size_t head = 0; head < heads.kv_heads; ++head) {
            const std::size_t from = head * heads.head_dim;
            pages_.write(heads.layer, head, places_[token], keys.row(token) + from, values.row(token) + from);
        }
    });
    add_op("PagedAttention", [this, &queries, &to, heads] { run_attention(to, queries, heads); });
}

void Program::gate(std::size_t out, std::size_t gate, std::size_t up, Gate kind) {
    Value &a = *values_.at(gate), &b = *values_.at(up);
    require(a.width == b.width, "gate and up are not equally wide");
    Value& to = define(out, a.width);
    add_token_op("GatedActivation", to.width * 4, [this, &a, &b, &to, kind](std::size_t token) {
        kernels_->gate(kind, a.row(token), b.row(token), to.width, to.row(token));
    });
}

void Program::add(std::size_t out, std::size_t a, std::size_t b) {
    Value &left = *values_.at(a), &right = *values_.at(b);
    require(left.width == right.width, "summands are not equally wide");
    Value& to = define(out, left.width);
    add_token_op("Add", to.width, [this, &left, &right, &to](std::size_t token) {
        kernels_->add(left.row(token), right.row(token), to.width, to.row(token));
    });
}

void Program::head(std::size_t x, std::shared_ptr<Matrix> weight) {
    require(values_.at(x)->width == weight->panels().in, "the head is not as wide as its operand");
    head_value_ = x;
    head_ = weight;
    head_input_.width = weight->panels().in;
    head_input_.grouped = weight->panels().format.grouped();
}

// ---------------------------------------------------------------- running

// Operators that take one token after the other are done in one pass: norm and quantize, rope and the writing of pages. Unless
// somebody watches, who wants to know of each.
void Program::run_ops() {
    for (std::size_t first = 0, behind; first < ops_.size(); first = behind) {
        behind = first + 1;
        if (ops_[first].run) {
            timed(ops_[first].kind, ops_[first].run);
            continue;
        }
        std::size_t numbers = ops_[first].numbers;
        for (; !watched_ && behind < ops_.size() && ops_[behind].run_token; ++behind) numbers += ops_[behind].numbers;
        timed(ops_[first].kind, [&] {
            each_token(numbers, [&](std::size_t token) {
                for (std::size_t i = first; i < behind; ++i) ops_[i].run_token(token);
            });
        });
    }
}

template <class Run>
void Program::timed(const char* kind, const Run& run) {
    if (!watched_) return run();
    const auto begin = std::chrono::steady_clock::now();
    run();
    taken_ns_[kind] += std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
}

std::map<std::string, double> Program::take_times() {
    watched_ = true;
    return std::exchange(taken_ns_, {});
}

Outcome Program::run(const Step& step, const Asked& asked) {
    check(step);
    check(step, asked);
    const Pool::Step awake(pool_);
    compute(step);
    return {finite_rows(step), sample(step, asked), score(asked)};
}

void Program::forward(const Step& step, float* hidden) {
    check(step);
    const Pool::Step awake(pool_);
    compute(step);
    std::memcpy(hidden, this->hidden(), step.token_count * hidden_width() * sizeof(float));
}

void Program::compute(const Step& step) {
    step_ = &step;
    for (const auto& value : values_) {
        if (value) value->reserve(step.token_count);
    }
    const std::int64_t last = *std::max_element(step.positions, step.positions + step.token_count);
    for (const auto& rope : ropes_) rope->reserve(static_cast<std::size_t>(last) + 1);
    make_tiles(step);
    if (states_.size() < step.token_count * state_numbers_) states_.resize(step.token_count * state_numbers_);
    run_ops();
}

void Program::check(const Step& step) const {
    require(head_ && embedding_, "the program has no embedding or no head");
    require(step.row_count > 0 && step.row_offsets[0] == 0, "a step without rows");
    require(step.row_offsets[step.row_count] == static_cast<std::int64_t>(step.token_count), "rows do not cover the tokens");
    const std::int64_t vocabulary = static_cast<std::int64_t>(embedding_->panels().out);
    const std::int64_t page_size = static_cast<std::int64_t>(pages_.page_size);
    for (std::size_t row = 0; row < step.row_count; ++row) {
        const std::int64_t begin = step.row_offsets[row], end = step.row_offsets[row + 1];
        require(begin < end && end <= static_cast<std::int64_t>(step.token_count), "a row without tokens");
        for (std::int64_t i = begin; i < end; ++i) {
            require(step.tokens[i] >= 0 && step.tokens[i] < vocabulary, "a token id is outside the vocabulary");
            require(step.positions[i] == step.positions[begin] + (i - begin), "positions of a row are not consecutive");
        }
        require(step.positions[begin] >= 0 && step.positions[end - 1] / page_size < static_cast<std::int64_t>(step.table_width),
                "a page table is too short");
        for (std::int64_t i = 0; i <= step.positions[end - 1] / page_size; ++i) {
            const std::int64_t page = step.page_tables[row * step.table_width + static_cast<std::size_t>(i)];
            require(page >= 0 && page < static_cast<std::int64_t>(pages_.page_count), "a page table names no page");
        }
    }
}

void Program::check(const Step& step, const Asked& asked) const {
    require(asked.limit > 0 && asked.limit <= vocab_size(), "there are no such ids");
    require(asked.rows.size() == asked.samplings.size() && asked.places.size() == asked.tokens.size() &&
                asked.places.size() == asked.tops.size(),
            "the columns of a step are not equally long");
    for (std::int64_t row : asked.rows) {
        require(row >= 0 && static_cast<std::size_t>(row) < step.row_count, "there is no such row to sample");
    }
    for (std::int64_t place : asked.places) {
        require(place >= 0 && static_cast<std::size_t>(place) < step.token_count, "there is no such position to score");
    }
    for (std::int64_t top : asked.tops) require(top >= 0, "fewer than no tokens to report");
}

// Chunks of inputs that stay in the cache, times chunks of panels, enough of them to keep every thread busy to the end.
void Program::cut(const LinearTask& whole) {
    const std::size_t rows = whole.row_end - whole.row_begin, panels = whole.panel_end - whole.panel_begin;
    const std::size_t row_bytes = whole.in.width * (whole.weight->format.grouped() ? 1 : 4);
    const std::size_t row_tasks = over(rows * row_bytes, std::max(kRowBytes, row_bytes));
    const std::size_t wanted = over(pool_.threads() * kTasksPerThread, row_tasks);
    const std::size_t panel_step = over(over(panels, wanted), kPanelStep) * kPanelStep;
    for (std::size_t r = 0; r < row_tasks; ++r) {
        for (std::size_t panel = 0; panel < panels; panel += panel_step) {
            LinearTask task = whole;
            task.row_begin = whole.row_begin + rows * r / row_tasks;
            task.row_end = whole.row_begin + rows * (r + 1) / row_tasks;
            task.panel_begin = whole.panel_begin + panel;
            task.panel_end = std::min(task.panel_begin + panel_step, whole.panel_end);
            task.out += panel * kLanes;
            tasks_.push_back(task);
        }
    }
}

// Threads take turns: each is led along a stretch of its own, where the weights are that it has fetched ahead.
void Program::run_tasks() {
    const std::size_t count = tasks_.size(), stretches = pool_.threads();
    pool_.run(count, [&](std::size_t turn) {
        const std::size_t stretch = turn % stretches;
        const std::size_t begin = stretch * (count / stretches) + std::min(stretch, count % stretches);
        kernels_->linear(tasks_[begin + turn / stretches]);
    });
    tasks_.clear();
}

// ---------------------------------------------------------------- attention

namespace {

// A scale of 0 or NaN needs no codes: all are 0 then, and what is multiplied with NaN is NaN.
float byte_scale(const float* x, std::size_t count) {
    float largest = 0.0f;
    for (std::size_t i = 0; i < count; ++i) {
        if (!std::isfinite(x[i])) return std::numeric_limits<float>::quiet_NaN();
        largest = std::max(largest, std::fabs(x[i]));
    }
    return largest / 127.0f;
}

std::int8_t to_byte(float x, float scale) {
    return scale > 0.0f ? static_cast<std::int8_t>(std::lrintf(x / scale)) : std::int8_t{0};
}

}  // namespace

void Pages::write(std::size_t layer, std::size_t kv_head, std::size_t place, const float* key, const float* value) const {
    const std::size_t page = place / page_size, offset = place % page_size, dims = kv_dims(head_dim);
    std::uint8_t *keys = at(layer, page, 2 * kv_head), *values = at(layer, page, 2 * kv_head + 1);
    const auto put = [&](const auto* key_from, const auto* value_from) {
        using Number = std::remove_cvref_t<decltype(*key_from)>;
        Number *key_to = reinterpret_cast<Number*>(keys), *value_to = reinterpret_cast<Number*>(values);
        const bool side_by_side = neighbours(kind);
        for (std::size_t d = 0; d < head_dim; ++d) {
            key_to[kv_place(side_by_side, d, offset, page_size)] = key_from[d];
            value_to[kv_place(side_by_side, offset, d, dims)] = value_from[d];
        }
        // The neighbour of the last one is multiplied with 0.
        if (head_dim % 2 == 1) key_to[kv_place(side_by_side, head_dim, offset, page_size)] = 0;
    };
    if (kind == KvKind::f32) return put(key, value);
    if (kind == KvKind::bf16) {
        std::uint16_t rounded[2][kMostDims];
        for (std::size_t d = 0; d < head_dim; ++d) rounded[0][d] = float_to_bfloat(key[d]);
        for (std::size_t d = 0; d < head_dim; ++d) rounded[1][d] = float_to_bfloat(value[d]);
        return put(rounded[0], rounded[1]);
    }
    const float key_scale = byte_scale(key, head_dim), value_scale = byte_scale(value, head_dim);
    scales_at(layer, page, 2 * kv_head)[offset] = key_scale;
    scales_at(layer, page, 2 * kv_head + 1)[offset] = value_scale;
    std::int8_t rounded[2][kMostDims];
    for (std::size_t d = 0; d < head_dim; ++d) rounded[0][d] = to_byte(key[d], key_scale);
    for (std::size_t d = 0; d < head_dim; ++d) rounded[1][d] = to_byte(value[d], value_scale);
    put(rounded[0], rounded[1]);
}

// Cut into pieces that fit the first cache with a block; the last tokens of a prompt see most and come first.
void Program::add_tiles(std::vector<Tile>& tiles, Tile of) const {
    for (std::size_t left = of.count; left > 0;) {
        Tile tile = of;
        tile.count = left % kQueryTile == 0 ? kQueryTile : left % kQueryTile;
        left -= tile.count;
        tile.begin = of.begin + left;
        tiles.push_back(tile);
    }
}

// Whether two rows of `sharing_` both see all of a block and find it in the same pages.
bool Program::share_block(const Step& step, std::size_t one, std::size_t other, std::size_t block) const {
    const auto sees_all = [&](std::size_t row) {
        return static_cast<std::size_t>(step.positions[step.row_offsets[row]] + 1) >= (block + 1) * kBlock;
    };
    const std::size_t a = sharing_[one], b = sharing_[other];
    if (!sees_all(a) || !sees_all(b)) return false;
    const std::size_t from = over(block * kBlock, pages_.page_size), to = over((block + 1) * kBlock, pages_.page_size);
    const std::int64_t *first = step.page_tables + a * step.table_width, *second = step.page_tables + b * step.table_width;
    return std::equal(first + from, first + to, second + from);
}

// Rows [begin, end) of `sharing_` have the same pages up to `block`: let those walk together that go on with the same ones,
// then the groups among them that stay together.
void Program::share_blocks(const Step& step, std::size_t begin, std::size_t end, std::size_t block, std::size_t depth) {
    for (std::size_t behind; begin < end; begin = behind) {
        const auto all_share = [&](std::size_t at) {
            for (std::size_t i = begin + 1; i < behind; ++i) {
                if (!share_block(step, begin, i, at)) return false;
            }
            return true;
        };
        behind = begin + 1;
        while (behind < end && share_block(step, begin, behind, block)) ++behind;
        if (behind - begin < 2) continue;
        std::size_t shared = block + 1;
        while (all_share(shared)) ++shared;
        if (phases_.size() <= depth + 1) phases_.insert(phases_.end() - 1, std::vector<Tile>{});
        add_tiles(phases_[depth], {sharing_[begin], walkers_.size(), behind - begin, block, shared, block == 0, false});
        for (std::size_t i = begin; i < behind; ++i) {
            walkers_.push_back(static_cast<std::size_t>(step.row_offsets[sharing_[i]]));
            alone_from_[sharing_[i]] = shared;
        }
        share_blocks(step, begin, behind, shared, depth + 1);
    }
}

void Program::make_tiles(const Step& step) {
    walkers_.clear();
    phases_.assign(1, {});
    unshared_.clear();
    sharing_.clear();
    places_.clear();
    alone_from_.assign(step.row_count, 0);
    for (std::size_t token = 0; token < step.token_count; ++token) walkers_.push_back(token);
    for (std::size_t row = 0; row < step.row_count; ++row) {
        const std::size_t begin = static_cast<std::size_t>(step.row_offsets[row]);
        const std::size_t end = static_cast<std::size_t>(step.row_offsets[row + 1]);
        if (end - begin == 1 && static_cast<std::size_t>(step.positions[begin]) + 1 >= kBlock) sharing_.push_back(row);
        for (std::size_t token = begin; token < end; ++token) {
            const std::size_t position = static_cast<std::size_t>(step.positions[token]);
            const std::int64_t page = step.page_tables[row * step.table_width + position / pages_.page_size];
            places_.push_back(static_cast<std::size_t>(page) * pages_.page_size + position % pages_.page_size);
        }
    }
    const auto table = [&](std::size_t row) { return step.page_tables + row * step.table_width; };
    std::stable_sort(sharing_.begin(), sharing_.end(), [&](std::size_t a, std::size_t b) {
        return std::lexicographical_compare(table(a), table(a) + step.table_width, table(b), table(b) + step.table_width);
    });
    share_blocks(step, 0, sharing_.size(), 0, 0);
    for (std::size_t row = 0; row < step.row_count; ++row) {
        const std::size_t begin = static_cast<std::size_t>(step.row_offsets[row]);
        const std::size_t end = static_cast<std::size_t>(step.row_offsets[row + 1]);
        const Tile all{row, begin, end - begin, 0, kEveryBlock, true, true};
        if (windowed_) add_tiles(unshared_, all);
        Tile rest = all;
        rest.block_begin = alone_from_[row];
        rest.first = rest.block_begin == 0;
        add_tiles(phases_.back(), rest);
    }
    const auto most_first = [&](std::vector<Tile>& tiles) {
        const auto work = [&](const Tile& tile) {
            const std::int64_t newest = step.positions[walkers_[tile.begin + tile.count - 1]];
            return (newest - static_cast<std::int64_t>(tile.block_begin * kBlock)) * static_cast<std::int64_t>(tile.count);
        };
        std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) { return work(a) > work(b); });
    };
    most_first(unshared_);
    most_first(phases_.back());
}

void Program::run_attention(Value& out, Value& q, const Heads& heads) {
    const std::size_t group = heads.heads / heads.kv_heads;
    const auto run = [&](const std::vector<Tile>& tiles) {
        // A thread takes all heads of a tile, if there are few tiles those of a key head, or one. All ways compute the same bits.
        const std::size_t wanted = pool_.threads() * kTasksPerThread;
        const std::size_t step = tiles.size() * heads.kv_heads >= wanted ? group : 1;
        const std::size_t count = tiles.size() >= wanted ? heads.heads : step, splits = heads.heads / count;
        pool_.run(tiles.size() * splits, [&](std::size_t index) {
            const std::size_t first = index % splits * count;
            for (std::size_t head = first; head < first + count; head += step) {
                const std::size_t next = (head + step) / group;
                const KvHead then = pages_.head(heads.layer, std::min(next, heads.kv_heads - 1));
                attend_tile(tiles[index / splits], out, q, heads, head, step, head + step < first + count ? &then : nullptr);
            }
        });
    };
    if (heads.window) return run(unshared_);
    for (const std::vector<Tile>& tiles : phases_) run(tiles);
}

// Heads [head, head + count), all of one key head.
void Program::attend_tile(const Tile& tile, Value& out, Value& q, const Heads& heads, std::size_t head, std::size_t count,
                          const KvHead* then) {
    const std::size_t kv_head = head / (heads.heads / heads.kv_heads), size = query_state(heads.head_dim);
    Query queries[kQueryTile * kHeadTile];
    for (std::size_t done = 0; done < count; done += kHeadTile) {
        const std::size_t some = std::min(kHeadTile, count - done);
        for (std::size_t i = 0; i < tile.count; ++i) {
            const std::size_t token = walkers_[tile.begin + i];
            for (std::size_t h = 0; h < some; ++h) {
                const std::size_t at = head + done + h;
                queries[i * some + h] = {q.row(token) + at * heads.head_dim, &states_[(token * heads.heads + at) * size],
                                         out.row(token) + at * heads.head_dim, step_->positions[token]};
            }
        }
        kernels_->attend({queries, tile.count * some, heads.head_dim, pages_.kind, pages_.head(heads.layer, kv_head), then,
                          step_->page_tables + tile.row * step_->table_width, pages_.page_size, heads.scale, heads.window,
                          tile.block_begin, tile.block_end, tile.first, tile.last});
    }
}

// ---------------------------------------------------------------- head

Rows Program::head_rows(const float* hidden, std::span<const std::size_t> places) {
    Value& input = head_input_;
    input.reserve(places.size());
    for (std::size_t row = 0; row < places.size(); ++row) {
        std::memcpy(input.row(row), hidden + places[row] * input.width, input.width * sizeof(float));
        if (!input.grouped) continue;
        const std::size_t group = row * input.width / kGroup;
        kernels_->quantize(input.row(row), input.width, &input.codes[row * input.width], &input.scales[group],
                           &input.sums[group]);
    }
    return input.rows();
}

void Program::logits(const float* hidden, std::size_t rows, float* out) {
    if (rows == 0) return;
    std::vector<std::size_t> places(rows);
    std::iota(places.begin(), places.end(), std::size_t{0});
    const Pool::Step awake(pool_);
    const Panels& panels = head_->panels();
    timed("Logits", [&] {
        cut({&panels, nullptr, Gate::none, 0, panels.count(), 0, rows, head_rows(hidden, places), out, panels.out, nullptr, false});
        run_tasks();
    });
}

// Of all positions, not only those that are asked about: the pages of a prompt may be shared later.
std::vector<std::uint8_t> Program::finite_rows(const Step& step) {
    std::vector<std::uint8_t> tokens(step.token_count), rows(step.row_count);
    each_token(hidden_width(), [&](std::size_t token) {
        tokens[token] = all_finite(hidden() + token * hidden_width(), hidden_width());
    });
    for (std::size_t row = 0; row < step.row_count; ++row) {
        const auto begin = tokens.begin() + step.row_offsets[row], end = tokens.begin() + step.row_offsets[row + 1];
        rows[row] = std::find(begin, end, 0) == end;
    }
    return rows;
}

// Logits of ids below `limit` after tokens of the step, a slab of them after the other; then visit(sampler, index, logits),
// shared among threads.
template <class Visit>
void Program::each_logits(std::span<const std::size_t> places, std::size_t limit, const char* kind, Visit visit) {
    const Panels& panels = head_->panels();
    const std::size_t count = over(limit, kLanes), stride = count * kLanes, most = std::min(places.size(), kSlabRows);
    if (slab_.size() < most * stride) slab_.resize(most * stride);
    for (std::size_t first = 0; first < places.size(); first += kSlabRows) {
        const std::size_t width = std::min(kSlabRows, places.size() - first), tasks = std::min(width, samplers_.size());
        timed("Logits", [&] {
            const Rows in = head_rows(hidden(), places.subspan(first, width));
            cut({&panels, nullptr, Gate::none, 0, count, 0, width, in, slab_.data(), stride, nullptr, false});
            run_tasks();
        });
        timed(kind, [&] {
            pool_.run(tasks, [&](std::size_t task) {
                for (std::size_t row = task; row < width; row += tasks) {
                    visit(samplers_[task], first + row, &slab_[row * stride]);
                }
            });
        });
    }
}

// Rows that want nothing but the best token come first and are spared their logits.
std::vector<Choice> Program::sample(const Step& step, const Asked& asked) {
    std::vector<std::size_t> order(asked.rows.size()), places;
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto border = std::stable_partition(order.begin(), order.end(), [&](std::size_t index) {
        return wants_only_the_best(asked.samplings[index]);
    });
    for (std::size_t index : order) {
        places.push_back(static_cast<std::size_t>(step.row_offsets[asked.rows[index] + 1] - 1));
    }
    const std::size_t simple = static_cast<std::size_t>(border - order.begin());
    std::vector<Choice> choices(order.size());
    if (simple > 0) {
        std::vector<std::int64_t> best(simple);
        timed("Logits", [&] { choose(std::span(places).first(simple), asked.limit, best.data()); });
        for (std::size_t i = 0; i < simple; ++i) choices[order[i]].token = best[i];
    }
    each_logits(std::span(places).subspan(simple), asked.limit, "Sample", [&](Sampler& sampler, std::size_t i, float* logits) {
        const std::size_t index = order[simple + i];
        choices[index] = sampler.choose(logits, asked.limit, asked.samplings[index]);
    });
    return choices;
}

std::vector<Choice> Program::score(const Asked& asked) {
    const std::vector<std::size_t> places(asked.places.begin(), asked.places.end());
    std::vector<Choice> scores(places.size());
    each_logits(places, asked.limit, "Score", [&](Sampler&, std::size_t i, float* logits) {
        scores[i] = Sampler::score(logits, asked.limit, asked.tokens[i], static_cast<std::size_t>(asked.tops[i]));
    });
    return scores;
}

void Program::choose(std::span<const std::size_t> places, std::size_t limit, std::int64_t* out) {
    const Rows in = head_rows(hidden(), places);
    const Panels& panels = head_->panels();
    const std::size_t rows = places.size(), chunks = over(limit, kHeadChannels);
    std::vector<std::int64_t> best(chunks * rows);
    std::vector<float> value(chunks * rows);
    pool_.run(chunks, [&](std::size_t chunk) {
        const std::size_t first = chunk * kHeadChannels, count = std::min(kHeadChannels, limit - first);
        std::vector<float> logits(rows * kHeadChannels);
        const LinearTask task{&panels, nullptr, Gate::none, first / kLanes, over(first + count, kLanes), 0, rows, in,
                              logits.data(), kHeadChannels, nullptr, false};
        kernels_->linear(task);
        for (std::size_t row = 0; row < rows; ++row) {
            const std::int64_t index = kernels_->argmax(&logits[row * kHeadChannels], count);
            best[chunk * rows + row] = index < 0 ? -1 : index + static_cast<std::int64_t>(first);
            value[chunk * rows + row] = index < 0 ? 0 : logits[row * kHeadChannels + static_cast<std::size_t>(index)];
        }
    });
    for (std::size_t row = 0; row < rows; ++row) {
        std::size_t winner = 0;
        bool finite = true;
        for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
            finite = finite && best[chunk * rows + row] >= 0;
            if (value[chunk * rows + row] > value[winner * rows + row]) winner = chunk;
        }
        out[row] = finite ? best[winner * rows + row] : -1;
    }
}

}  // namespace branchline
