// What this CPU can do, and how much of it the kernels may use.
#include "native.h"

#include "choice.h"
#include "interface.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef TILE_MODEL  // tiles.h: any CPU has them
static bool tiles_allowed() { return true; }
#elif defined(__x86_64__)
// Matrix tiles are kept over a change of thread only for a process that has asked: once is enough for all of its threads, and for its
// children. An old kernel knows no such request; one that is refused (a sandbox, an alternate signal stack that is too small for tiles)
// is no error.
static bool tiles_allowed() {
  enum { GET_SUPPORTED = 0x1021, REQUEST = 0x1023, TILE_CONFIG = 17, TILE_DATA = 18 };  // of arch_prctl; components of the state
  const unsigned long both = 1ul << TILE_CONFIG | 1ul << TILE_DATA;
  unsigned long supported = 0;
  if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) return false;
  if (syscall(SYS_arch_prctl, GET_SUPPORTED, &supported) || (supported & both) != both) return false;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

static int find_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ISA_NONE;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return ISA_AVX2;
  // VBMI looks bytes up in a register; among the CPUs with BF16 arithmetic only Cooper Lake lacks it.
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vnni")) return ISA_AVX512;
  return tiles_allowed() ? ISA_AMX : ISA_AVX512_BF16;
#else
  return ISA_NONE;
#endif
}

static int best_isa() {
  static const int best = find_isa();
  return best;
}

static int limit = ISA_AMX;

NATIVE_API int64_t native_interface(void) { return NATIVE_INTERFACE; }

NATIVE_API int native_best_isa(void) { return best_isa(); }

NATIVE_API int native_isa(void) { return best_isa() < limit ? best_isa() : limit; }

// Use no more than `isa` from now on: a lesser machine is simulated, or the torch path chosen (ISA_NONE).
NATIVE_API void native_limit_isa(int isa) { limit = isa; }

static int running_isa() { return native_isa() ? native_isa() : best_isa(); }

int vector_isa(void) { return running_isa() < ISA_AVX512_BF16 ? running_isa() : (int)ISA_AVX512_BF16; }

bool has_vnni(void) {
#if defined(__x86_64__)
  static const bool has = best_isa() >= ISA_AVX512 && __builtin_cpu_supports("avx512vnni");
  return has;
#else
  return false;
#endif
}

bool has_tiles(void) { return running_isa() >= ISA_AMX && kernel_choice().products >= ISA_AMX; }
