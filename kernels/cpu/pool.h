// The threads of one engine: they run one job at a time, meet at barriers inside it, and share work
// between two barriers. A waiter pauses for a few microseconds, then sleeps on a futex: an idle
// engine costs nothing, and a busy neighbour is not starved by ours.
#pragma once
#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

class Pool {
 public:
  static constexpr int THREADS_MAX = 64;

  explicit Pool(int threads) : threads_(threads) {
    for (int id = 1; id < threads; ++id) workers_.emplace_back([this, id] { serve(id); });
  }

  ~Pool() {
    ends_ = true;
    announce(job_);
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // Call job(id) on every thread, the caller's among them as 0; returns when all are done.
  template <class Job> void run(const Job& job) {
    call_ = [](const void* what, int id) { (*static_cast<const Job*>(what))(id); };
    what_ = &job;
    announce(job_);
    job(0);
    barrier();
  }

  void barrier() {
    const int phase = phase_.load();
    if (arrived_.fetch_add(1) + 1 == threads_) {
      arrived_.store(0);
      announce(phase_);
    } else {
      await(phase_, phase);
    }
  }

  // Split 0..total among the threads and call part(from, to) until all is done; one share between
  // two barriers. Each thread takes `chunk` at a time from the front of a range of its own, so that
  // it can fetch ahead, and then from the back of others' ranges. A range carries the phase that it
  // is for: whoever comes first sets it up, so a thread that lost its core holds nobody up.
  template <class Part> void share(int id, int64_t total, int64_t chunk, const Part& part) {
    const uint64_t tag = (static_cast<uint64_t>(phase_.load()) & 0x7fff) + 1;
    int64_t from, to;
    while (take(id, total, chunk, tag, true, from, to)) part(from, to);
    for (int other = 1; other < threads_; ++other) {
      const int victim = (id + other) % threads_;
      while (take(victim, total, chunk, tag, false, from, to)) part(from, to);
    }
  }

 private:
  static constexpr int PAUSES = 300;  // of about 25 ns
  struct alignas(64) Range {
    std::atomic<uint64_t> word{0};  // tag, 16 bits; from, 24; to, 24
  };

  void serve(int id) {
    for (int seen = 0;; ++seen) {
      await(job_, seen);
      if (ends_) return;
      call_(what_, id);
      barrier();
    }
  }

  // Leave the core to the other thread on it, if there is one.
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  static long futex(std::atomic<int>& word, int operation, int value) {
    return syscall(SYS_futex, reinterpret_cast<int*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr,
                   nullptr, 0);
  }

  void await(std::atomic<int>& word, int old) {
    for (int i = 0; i < PAUSES; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      pause();
    }
    while (word.load() == old) {
      sleepers_.fetch_add(1);
      futex(word, FUTEX_WAIT, old);  // which looks at the value again before it sleeps
      sleepers_.fetch_sub(1);
    }
  }

  void announce(std::atomic<int>& word) {
    word.fetch_add(1);
    if (sleepers_.load()) futex(word, FUTEX_WAKE, INT_MAX);
  }

  bool take(int owner, int64_t total, int64_t chunk, uint64_t tag, bool front, int64_t& from, int64_t& to) {
    std::atomic<uint64_t>& range = ranges_[owner].word;
    uint64_t word = range.load(std::memory_order_relaxed);
    for (;;) {
      uint64_t low = word >> 24 & 0xffffff, high = word & 0xffffff;
      if (word >> 48 != tag) {
        low = static_cast<uint64_t>(total) * owner / threads_;
        high = static_cast<uint64_t>(total) * (owner + 1) / threads_;
      }
      if (low >= high) return false;
      const uint64_t count = std::min<uint64_t>(chunk, high - low);
      const uint64_t rest_low = front ? low + count : low, rest_high = front ? high : high - count;
      if (range.compare_exchange_weak(word, tag << 48 | rest_low << 24 | rest_high)) {
        from = front ? low : rest_high;
        to = from + count;
        return true;
      }
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<int> job_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  void (*call_)(const void*, int) = nullptr;
  const void* what_ = nullptr;
  bool ends_ = false;
  Range ranges_[THREADS_MAX];
};
