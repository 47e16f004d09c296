// From the logits of one row to its next token and log probabilities, by the formulas of `ops/sample.py`.
//
// A row is handled by itself in one order of operations, in plain C++: neither its neighbours, nor the number of threads,
// nor the instruction set changes its token. Nothing is ever sorted but what may be chosen.
//
// Knows: the formulas. Refuses to know: threads, Python, where logits come from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace branchline {

// One row of the columns of `ops.batch.SamplingColumns`.
struct Sampling {
    double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    std::int64_t top_k, logprobs, prompt_count, position;
    std::uint64_t seed;
    std::span<const std::int64_t> known, bias_ids, forbidden;
    std::span<const float> bias_values;
    std::span<const std::uint32_t> mask;  // bit i of word w allows token 32 w + i; empty: all are allowed
};

// Why there is no token: the numbers of `ops.batch`.
constexpr std::int64_t kNotFinite = -1, kNothingLeft = -2, kNoLogprob = -3;

struct Ranked {
    double value;
    std::int64_t id;
};

struct Choice {
    std::int64_t token;
    double logprob = std::numeric_limits<double>::quiet_NaN();
    std::vector<Ranked> top = {};  // log probabilities, most likely first
};

// No infinity and no NaN.
bool all_finite(const float* x, std::size_t count);

// The token of the largest logit is all that is asked for: nobody needs to see the logits.
bool wants_only_the_best(const Sampling& how);

// Chooses for one row after another; keeps its memory between them.
class Sampler {
public:
    // The next token from raw logits of ids below `count`; overwrites them.
    Choice choose(float* logits, std::size_t count, const Sampling& how);

    // Log probability of a given token and of the `top` most likely ones.
    static Choice score(const float* logits, std::size_t count, std::int64_t token, std::size_t top);

private:
    std::vector<float> raw_;
    std::vector<std::uint32_t> times_;
    std::vector<Ranked> tokens_, border_class_;
};

}  // namespace branchline
