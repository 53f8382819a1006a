// From matrices as checkpoints have them, [outputs, inputs], to the panels of experts.h.
#include <string.h>

#include "experts.h"
#include "pack_rows.h"
#include "scratch.h"

namespace {

struct Matrix {
  const uint8_t *rows;
  const float *scale;  // of 8-bit weights: [ceil(outputs / scale_rows), ceil(inputs / 128)]; of 4-bit ones half_group's
  int64_t outputs, inputs;
};

uint8_t sign_and_magnitude(int8_t x) {
  int size = x < 0 ? -(int)x : x;
  return (uint8_t)((x < 0 ? 0x80 : 0) | (size > 127 ? 127 : size));
}

// 16 columns of a panel from 16 rows of a matrix, of which those from `first` on exist. ITEM: bytes of a number.
// A pair's place: plain bfloat16 [k / 2][64][2]; float32 [k][64]; bytes as experts.h says.
template <int ITEM> void plain_group(const Matrix &w, int64_t first, int group, int64_t depth, uint8_t *panel) {
  for (int64_t k0 = 0; k0 < depth; k0 += 32)
    for (int i = 0; i < 16; i++) {
      bool there = first + i < w.outputs;
      const uint8_t *row = w.rows + (first + i) * w.inputs * ITEM;
      for (int64_t k = k0; k < depth && k < k0 + 32; k++) {
        uint8_t *to = ITEM == 4 ? panel + (k * PANEL + group * 16 + i) * 4
                                : panel + (k / 2 * PANEL * 2 + (group * 16 + i) * 2 + k % 2) * 2;
        if (there && k < w.inputs) memcpy(to, row + k * ITEM, ITEM);
        else memset(to, 0, ITEM);
      }
    }
}

// Whether one of n e4m3 numbers is none: then its output is none, which the column's scale sees to. Not every kernel looks for it.
bool no_number(const uint8_t *x, int64_t n) {
  uint8_t most = 0;
  for (int64_t i = 0; i < n; i++) most = (x[i] & 0x7f) > most ? x[i] & 0x7f : most;
  return most == 0x7f;
}

void byte_group(const Matrix &w, int format, int64_t scale_rows, int64_t first, int group, int64_t depth, uint8_t *panel) {
  int64_t num_blocks = (w.inputs + K_BLOCK - 1) / K_BLOCK;
  for (int64_t k0 = 0; k0 < depth; k0 += K_BLOCK) {
    float *scales = (float *)panel + group * 16;
    panel += PANEL * 4;
    int64_t end = k0 + K_BLOCK < depth ? k0 + K_BLOCK : depth;
    bool whole = first + 16 <= w.outputs && end <= w.inputs && (end - k0) % 16 == 0;
    if (whole) {
      place_bytes(w.rows + first * w.inputs + k0, w.inputs, end - k0, format == W_INT8, panel + group / 2 * 64 + group % 2 * 8);
      for (int i = 0; i < 16; i++) scales[i] = w.scale[(first + i) / scale_rows * num_blocks + k0 / K_BLOCK];
    }
    for (int i = 0; i < 16 && !whole; i++) {
      bool there = first + i < w.outputs;
      scales[i] = there ? w.scale[(first + i) / scale_rows * num_blocks + k0 / K_BLOCK] : 0.f;
      const uint8_t *row = w.rows + (first + i) * w.inputs;
      // Byte `half * 64 + lane * 16 + which * 8 + at` is number lane * 8 + at of register 2 * half + which.
      uint8_t *to = panel + group / 2 * 64 + group % 2 * 8 + i / 4 * 16 + i % 4 * 2;
      for (int64_t k = k0; k < end; k++) {
        uint8_t x = there && k < w.inputs ? row[k] : 0;
        to[(k - k0) / 2 * 128 + k % 2] = format == W_INT8 ? sign_and_magnitude((int8_t)x) : x;
      }
    }
    for (int i = 0; format == W_FP8 && i < 16; i++)
      if (first + i < w.outputs && no_number(w.rows + (first + i) * w.inputs + k0, end < w.inputs ? end - k0 : w.inputs - k0)) scales[i] = __builtin_nanf("");
    panel += (end - k0) * PANEL;
  }
}

// Rows of ceil(inputs / 32) * 16 bytes; scales, and behind those of all rows zero points, of 16 bits.
void half_group(const Matrix &w, int format, int64_t first, int group, int64_t depth, uint8_t *panel) {
  int64_t groups = (w.inputs + K_GROUP - 1) / K_GROUP, row_bytes = groups * (K_GROUP / 2);
  const uint32_t nothing = format == W_MXFP4 ? 0 : 0x88888888;
  for (int64_t k0 = 0; k0 < depth; k0 += K_BLOCK) {
    int64_t end = k0 + K_BLOCK < depth ? k0 + K_BLOCK : depth, steps = (end - k0 + HALF_STEP - 1) / HALF_STEP;
    const bool whole = first + 16 <= w.outputs && end <= w.inputs && (end - k0) % K_GROUP == 0;
    uint8_t *codes_to = panel + half_scales(format) + group * 64;
    if (whole) place_words<true>(w.rows + first * row_bytes + k0 / 2, row_bytes, steps, HALF_STEP_BYTES, codes_to);
    for (int i = 0; i < 16; i++) {
      bool there = first + i < w.outputs;
      for (int64_t at = 0; at < half_scales(format) / 2; at += PANEL) {
        int64_t g = at / PANEL % (K_BLOCK / K_GROUP), half = at / PANEL / (K_BLOCK / K_GROUP);
        const uint16_t *scales = (const uint16_t *)w.scale + half * w.outputs * groups;
        uint16_t bits = there && k0 / K_GROUP + g < groups ? scales[(first + i) * groups + k0 / K_GROUP + g] : 0;
        memcpy(panel + (at + group * 16 + i) * 2, &bits, 2);
      }
      const uint8_t *row = w.rows + (first + i) * row_bytes + k0 / 2;
      uint8_t *to = codes_to + i * 4;
      for (int64_t step = 0; step < steps && !whole; step++, to += HALF_STEP_BYTES) {
        uint32_t codes = nothing;
        if (there && k0 + step * HALF_STEP < w.inputs) memcpy(&codes, row + step * 4, 4);
        codes = lane_of(codes);
        memcpy(to, &codes, 4);
      }
    }
    panel += half_scales(format) + steps * HALF_STEP_BYTES;
  }
}

void pack_group(int64_t x_type, int64_t format, const Matrix &w, int64_t scale_rows, int64_t first, int group, int64_t depth, uint8_t *panel) {
  if (format == W_BF16) x_type = X_BF16, format = W_PLAIN;
  if (format >= W_MXFP4) half_group(w, (int)format, first, group, depth, panel);
  else if (format != W_PLAIN) byte_group(w, (int)format, scale_rows, first, group, depth, panel);
  else if (x_type == X_F32) plain_group<4>(w, first, group, depth, panel);
  else if (first + 16 <= w.outputs && w.inputs == depth && depth % 8 == 0)
    place_words<false>(w.rows + first * w.inputs * 2, w.inputs * 2, depth / 2, PANEL * 4, panel + group * 64);
  else plain_group<2>(w, first, group, depth, panel);
}

}  // namespace

// One expert into `slot`. gate, up [F, D], down [D, F], contiguous: of x's type, or e4m3, or int8 (then with scales, one for
// scale_rows outputs and 128 inputs), or codes of 4 bits with scales as half_group reads them.
NATIVE_API void experts_pack(const ExpertShape *s, uint8_t *slot, const void *gate, const void *up, const void *down,
                             const float *gate_scale, const float *up_scale, const float *down_scale, int64_t scale_rows,
                             int threads) {
  Matrix of[3] = {{(const uint8_t *)gate, gate_scale, s->width, s->hidden},
                  {(const uint8_t *)up, up_scale, s->width, s->hidden},
                  {(const uint8_t *)down, down_scale, s->hidden, s->width}};
  int64_t panels = s->up_panels + s->down_panels;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < panels; n++) {
    bool up_half = n < s->up_panels;
    int64_t d = n - s->up_panels;
    uint8_t *panel = slot + (up_half ? n * s->up_bytes : s->up_panels * s->up_bytes + d * s->down_bytes);
    for (int group = 0; group < 4; group++)
      if (up_half) pack_group(s->x_type, up_format(s->format), of[group % 2], scale_rows, n * 32 + group / 2 * 16, group, s->up_depth, panel);
      else pack_group(s->x_type, down_format(s->format), of[2], scale_rows, d * PANEL + group * 16, group, s->down_depth, panel);
  }
}

// One matrix [outputs, inputs] (inputs even) of x's type, or of fewer bits with scales, into panels of 64 outputs one after
// another. packed may be weight, if that is no 8-bit one and has outputs for whole panels: a panel takes the place of its rows.
NATIVE_API void linear_packed_fill(int64_t x_type, int64_t format, uint8_t *packed, const void *weight, const float *scale, int64_t scale_rows,
                                   int64_t inputs, int64_t outputs, int threads) {
  Matrix w = {(const uint8_t *)weight, scale, outputs, inputs};
  int64_t panels = (outputs + PANEL - 1) / PANEL, bytes = Multiplier{nullptr, nullptr, x_type, format, 0}.panel_bytes(inputs);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < panels; n++) {
    uint8_t *to = packed + n * bytes, *panel = packed == weight ? scratch(bytes) : to;
    for (int group = 0; group < 4; group++) pack_group(x_type, format, w, scale_rows, n * PANEL + group * 16, group, inputs, panel);
    if (panel != to) memcpy(to, panel, bytes);
  }
}
