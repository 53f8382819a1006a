// What this CPU can do, and how much of it the kernels may use.
#include "native.h"

static int best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ISA_NONE;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return ISA_AVX2;
  // VBMI looks bytes up in a register; among the CPUs with BF16 arithmetic only Cooper Lake lacks it.
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return ISA_AVX512;
  return ISA_AVX512_BF16;
#else
  return ISA_NONE;
#endif
}

static int limit = ISA_AVX512_BF16;

NATIVE_API int native_best_isa(void) { return best_isa(); }

NATIVE_API int native_isa(void) {
  static const int best = best_isa();
  return best < limit ? best : limit;
}

// Use no more than `isa` from now on: a lesser machine is simulated, or the torch path chosen (ISA_NONE).
NATIVE_API void native_limit_isa(int isa) { limit = isa; }
