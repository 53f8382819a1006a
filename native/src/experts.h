// The two matrices of every expert of a rank, in one pass over rows sorted by expert: y = down(silu(gate x) * (up x)).
//
// An expert's weights are packed into panels of 64 output columns, so that a panel is read from its first byte to its last:
//   up panels    ceil(F/32) of them over D: columns are 16 of gate, 16 of up, 16 of gate, 16 of up
//   down panels  ceil(D/64) of them over F: columns as they are
// A panel of float32 has 64 numbers for each k, one of bfloat16 64 pairs (k, k + 1). A panel of 8-bit weights has for each
// block of 128 k 64 scales (float32), then for each pair (k, k + 1) 128 bytes, ordered so that two byte unpackings make them
// pairs of bfloat16. A byte is sign and magnitude: e4m3 as it is, INT8 with its sign in the top bit.
// Columns and k beyond the matrix are zero. moe_kernels/panels.py says the same in torch.
#pragma once
#include "native.h"

enum { PANEL = 64, K_BLOCK = 128, MAX_ROWS = 6, MAX_NARROW_ROWS = 4 };
enum XType { X_F32 = 0, X_BF16 = 1 };
enum Format { W_PLAIN = 0, W_FP8 = 1, W_INT8 = 2 };  // plain: of x's type

// What ctypes passes; filled by experts_shape.
struct ExpertShape {
  int64_t x_type, format, num_slots, hidden, width;  // given: D and F
  int64_t up_panels, down_panels, up_depth, down_depth, up_bytes, down_bytes, slot_bytes, hidden_stride;  // worked out
};

// What a tile brings nearer while it computes. own: its panel comes from memory, so what lies further on in it, in the end the
// beginning of the one at `next`. Otherwise `lines` cache lines for each pair of k, from `next` on up to `end`.
struct Ahead {
  const uint8_t *next, *end;
  int lines;
  bool own;
};

// c[rows][64] = a[row][0..depth) times a panel.
typedef void (*TileFn)(const void *const *a, const uint8_t *panel, int64_t depth, float *c, const Ahead &ahead);

// What the driver needs from an instruction set, for one type of x.
struct ExpertOps {
  TileFn plain[MAX_ROWS + 1];                // weights of x's type
  TileFn scaled[MAX_ROWS + 1];               // 8-bit weights that `widen` has made x's type, with their scales
  TileFn narrow[2][MAX_NARROW_ROWS + 1];     // 8-bit weights, FP8 and INT8, widened in registers
  void (*widen[2])(const uint8_t *panel, int64_t depth, uint8_t *out);
  void (*silu)(const float *c, int rows, void *const *h);                             // 64 columns to 32 of x's type
  void (*add)(const float *c, int rows, float *const *sum, const float *weight);      // sum += weight * c, 64 columns
  void (*store)(const float *c, int64_t stride, int rows, void *const *y, int columns);  // as x's type
};

extern const ExpertOps *const experts_avx2[2], *const experts_avx512[2];  // by XType
extern const ExpertOps *const experts_avx512_bf16;                        // of bfloat16 x only
const ExpertOps *experts_ops(int64_t x_type);  // those of the instruction set in use
