// Where the time of steps goes, as the first thread sees it: what it waits at a part's barrier counts
// for the part. Off, it costs a branch a part. engine_profile in step.cpp turns it on and reads it.
#pragma once
#include <chrono>
#include <cstdint>

enum Section { EMBEDDING, NORMS, LINEAR, ATTENTION, HEAD, TOKENS, SECTIONS };

class Profile {
 public:
  bool on = false;
  int64_t spent_ns[SECTIONS] = {};

  void begin() {
    if (on) last_ = Clock::now();
  }

  // All since the last mark was this part.
  void mark(int id, Section part) {
    if (!on || id) return;
    const auto now = Clock::now();
    spent_ns[part] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
};
