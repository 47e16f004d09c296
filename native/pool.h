// Threads that share the work of a step: they spin while a step runs and sleep between steps.
//
// Knows: indices of tasks. Refuses to know: what a task does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace branchline {

class Pool {
public:
    explicit Pool(std::size_t threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    std::size_t threads() const { return workers_.size() + 1; }

    // While one exists the workers spin, and all threads of the step treat denormal numbers as zero.
    class Step {
    public:
        explicit Step(Pool& pool);
        ~Step();
        Step(const Step&) = delete;
        Step& operator=(const Step&) = delete;

    private:
        Pool& pool_;
        unsigned saved_mode_;
    };

    // task(0) to task(count - 1), in any order, by any thread, the caller included; returns when all are done. Tasks must
    // not throw. One call at a time.
    template <class Task>
    void run(std::size_t count, Task&& task) {
        if (count <= 1 || workers_.empty()) {
            for (std::size_t i = 0; i < count; ++i) task(i);
            return;
        }
        using Plain = std::remove_reference_t<Task>;
        share(count, [](void* context, std::size_t i) { (*static_cast<Plain*>(context))(i); }, &task);
    }

private:
    using Call = void (*)(void*, std::size_t);

    void share(std::size_t count, Call call, void* context);
    bool take_one();
    void work();

    // generation (24 bits) | count (20) | next index (20): one word, so that nobody takes an index of a job that is over.
    std::atomic<std::uint64_t> ticket_{0};
    alignas(64) std::atomic<std::size_t> done_{0};
    alignas(64) std::atomic<std::uint32_t> awake_{0};
    std::atomic<bool> closing_{false};
    Call call_ = nullptr;
    void* context_ = nullptr;
    std::vector<std::thread> workers_;
};

}  // namespace branchline
