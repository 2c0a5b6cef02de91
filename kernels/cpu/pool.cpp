#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define KTOPT_FORKS 1
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ktopt {
namespace {

constexpr auto WATCH = std::chrono::microseconds(50);
constexpr int MOST_SKIPPED = 255, MOST_ROUSES_SKIPPED = 31;

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until done() for WATCH at most, leaving the core to any thread that wants it. Answers whether it became true.
template <class Done>
bool watch(Done done) {
    const auto end = std::chrono::steady_clock::now() + WATCH;
    do {
        for (int i = 0; i < 64; i++) {
            if (done()) return true;
            pause_briefly();
        }
        std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

class Pool {
public:
    void run(Part function, void* job, int64_t parts, int threads, bool long_job) {
        if (threads <= 1 || parts <= 1 || !owner_.try_lock()) {
            for (int64_t part = 0; part < parts; part++) function(job, part);
            return;
        }
        while (workers_ < threads - 1 && start_worker()) {}
        function_ = function;
        job_ = job;
        parts_ = parts;
        seats_.store(threads - 1);
        next_.store(0, std::memory_order_relaxed);
        ticket_.fetch_add(1);
        open_.store(true);
        const bool called = call_sleepers(long_job);
        const int64_t own = work();
        helped(called, own < parts);
        open_.store(false);  // who comes now finds the door shut; who is inside is waited for
        if (inside_.load() != 0 && !watch([this] { return inside_.load() == 0; }))
            while (inside_.load() != 0) std::this_thread::yield();
        owner_.unlock();
    }

    // Wakes sleepers for jobs that come one after another. After calls that brought no help, some are left out.
    void rouse(int threads) {
        if (threads <= 1 || !owner_.try_lock()) return;
        while (workers_ < threads - 1 && start_worker()) {}
        if (asleep_.load() != 0 && rouse_skip_-- <= 0) {
            rouse_backoff_ = roused_in_vain_ ? std::min(2 * rouse_backoff_ + 1, MOST_ROUSES_SKIPPED) : 0;
            rouse_skip_ = rouse_backoff_;
            roused_in_vain_ = true;
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        owner_.unlock();
    }

private:
    bool start_worker() {
        try {
            std::thread([this] { serve(); }).detach();
        } catch (...) {  // the system gives no more threads: fewer will do
            return false;
        }
        workers_++;
        return true;
    }

    // Waking a thread takes as long as a short job, and on a busy machine the thread comes too late. So after calls that brought no
    // help some short jobs go without, up to MOST_SKIPPED. A thread that is still watching helps without a call.
    bool call_sleepers(bool long_job) {
        if (asleep_.load() == 0 || (skip_-- > 0 && !long_job)) return false;
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
        return true;
    }

    void helped(bool called, bool help) {
        if (help) {
            backoff_ = skip_ = 0;
            roused_in_vain_ = false;
        } else if (called) {
            backoff_ = std::min(2 * backoff_ + 1, MOST_SKIPPED);
            skip_ = backoff_;
        }
    }

    // Does parts while there are any, and answers how many.
    int64_t work() {
        int64_t done = 0;
        for (int64_t part; (part = next_.fetch_add(1, std::memory_order_relaxed)) < parts_; done++) function_(job_, part);
        return done;
    }

    void serve() {
        for (uint64_t seen = 0;;) {
            if (!watch([&] { return ticket_.load() != seen; })) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_.fetch_add(1);
                wake_.wait(lock, [&] { return ticket_.load() != seen; });
                asleep_.fetch_sub(1);
            }
            seen = ticket_.load();
            inside_.fetch_add(1);
            if (open_.load() && seats_.fetch_sub(1) > 0) work();
            inside_.fetch_sub(1);
        }
    }

    std::mutex owner_, mutex_;
    std::condition_variable wake_;
    int workers_ = 0, skip_ = 0, backoff_ = 0, rouse_skip_ = 0, rouse_backoff_ = 0;
    bool roused_in_vain_ = false;
    Part function_ = nullptr;
    void* job_ = nullptr;
    int64_t parts_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    std::atomic<bool> open_{false};
    std::atomic<int> asleep_{0}, seats_{0};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

std::atomic<Pool*> current{nullptr};

// Never destroyed: its threads may still be asleep when the process ends.
Pool& pool() {
    Pool* found = current.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    static std::mutex making;
    std::lock_guard<std::mutex> lock(making);
    found = current.load();
    if (found == nullptr) {
#if defined(KTOPT_FORKS)
        static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });  // a child has no threads
        static_cast<void>(registered);
#endif
        found = new Pool;
        current.store(found, std::memory_order_release);
    }
    return *found;
}

}  // namespace

void run_parts(Part function, void* job, int64_t parts, int threads, bool long_job) {
    pool().run(function, job, parts, threads, long_job);
}

void rouse(int threads) { pool().rouse(threads); }

}  // namespace ktopt
