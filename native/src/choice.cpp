// Which of the ways to multiply bfloat16 by panels is taken: they are timed on this CPU, on panels that lie in its second cache. What an
// instruction set can do says little: products of pairs take a cycle on one CPU and two on another.
#include "choice.h"

#include <time.h>

#include "experts.h"
#include "scratch.h"

static KernelChoice chosen = {ISA_AMX, FEW_NARROW_ROWS, FEW_BYTE_ROWS, FEW_HALF_ROWS, 0, 0};

const KernelChoice &kernel_choice(void) { return chosen; }

int64_t narrow_rows_of(int64_t x_type, int64_t format) {
  const bool all_whole = chosen.whole && !has_tiles() && (vector_isa() == ISA_AVX512_BF16 || (vector_isa() == ISA_AVX512 && has_vnni()));
  const bool same_sums = x_type == X_BF16 && (vector_isa() == ISA_AVX2 || all_whole);
  if (chosen.fixed_order && !same_sums) return 0;
  return format >= W_MXFP4 ? chosen.half_rows : format == W_INT8 ? chosen.byte_rows : chosen.narrow_rows;
}

NATIVE_API void native_choose(const KernelChoice *choice) { chosen = *choice; }

NATIVE_API void native_chosen(KernelChoice *choice) { *choice = chosen; }

#if defined(__x86_64__)
enum { DEPTH = 512, PANELS = 4, REPEATS = 7 };

static double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Nanoseconds in which `rows` rows of 512 go through a panel: the fastest of several times.
static double time_panel(const Multiplier &by, int64_t rows) {
  int64_t bytes = by.panel_bytes(DEPTH), work_bytes = (by.work_bytes(DEPTH, rows) + 63) / 64 * 64;
  const bool whole = by.all_whole();  // then rows have become so before; zeros are
  const int64_t row_bytes = whole ? by.whole_stride(DEPTH) : DEPTH * 2;
  uint8_t *work = scratch(work_bytes + PANELS * bytes + rows * row_bytes), *panels = work + work_bytes, *x = panels + PANELS * bytes;
  memset(work, 0, work_bytes + PANELS * bytes + rows * row_bytes);
  if (by.ops->widen_whole[W_INT8 - W_FP8]) memset(panels, 0x38, PANELS * bytes);  // zeros are seldom, and of FP8 take longer
  double best = 1;
  for (int i = 0; i <= REPEATS; i++) {
    double began = seconds();
    by.panels({x, row_bytes, nullptr, whole, whole}, 0, rows, DEPTH, 0, PANELS, [&](int64_t n) { return n < PANELS ? panels + n * bytes : nullptr; }, work,
              [](int64_t, const float *, int64_t, int) {});
    double took = seconds() - began;
    if (i && took < best) best = took;  // the first brings everything near
  }
  if (by.bands) by.bands->release();
  return best / PANELS * 1e9;
}
#endif

// Times one way, isa: from ISA_AVX2 on, which this CPU must have. format: the panel's (experts.h). few: weights of fewer bits are widened in
// vector registers. whole: with ISA_AVX512 and ISA_AVX512_BF16 rows are whole numbers, also where they are many. 0: not here.
NATIVE_API double native_time_panel(int isa, int64_t format, int64_t rows, int few, int whole) {
#if defined(__x86_64__)
  if (isa < ISA_AVX2 || isa > native_best_isa() || rows < 1) return 0;
  const ExpertOps *ops = whole ? experts_whole(isa) : isa == ISA_AVX2 ? experts_avx2[X_BF16] : isa == ISA_AVX512 ? experts_avx512[X_BF16] : experts_avx512_bf16;
  if (!ops) return 0;
  const bool tiles = isa == ISA_AMX || (!whole && isa != ISA_AVX2 && format != W_PLAIN && native_best_isa() >= ISA_AMX);
  return time_panel({ops, tiles ? bands_amx : nullptr, X_BF16, format, few ? MAX_NARROW_ROWS * 2 : 0}, rows);
#else
  return 0;
#endif
}
