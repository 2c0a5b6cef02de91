// Threads that share the rows of one matrix product.
#pragma once

#include <cstdint>

namespace ktopt {

constexpr int64_t LONG_BYTES = 2 << 20;  // a job that reads so much takes some 100 microseconds: worth waking threads for

// Part `part` of a job.
using Part = void (*)(void* job, int64_t part);

// Run parts [0, parts) of a job on the calling thread and up to threads - 1 others, and return when all are done.
//
// Parts are taken one by one, so a thread that the system doesn't run takes none and nobody waits for it. Idle threads watch for
// work for some microseconds and then sleep; they are woken for every `long_job`, and for short ones while that helps. Where another
// thread's job is running, this one runs on its caller alone. Threads are started when first wanted and live as long as the process;
// a forked child starts its own.
void run_parts(Part function, void* job, int64_t parts, int threads, bool long_job);

// The same with f(part) for parts [0, parts).
template <class Function>
void share_out(int64_t parts, int threads, bool long_job, Function f) {
    run_parts([](void* job, int64_t part) { (*static_cast<Function*>(job))(part); }, &f, parts, threads, long_job);
}

// Wakes the threads that sleep: for a caller that has many short jobs one after another, of which the first would be done before a
// thread comes for it.
void rouse(int threads);

}  // namespace ktopt
