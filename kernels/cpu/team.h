// Threads that compute one step together: each runs the same function and waits for the others at barriers.
//
// Between two steps they wait for the next one: awake for a little while, then asleep, so that an idle server uses no
// processor. At a barrier they spin and then yield, for a sleeper is awake too late when others use the processors.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "simd.h"

namespace baton {

class Team {
 public:
  explicit Team(int size) : size_(size) {
    try {
      for (int index = 1; index < size; index++) threads_.emplace_back([this, index] { serve(index); });
    } catch (...) {  // those that were started would outlive what they wait for
      end();
      throw;
    }
  }

  ~Team() { end(); }

  int size() const { return size_; }

  // Runs body(member) once in every member; the caller is member 0.
  template <typename Body>
  void run(Body &&body) {
    if (size_ > 1) begin([](void *state, int member) { (*static_cast<Body *>(state))(member); }, &body);
    body(0);
    barrier();
  }

  // Waits until every member has come here; what each wrote before it is seen by all after it.
  void barrier() {
    if (size_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
      _mm_pause();
      if (++spins > BARRIER_SPINS) sched_yield();
    }
  }

 private:
  using Job = void (*)(void *state, int member);
  static constexpr int BARRIER_SPINS = 2000;
  static constexpr int IDLE_SPINS = 2000;  // some tens of microseconds

  void begin(Job job, void *state) {
    job_ = job;
    state_ = state;
    jobs_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, size_);
  }

  void end() {
    begin(nullptr, nullptr);
    for (auto &thread : threads_) thread.join();
  }

  void serve(int member) {
    for (uint32_t done = 0;; done++) {
      for (int spins = 0; jobs_.load(std::memory_order_acquire) == done;) {
        _mm_pause();
        if (++spins <= IDLE_SPINS) continue;
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        futex(FUTEX_WAIT_PRIVATE, done);  // returns at once where a job has come meanwhile
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
      }
      if (job_ == nullptr) return;
      job_(state_, member);
      barrier();
    }
  }

  void futex(int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&jobs_), operation, value, nullptr, nullptr, 0);
  }

  const int size_;
  std::vector<std::thread> threads_;
  Job job_ = nullptr;
  void *state_ = nullptr;
  alignas(64) std::atomic<uint32_t> jobs_{0};
  alignas(64) std::atomic<int> asleep_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// The share of `count` things that is `member`'s: a contiguous range, the same in every step.
struct Range {
  long begin, end;
  Range(long count, int member, int members) : begin(count * member / members), end(count * (member + 1) / members) {}
};

}  // namespace baton
