#include "pool.h"

#include <algorithm>

#ifdef BRANCHLINE_X86
#include <xmmintrin.h>
#endif

namespace branchline {
namespace {

constexpr std::uint64_t kCountBits = 20, kMask = (1u << kCountBits) - 1;
constexpr int kSpins = 4000;  // some 50 us: longer than the serial parts between two operators

#ifdef BRANCHLINE_X86
constexpr unsigned kFlushDenormals = 0x8040;  // FTZ and DAZ
unsigned flush_denormals() {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | kFlushDenormals);
    return before;
}
void restore_mode(unsigned mode) { _mm_setcsr(mode); }
void pause() { _mm_pause(); }
#else
unsigned flush_denormals() { return 0; }
void restore_mode(unsigned) {}
void pause() {}
#endif

}  // namespace

Pool::Pool(std::size_t threads) {
    for (std::size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
    closing_.store(true);
    awake_.store(1);
    awake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

Pool::Step::Step(Pool& pool) : pool_(pool), saved_mode_(flush_denormals()) {
    pool_.awake_.store(1, std::memory_order_release);
    pool_.awake_.notify_all();
}

Pool::Step::~Step() {
    pool_.awake_.store(0, std::memory_order_release);
    restore_mode(saved_mode_);
}

void Pool::share(std::size_t count, Call call, void* context) {
    // Jobs larger than the ticket's field are handed out in parts.
    for (std::size_t first = 0; first < count;) {
        const std::size_t part = std::min<std::size_t>(count - first, kMask);
        struct Shifted {
            Call call;
            void* context;
            std::size_t first;
        } shifted{call, context, first};
        call_ = [](void* of, std::size_t i) {
            const Shifted& job = *static_cast<Shifted*>(of);
            job.call(job.context, job.first + i);
        };
        context_ = &shifted;
        done_.store(0, std::memory_order_relaxed);
        const std::uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 2 * kCountBits) + 1;
        ticket_.store(generation << 2 * kCountBits | part << kCountBits, std::memory_order_release);
        while (take_one()) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) < part; ++spins) {
            spins < kSpins ? pause() : std::this_thread::yield();
        }
        first += part;
    }
}

bool Pool::take_one() {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
        const std::uint64_t index = ticket & kMask, count = ticket >> kCountBits & kMask;
        if (index >= count) return false;
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            call_(context_, index);
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
    }
}

void Pool::work() {
    flush_denormals();
    int idle = 0;
    while (!closing_.load(std::memory_order_relaxed)) {
        if (take_one()) {
            idle = 0;
        } else if (++idle < kSpins) {
            pause();
        } else if (awake_.load(std::memory_order_acquire)) {
            std::this_thread::yield();
        } else {
            awake_.wait(0, std::memory_order_acquire);
            idle = 0;
        }
    }
}

}  // namespace branchline
