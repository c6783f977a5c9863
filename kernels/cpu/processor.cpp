// What this CPU can run, asked before any code for it is called. A bench or a test may keep the
// process to less than that, to see how it does on another CPU.

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

const char* const targets[] = {"avx512_bf16", "avx512", "avx2", "portable"};  // the best first
constexpr int COUNT = 4;
int first = 0;

#if defined(__x86_64__)
bool has_f16c() {  // whose name gcc 10 does not know
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

bool runs(const char* target) {
  if (!std::strcmp(target, "portable")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!has_f16c()) return false;
  if (!std::strcmp(target, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!std::strcmp(target, "avx512_bf16") && !__builtin_cpu_supports("avx512bf16")) return false;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

}  // namespace

extern "C" {

// The target that is `index`th best, null past the last.
const char* processor_target(int index) {
  for (int i = first; i < COUNT; ++i)
    if (runs(targets[i]) && index-- == 0) return targets[i];
  return nullptr;
}

// Tell of no better target than this one.
void processor_keep_to(const char* target) {
  for (int i = 0; i < COUNT; ++i)
    if (!std::strcmp(targets[i], target)) first = i;
}

}  // extern "C"
