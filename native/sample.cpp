#include "sample.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <iterator>
#include <utility>

namespace branchline {
namespace {

constexpr double kGreedyBelow = 1e-4;
constexpr std::size_t kStretch = 256;  // neighbouring ids whose weights are computed, summed and looked through together
constexpr std::size_t kLanes = 8;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------- numbers

// e^x for x <= 0, to the last bit or nearly so: 0 below -708, exactly 1 at 0. Without branches, so that loops vectorize.
inline double exponential(double x) {
    constexpr double kShift = 0x1.8p52, kLog2High = 0x1.62e42fee00000p-1, kLog2Low = 0x1.a39ef35793c76p-33;
    const double bounded = x < -708.0 ? -708.0 : x;
    const double shifted = bounded * 1.4426950408889634 + kShift;  // its low bits are the nearest whole power of two
    const double power = shifted - kShift;
    const double r = (bounded - power * kLog2High) - power * kLog2Low;
    const double r2 = r * r, r4 = r2 * r2;  // by halves: chains are shorter than term after term
    const double low = (0.5000000000000001 + r * 0.16666666666666669) + r2 * (0.041666666666624136 + r * 0.008333333333330063);
    const double middle = (0.001388888891720967 + r * 0.00019841269863050506) +
                          r2 * (2.4801521302241082e-05 + r * 2.7557268464831627e-06);
    const double high = 2.7620085455018414e-07 + r * 2.510038319586702e-08;
    const double p = 1.0 + (r + r2 * (low + r4 * (middle + r4 * high)));
    const double scaled = p * std::bit_cast<double>((std::bit_cast<std::uint64_t>(shifted) << 52) + 0x3ff0000000000000u);
    return x < -708.0 ? 0.0 : scaled;
}

std::uint64_t mix(std::uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

// `base.rng.uniform`, bit by bit.
double uniform(std::uint64_t seed, std::int64_t position) {
    const std::uint64_t key = mix(seed + 0x9E3779B97F4A7C15u);
    return static_cast<double>(mix(key ^ mix(static_cast<std::uint64_t>(position) + 1)) >> 11) * 0x1p-53;
}

float largest(const float* x, std::size_t count) {
    constexpr std::size_t width = 32;
    float lanes[width];
    std::fill_n(lanes, width, kNever);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        for (std::size_t j = 0; j < width; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    }
    for (; i < count; ++i) lanes[0] = std::max(lanes[0], x[i]);
    return *std::max_element(lanes, lanes + width);
}

// ---------------------------------------------------------------- a row

bool heavier(const Ranked& a, const Ranked& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }
bool earlier(const Ranked& a, const Ranked& b) { return a.id < b.id; }

// Logits with the largest one of each stretch.
class Row {
public:
    Row(const float* logits, std::size_t count) : logits_(logits), count_(count) {
        for (std::size_t first = 0; first < count; first += kStretch) peaks_.push_back(largest(logits + first, width(first)));
        peak_ = *std::max_element(peaks_.begin(), peaks_.end());
    }

    std::size_t count() const { return count_; }
    double peak() const { return peak_; }
    std::int64_t best() const {
        const std::size_t stretch = static_cast<std::size_t>(std::find(peaks_.begin(), peaks_.end(), peak_) - peaks_.begin());
        return std::find(logits_ + stretch * kStretch, logits_ + count_, peak_) - logits_;
    }

    double weight(double logit, double scale) const { return exponential((logit - peak()) * scale); }

    // Sums of the weights e^((logit - peak) * scale) of each stretch. `visit`: first id, weights, how many.
    template <class Visit>
    std::vector<double> weigh(double scale, Visit visit) const {
        std::vector<double> sums;
        sums.reserve(peaks_.size());
        double weights[kStretch] = {};
        for (std::size_t first = 0; first < count_; first += kStretch) {
            sums.push_back(weigh(first, scale, weights));
            visit(first, weights, width(first));
        }
        return sums;
    }

    // The same for one stretch.
    double weigh(std::size_t first, double scale, double (&weights)[kStretch]) const {
        const std::size_t n = width(first);
        for (std::size_t i = 0; i < n; ++i) weights[i] = weight(logits_[first + i], scale);
        std::fill(weights + n, weights + kStretch, 0.0);
        double lanes[kLanes] = {};
        for (std::size_t i = 0; i < kStretch; i += kLanes) {
            for (std::size_t j = 0; j < kLanes; ++j) lanes[j] += weights[i + j];
        }
        return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    }

    // The `wanted` largest logits above minus infinity, of equal ones the lower ids, in no order.
    std::vector<Ranked> heaviest(std::size_t wanted) const {
        std::vector<Ranked> found;
        if (wanted == 0) return found;
        const std::size_t room = std::max<std::size_t>(64, 2 * wanted);
        float bound = kNever;
        const auto prune = [&] {
            if (found.size() <= wanted) return;
            const auto border = found.begin() + static_cast<std::ptrdiff_t>(wanted) - 1;
            std::nth_element(found.begin(), border, found.end(), heavier);
            bound = static_cast<float>(border->value);
            found.resize(wanted);
        };
        for (std::size_t first = 0; first < count_; first += kStretch) {
            if (!(peaks_[first / kStretch] > bound)) continue;
            for (std::size_t id = first; id < first + width(first); ++id) {
                if (!(logits_[id] > bound)) continue;
                found.push_back({logits_[id], static_cast<std::int64_t>(id)});
                if (found.size() == room) prune();
            }
        }
        prune();
        return found;
    }

private:
    std::size_t width(std::size_t first) const { return std::min(kStretch, count_ - first); }

    const float* logits_;
    std::size_t count_;
    std::vector<float> peaks_;
    float peak_;
};

double sum(const std::vector<double>& numbers) {
    double total = 0;
    for (double number : numbers) total += number;
    return total;
}

double sum(const Ranked* begin, const Ranked* end) {
    double total = 0;
    for (; begin != end; ++begin) total += begin->value;
    return total;
}

// ---------------------------------------------------------------- steps on logits

void forbid(float* logits, std::size_t count, const Sampling& how) {
    for (std::size_t id = 0; !how.mask.empty() && id < count; ++id) {
        logits[id] = how.mask[id / 32] >> id % 32 & 1 ? logits[id] : kNever;
    }
    for (std::int64_t id : how.forbidden) logits[id] = kNever;
}

// Calls visit(id, how often it occurs) for each id among tokens that has a place in `times`, which is full of zeros again
// afterwards.
template <class Visit>
void each_distinct(std::span<const std::int64_t> tokens, std::vector<std::uint32_t>& times, Visit visit) {
    const std::size_t count = times.size();
    for (std::int64_t token : tokens) {
        if (static_cast<std::size_t>(token) < count) ++times[static_cast<std::size_t>(token)];
    }
    for (std::int64_t token : tokens) {
        if (static_cast<std::size_t>(token) >= count) continue;
        const std::size_t id = static_cast<std::size_t>(token);
        if (const std::uint32_t n = std::exchange(times[id], 0)) visit(id, n);
    }
}

bool penalises_output(const Sampling& how) { return how.presence_penalty != 0 || how.frequency_penalty != 0; }

bool changes_logits(const Sampling& how) {
    return !how.mask.empty() || !how.forbidden.empty() || !how.bias_ids.empty() || how.repetition_penalty != 1 ||
           penalises_output(how);
}

void change(float* logits, std::size_t count, const Sampling& how, std::vector<std::uint32_t>& times) {
    forbid(logits, count, how);
    for (std::size_t i = 0; i < how.bias_ids.size(); ++i) logits[how.bias_ids[i]] += how.bias_values[i];
    if (how.repetition_penalty != 1) {
        const float penalty = std::max(static_cast<float>(how.repetition_penalty), FLT_MIN);
        each_distinct(how.known, times, [&](std::size_t id, std::uint32_t) {
            logits[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
        });
    }
    if (penalises_output(how)) {
        const std::size_t prompt = std::min(how.known.size(), static_cast<std::size_t>(how.prompt_count));
        each_distinct(how.known.subspan(prompt), times, [&](std::size_t id, std::uint32_t n) {
            logits[id] -= static_cast<float>(how.presence_penalty + how.frequency_penalty * n);
        });
    }
}

// ---------------------------------------------------------------- steps on weights

// The last of the fewest heaviest tokens that together reach `mass`; the lightest one if all together do not. Reorders them.
Ranked border_among(std::vector<Ranked>& tokens, double mass) {
    Ranked *begin = tokens.data(), *end = begin + tokens.size();
    double reached = 0;
    while (end - begin > 1) {
        Ranked* middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, heavier);
        const double with_upper = reached + sum(begin, middle);
        if (with_upper >= mass) {
            end = middle;
        } else {
            reached = with_upper;
            begin = middle;
        }
    }
    return *begin;
}

// Leaves them, of weights of at most 1. Sums of classes of similar weight, sixteen to an octave, tell which class has to be
// looked at more closely.
void keep_top_p(std::vector<Ranked>& tokens, double mass, std::vector<Ranked>& members) {
    constexpr std::size_t classes = 1024;
    const auto class_of = [](const Ranked& token) {
        const std::uint64_t below_one = (std::bit_cast<std::uint64_t>(1.0) - std::bit_cast<std::uint64_t>(token.value)) >> 48;
        return std::min<std::size_t>(classes - 1, below_one);
    };
    double masses[classes] = {}, reached = 0;
    for (const Ranked& token : tokens) masses[class_of(token)] += token.value;
    std::size_t border = 0;
    for (std::size_t i = 0; i < classes && (i == 0 || reached < mass); ++i) {
        if (masses[i] > 0) border = i;
        reached += masses[i];
    }
    members.clear();
    std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(members),
                 [&](const Ranked& token) { return class_of(token) == border; });
    const Ranked last = border_among(members, mass - (reached - masses[border]));
    std::erase_if(tokens, [&](const Ranked& token) { return heavier(last, token); });
}

// ---------------------------------------------------------------- draws: the inverse of the cumulative sum, in the order of ids

std::int64_t draw(const std::vector<Ranked>& tokens, double number) {
    const double target = number * sum(tokens.data(), tokens.data() + tokens.size());
    double reached = 0;
    std::int64_t last = -1;
    for (const Ranked& token : tokens) {
        if (token.value > 0) last = token.id;
        reached += token.value;
        if (reached > target) break;
    }
    return last;  // rounding may bring the target up to the total: then it is the last token of any weight
}

std::int64_t draw_from_all(const Row& row, double scale, double number) {
    const std::vector<double> sums = row.weigh(scale, [](std::size_t, const double*, std::size_t) {});
    const double target = number * sum(sums);
    double reached = 0, before = 0;
    std::size_t stretch = 0;
    for (std::size_t i = 0; i < sums.size() && reached <= target; ++i) {
        if (sums[i] > 0) stretch = i, before = reached;
        reached += sums[i];
    }
    double weights[kStretch];
    row.weigh(stretch * kStretch, scale, weights);
    std::size_t last = 0;
    for (std::size_t i = 0; i < kStretch && before <= target; ++i) {
        if (weights[i] > 0) last = i;
        before += weights[i];
    }
    return static_cast<std::int64_t>(stretch * kStretch + last);
}

// Tokens of at least the weight `bound` in the order of their ids; returns the weight of all.
double collect(const Row& row, double scale, double bound, std::vector<Ranked>& tokens) {
    tokens.clear();
    return sum(row.weigh(scale, [&](std::size_t first, const double* weights, std::size_t count) {
        std::size_t places[kStretch], found = 0;
        for (std::size_t i = 0; i < count; ++i) {
            places[found] = i;
            found += weights[i] >= bound;
        }
        for (std::size_t i = 0; i < found; ++i) {
            tokens.push_back({weights[places[i]], static_cast<std::int64_t>(first + places[i])});
        }
    }));
}

// The same for the `wanted` heaviest tokens; returns the weight of these.
double collect_heaviest(const Row& row, double scale, std::size_t wanted, std::vector<Ranked>& tokens) {
    tokens = row.heaviest(wanted);
    std::sort(tokens.begin(), tokens.end(), earlier);
    for (Ranked& token : tokens) token.value = row.weight(token.value, scale);
    return sum(tokens.data(), tokens.data() + tokens.size());
}

std::int64_t draw(const Row& row, const Sampling& how, std::vector<Ranked>& tokens, std::vector<Ranked>& scratch) {
    const double scale = 1 / how.temperature, number = uniform(how.seed, how.position);
    const bool few = how.top_k > 0 && static_cast<std::size_t>(how.top_k) < row.count();
    if (!few && how.top_p >= 1 && how.min_p <= 0) return draw_from_all(row, scale, number);
    // The heaviest weight is 1. All tokens below this bound together weigh less than 1 - top_p: none of them can be needed.
    const double bound = how.top_p < 1 ? (1 - how.top_p) / static_cast<double>(row.count()) : how.min_p;
    const double total = few ? collect_heaviest(row, scale, static_cast<std::size_t>(how.top_k), tokens)
                             : collect(row, scale, bound, tokens);
    if (how.top_p < 1) keep_top_p(tokens, how.top_p * total, scratch);
    if (how.min_p > 0) std::erase_if(tokens, [&](const Ranked& token) { return token.value < how.min_p; });
    return draw(tokens, number);
}

}  // namespace

bool all_finite(const float* x, std::size_t count) {
    std::uint32_t bad = 0;
    for (std::size_t i = 0; i < count; ++i) {
        bad |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u);
    }
    return !bad;
}

bool wants_only_the_best(const Sampling& how) {
    return how.temperature < kGreedyBelow && how.logprobs < 0 && !changes_logits(how);
}

Choice Sampler::choose(float* logits, std::size_t count, const Sampling& how) {
    if (!all_finite(logits, count)) return {kNotFinite};
    const bool changed = changes_logits(how), scored = how.logprobs >= 0;
    if (changed && scored) raw_.assign(logits, logits + count);
    if (changed) {
        times_.resize(count);
        change(logits, count, how, times_);
    }
    const Row row(logits, count);
    if (!std::isfinite(row.peak())) return {kNothingLeft};
    const std::int64_t token = how.temperature < kGreedyBelow ? row.best() : draw(row, how, tokens_, border_class_);
    if (!scored) return {token};
    return score(changed ? raw_.data() : logits, count, token, static_cast<std::size_t>(how.logprobs));
}

Choice Sampler::score(const float* logits, std::size_t count, std::int64_t token, std::size_t top) {
    if (!all_finite(logits, count)) return {kNotFinite};
    if (static_cast<std::size_t>(token) >= count) return {kNoLogprob};
    const Row row(logits, count);
    const double log_total = row.peak() + std::log(sum(row.weigh(1, [](std::size_t, const double*, std::size_t) {})));
    Choice choice{token, logits[token] - log_total, row.heaviest(std::min(top, count))};
    std::sort(choice.top.begin(), choice.top.end(), heavier);
    for (Ranked& one : choice.top) one.value -= log_total;
    return choice;
}

}  // namespace branchline
