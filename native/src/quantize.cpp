// A matrix [outputs, inputs] as numbers of 8 bits, with a scale for 128 inputs of one output (int8) or of 128 (e4m3).
#include "quantize.h"

enum { MANY_INPUTS = 256 * HALF_INPUTS };

static const QuantizeOps *ops_for(int x_type) {
#if defined(__x86_64__)
  return vector_isa() >= ISA_AVX512 ? quantize_avx512[x_type] : quantize_avx2[x_type];
#else
  (void)x_type;
  return nullptr;
#endif
}

// x_type: 0 float32, 1 bfloat16. stride: numbers from one row to the next. y [outputs, inputs]; scale [ceil(outputs / rows of a
// scale), ceil(inputs / 128)].
NATIVE_API void weights_quantize(int x_type, int format, const void *x, int64_t stride, int64_t outputs, int64_t inputs, void *y,
                                 float *scale, int threads) {
  const QuantizeOps *ops = ops_for(x_type);
  int64_t item = x_type == 0 ? 4 : 2, rows = format == QUANTIZE_INT8 ? 1 : QUANTIZE_BLOCK;
  int64_t bands = (outputs + rows - 1) / rows, blocks = (inputs + QUANTIZE_BLOCK - 1) / QUANTIZE_BLOCK;
  float most = format == QUANTIZE_INT8 ? 127.f : 448.f;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t band = 0; band < bands; band++) {
    int64_t first = band * rows, last = first + rows < outputs ? first + rows : outputs;
    for (int64_t block = 0; block < blocks; block++) {
      int64_t start = block * QUANTIZE_BLOCK, n = inputs - start < QUANTIZE_BLOCK ? inputs - start : (int64_t)QUANTIZE_BLOCK;
      float size = 0;
      for (int64_t row = first; row < last; row++) {
        float found = ops->largest((const uint8_t *)x + (row * stride + start) * item, n);
        size = found > size || found != found ? found : size;
      }
      float unit = size / most;
      unit = unit < 1e-30f ? 1e-30f : unit;
      scale[band * blocks + block] = unit;
      for (int64_t row = first; row < last; row++) {
        const uint8_t *from = (const uint8_t *)x + (row * stride + start) * item;
        uint8_t *to = (uint8_t *)y + row * inputs + start;
        (format == QUANTIZE_INT8 ? ops->to_int8 : ops->to_fp8)(from, 1 / unit, n, to);
      }
    }
  }
}

// codes [outputs, 16 * ceil(inputs / 32)]; scale [outputs, ceil(inputs / 32)] of 16 bits.
NATIVE_API void weights_halves(int x_type, int mxfp4, const void *x, int64_t stride, int64_t outputs, int64_t inputs, uint8_t *codes,
                               uint16_t *scale, int threads) {
  const QuantizeOps *ops = ops_for(x_type);
  // Rows without anything between them, and without a group of both, are one, which is cut where many groups end.
  int64_t item = x_type == 0 ? 4 : 2, row = inputs, rows = outputs;
  if (stride == inputs && inputs % HALF_INPUTS == 0) row = MANY_INPUTS, rows = (outputs * inputs + row - 1) / row;
  const int64_t groups = (row + HALF_INPUTS - 1) / HALF_INPUTS, step = row == inputs ? stride : row;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < rows; i++) {
    const int64_t left = outputs * inputs - i * row, n = step == row && left < row ? left : row;
    (mxfp4 ? ops->to_mxfp4 : ops->to_int4)((const uint8_t *)x + i * step * item, n, codes + i * groups * (HALF_INPUTS / 2), scale + i * groups);
  }
}
