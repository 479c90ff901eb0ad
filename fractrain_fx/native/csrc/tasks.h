// Hands tasks to threads.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fractrain_fx {

// Values that take a thread long enough to round (20 to 40 us) that another one is worth to wake. If waiting threads
// sleep, waking one takes 10 to 50 us. torch's own grain is a quarter of this.
constexpr int64_t kGrain = 1 << 17;

// Runs tasks 0 to tasks - 1, with at most one thread for every `worth` tasks: waking a thread for fewer does not pay.
// Each thread takes the next task when it is done with its last, because some tasks take longer than others and a
// thread may have to share its core.
template <class Run>
void share(int64_t tasks, int64_t worth, Run&& run) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks / std::max<int64_t>(1, worth));
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::max<int64_t>(1, threads), 1, [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1)) < tasks;) run(task);
  });
}

}  // namespace fractrain_fx
